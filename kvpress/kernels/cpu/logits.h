// SPDX-License-Identifier: Apache-2.0
// What stands between a product and its softmax, for the operators that keep logits in registers.
#pragma once

#include "softmax.h"

namespace kvpress {

// Multiply products by `before`, cap them when asked to, and multiply by `after`: a logit in base two.
class BaseTwo {
 public:
  BaseTwo(double scale, double softcap)
      : capped_(softcap != 0),
        before_(float(capped_ ? 2 * kLog2e * scale / softcap : scale * kLog2e)),
        after_(float(softcap * kLog2e)) {}

  // What products, or the queries before them, are multiplied by.
  float factor() const { return before_; }
  bool capped() const { return capped_; }

  // The logit of a product that carries the factor already.
  KVPRESS_INLINE F finish(F x) const {
    if (!capped_) return x;
    // tanh(y) = 1 - 2 / (exp(2 y) + 1); the factor makes x = 2 y log2(e). Past 44 tanh is one in float32.
    const F e = exp2(max(min(x, set1(44.f)), set1(-44.f)));
    return mul(set1(after_), sub(set1(1.f), div(set1(2.f), add(e, set1(1.f)))));
  }

 private:
  bool capped_;
  float before_, after_;
};

}  // namespace kvpress
