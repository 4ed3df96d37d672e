// SPDX-License-Identifier: Apache-2.0
// Turns products into base-two logits, for operators that keep logits in registers.
#pragma once

#include "softmax.h"

namespace kvpress {

// Logit in base two: product times factor(), capped if there is a soft cap.
class BaseTwo {
 public:
  BaseTwo(double scale, double softcap)
      : capped_(softcap != 0),
        before_(float(capped_ ? 2 * kLog2e * scale / softcap : scale * kLog2e)),
        after_(float(softcap * kLog2e)) {}

  // Factor of the products, or of the queries before them.
  float factor() const { return before_; }
  bool capped() const { return capped_; }

  // Return the logit of a product that has been multiplied by factor().
  KVPRESS_INLINE F finish(F x) const {
    if (!capped_) return x;
    // tanh(y) = 1 - 2 / (exp(2 y) + 1); the factor makes x = 2 y log2(e). tanh is 1 in float32 for x above 44.
    const F e = exp2(max(min(x, set1(44.f)), set1(-44.f)));
    return mul(set1(after_), sub(set1(1.f), div(set1(2.f), add(e, set1(1.f)))));
  }

 private:
  bool capped_;
  float before_, after_;
};

}  // namespace kvpress
