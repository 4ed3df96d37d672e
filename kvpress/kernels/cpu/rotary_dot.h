// SPDX-License-Identifier: Apache-2.0
// Products of queries with keys that are rotated on the way.
#pragma once

#include "codebook.h"

namespace kvpress {

// Four queries times keys that stand at positions. Rotating a key by the angles of its position is rotating it by the
// fine ones, and the queries by the coarse ones backwards: once for all rows in a block of kStep positions.
class RotaryDot {
 public:
  explicit RotaryDot(const CodedProblem& p)
      : p_(p),
        half_(int(p.rotary / 2)),
        rest_(int(p.keys.channels() - p.rotary)),
        high_(round_up(half_, kLanes)),
        width_(2 * high_ + round_up(rest_, kLanes)),
        queries_(4 * width_),
        turned_(4 * width_) {}

  // Takes queries by channel.
  void begin(const Quad* queries) {
    const int first[] = {0, half_, 2 * half_}, size[] = {half_, half_, rest_};
    for (int i = 0; i < 4; ++i)
      for (int part = 0; part < 3; ++part)
        for (int c = 0; c < size[part]; ++c)
          queries_[i * width_ + part * high_ + c] = queries[first[part] + c][i];
    std::copy_n(static_cast<float*>(queries_), 4 * width_, static_cast<float*>(turned_));
    block_ = ~uint64_t(0);
  }

  // out[i] = products with the key at keys + i * stride. After its channels a key has zeros, a vector of them at least.
  void multiply(const float* keys, int stride, const uint64_t* positions, int count, Quad* out) {
    for (int i = 0; i < count;) {
      const uint64_t block = positions[i] / kStep;
      turn_queries(block);
      int end = i + 1;
      while (end < count && positions[end] / kStep == block) ++end;
      for (; i + 4 <= end; i += 4) multiply_rows<4>(keys + i * stride, stride, positions + i, out + i);
      for (; i < end; ++i) multiply_rows<1>(keys + i * stride, stride, positions + i, out + i);
    }
  }

 private:
  void turn_queries(uint64_t block) {
    if (block == block_) return;
    block_ = block;
    const float* cos = p_.coarse + block * 2 * half_;
    for_pairs([&](int c, auto read) KVPRESS_INLINE_LAMBDA {
      const F cosine = read(cos + c), sine = read(cos + half_ + c);
      for (int i = 0; i < 4; ++i) {
        const float* q = queries_ + i * width_ + c;
        const F low = load(q), high = load(q + high_);
        store(turned_ + i * width_ + c, fma(low, cosine, mul(high, sine)));
        store(turned_ + i * width_ + high_ + c, sub(mul(high, cosine), mul(low, sine)));
      }
    });
  }

  template <int kRows>
  KVPRESS_APART void multiply_rows(const float* keys, int stride, const uint64_t* positions, Quad* out) const {
    const float *q = turned_, *angles[kRows];
    F sums[kRows][4];
    unrolled<kRows>([&](auto r) KVPRESS_INLINE_LAMBDA {
      angles[r] = p_.fine + positions[r] % kStep * 2 * half_;
      unrolled<4>([&](auto i) KVPRESS_INLINE_LAMBDA { sums[r][i] = set1(0.f); });
    });
    for_pairs([&](int c, auto read) KVPRESS_INLINE_LAMBDA {
      F low[kRows], high[kRows];
      unrolled<kRows>([&](auto r) KVPRESS_INLINE_LAMBDA {
        const F cosine = read(angles[r] + c), sine = read(angles[r] + half_ + c);
        const F a = load(keys + r * stride + c), b = load(keys + r * stride + half_ + c);
        low[r] = sub(mul(a, cosine), mul(b, sine)), high[r] = fma(b, cosine, mul(a, sine));
      });
      unrolled<4>([&](auto i) KVPRESS_INLINE_LAMBDA {
        const F ql = load(q + i * width_ + c), qh = load(q + i * width_ + high_ + c);
        unrolled<kRows>([&](auto r) KVPRESS_INLINE_LAMBDA {
          sums[r][i] = fma(high[r], qh, fma(low[r], ql, sums[r][i]));
        });
      });
    });
    for (int c = 0; c < rest_; c += kLanes)
      unrolled<4>([&](auto i) KVPRESS_INLINE_LAMBDA {
        const F x = load(q + i * width_ + 2 * high_ + c);
        unrolled<kRows>([&](auto r) KVPRESS_INLINE_LAMBDA {
          sums[r][i] = fma(load(keys + r * stride + 2 * half_ + c), x, sums[r][i]);
        });
      });
    unrolled<kRows>([&](auto r) KVPRESS_INLINE_LAMBDA {
      store_sums(reinterpret_cast<float*>(out + r), sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    });
  }

  // Calls step(first channel, how to read a vector of angles) for the pairs that are rotated.
  template <class Step>
  KVPRESS_INLINE void for_pairs(Step&& step) const {
    int c = 0;
    for (; c + kLanes <= half_; c += kLanes) step(c, [](const float* p) KVPRESS_INLINE_LAMBDA { return load(p); });
    const int left = half_ - c;
    if (left) step(c, [left](const float* p) KVPRESS_INLINE_LAMBDA { return load_part(p, left); });
  }

  const CodedProblem& p_;
  const int half_, rest_;
  const int high_, width_;  // of a query: where the second channels of pairs begin, and where the next query does
  uint64_t block_ = 0;      // that turned_ is for
  Buffer<float> queries_, turned_;
};

}  // namespace kvpress
