// SPDX-License-Identifier: Apache-2.0
// Online softmax: turns logits into weights, with a running maximum and sum per query.
#pragma once

#include <algorithm>
#include <cmath>

#include "buffer.h"
#include "dense.h"

namespace kvpress {

constexpr float kLog2e = 1.44269504088896f;
constexpr float kLn2 = 0.69314718055995f;

// Call use(t, log-weight) for each of `count` rows; never where pairs have none.
template <class RowNumbers, class Use>
KVPRESS_INLINE void for_log_weights(const Attention& p, const RowNumbers& rows, int count, Use&& use) {
  const auto each = [&](const auto* weights) KVPRESS_INLINE_LAMBDA {
    for (int t = 0; t < count; ++t) use(t, to_float(weights[rows[t]]));
  };
  if (!p.log_weight) return;
  if (p.weight_dtype == kFloat16)
    each(static_cast<const f16*>(p.log_weight));
  else
    each(static_cast<const float*>(p.log_weight));
}

// p[m, t] = exp(logit - running maximum), computed in base two.
class Softmax {
 public:
  explicit Softmax(const Problem& problem)
      : p_(problem), log_weights_(kScoreStride), max_(problem.queries), sum_(problem.queries) {}

  void begin() {
    std::fill_n(static_cast<float*>(max_), p_.queries, -INFINITY);
    std::fill_n(static_cast<float*>(sum_), p_.queries, 0.f);
  }

  void load_log_weights(const int64_t* rows, int count) {
    for_log_weights(p_, rows, count, [&](int t, float weight) { log_weights_[t] = weight; });
  }

  // Turn logits into weights; only the first `visible` of `count` rows get one. Return the factor by which everything
  // accumulated so far must be scaled.
  float weigh(int64_t m, float* logits, int visible, int count) {
    const int padded = round_up(count, 32);
    const bool plain = !p_.log_weight && p_.softcap == 0 && p_.scale > 0;
    if (!plain) to_base_two(logits, padded);
    std::fill(logits + visible, logits + padded, -INFINITY);
    const float scale = plain ? float(p_.scale) * kLog2e : 1.f;
    F best = set1(-INFINITY);
    for (int t = 0; t < padded; t += kLanes) best = max(best, load(logits + t));
    const float next = std::max(max_[m], scale * max_lane(best));
    if (next == -INFINITY) {
      if (std::any_of(logits, logits + visible, [](float x) { return std::isnan(x); })) sum_[m] = NAN;
      std::fill_n(logits, padded, 0.f);
      return 1.f;
    }
    F total = set1(0.f);
    for (int t = 0; t < padded; t += kLanes) {
      const F weight = exp2<true>(fma(load(logits + t), set1(scale), set1(-next)));
      store(logits + t, weight);
      total = add(total, weight);
    }
    const float keep = std::exp2(max_[m] - next);
    max_[m] = next;
    sum_[m] = sum_[m] * keep + sum(total);
    return keep;
  }

  float inverse_sum(int64_t m) const { return sum_[m] == 0 ? 0.f : 1.f / sum_[m]; }
  float lse(int64_t m) const { return sum_[m] == 0 ? -INFINITY : (max_[m] + std::log2(sum_[m])) * kLn2; }

 private:
  void to_base_two(float* logits, int padded) const {
    for (int t = 0; t < padded; t += kLanes) {
      F x = mul(load(logits + t), set1(float(p_.scale)));
      if (p_.softcap != 0) x = mul(set1(float(p_.softcap)), tanh(mul(x, set1(float(1 / p_.softcap)))));
      if (p_.log_weight) x = add(x, load(log_weights_ + t));
      store(logits + t, mul(x, set1(kLog2e)));
    }
  }

  static F tanh(F x) {
    const F e = exp2(mul(max(min(x, set1(15.f)), set1(-15.f)), set1(2 * kLog2e)));
    return sub(set1(1.f), div(set1(2.f), add(e, set1(1.f))));
  }

  const Problem& p_;
  Buffer<float> log_weights_, max_, sum_;
};

}  // namespace kvpress
