// SPDX-License-Identifier: Apache-2.0
// Products of queries with keys that are rotated on the fly.
#pragma once

#include "centroids.h"

namespace kvpress {

// Four queries times keys at positions. A key is rotated only by the fine angles of its position. The coarse rotation is
// applied to the queries instead, backwards: once for all rows in a block of kStep positions.
class RotaryDot {
 public:
  explicit RotaryDot(const CodedProblem& p)
      : p_(p),
        half_(int(p.rotary / 2)),
        channels_(int(p.keys.channels())),
        pairs_(round_up(half_, kLanes) / kLanes),
        width_(4 * (2 * pairs_ * kLanes + round_up(channels_ - 2 * half_, kLanes))),
        queries_(width_),
        turned_(width_) {}

  // Set queries, by channel.
  void begin(const Quad* queries) {
    std::fill_n(static_cast<float*>(queries_), width_, 0.f);
    const auto put = [&](int vector, int lane, Quad each) {
      for (int i = 0; i < 4; ++i) queries_[(4 * vector + i) * kLanes + lane] = each[i];
    };
    for (int c = 0; c < half_; ++c) {
      put(2 * (c / kLanes), c % kLanes, queries[c]);
      put(2 * (c / kLanes) + 1, c % kLanes, queries[half_ + c]);
    }
    for (int c = 0; c < channels_ - 2 * half_; ++c) put(2 * pairs_ + c / kLanes, c % kLanes, queries[2 * half_ + c]);
    std::copy_n(static_cast<float*>(queries_), width_, static_cast<float*>(turned_));
    block_ = ~uint64_t(0);
  }

  // Return whether the halves of the rotated channels, and all channels, are multiples of `step`.
  bool aligned(int step) const { return half_ % step == 0 && channels_ % step == 0; }

  // out[i] = products with key i. Keys that are not aligned must be followed by zeros, at least a full vector of them.
  template <class Keys>
  void multiply(const Keys& keys, Positions positions, int count, Quad* out) {
    if (!half_) return multiply_rows<0>(keys, 0, count, positions, out);
    const bool plain = half_ % kLanes == 0 && channels_ == 2 * half_;
    positions.for_blocks(count, [&](uint64_t block, int first, int end) {
      turn_queries(block);
      switch (plain ? pairs_ : 0) {
        case 2:
          return multiply_rows<2>(keys, first, end, positions, out);
        case 4:
          return multiply_rows<4>(keys, first, end, positions, out);
        case 8:
          return multiply_rows<8>(keys, first, end, positions, out);
        default:
          multiply_rows<0>(keys, first, end, positions, out);
      }
    });
  }

 private:
  void turn_queries(uint64_t block) {
    if (block == block_) return;
    block_ = block;
    for_pairs(p_.coarse + block * 2 * half_, [&](int c, F cosine, F sine) KVPRESS_INLINE_LAMBDA {
      const float* q = queries_ + 8 * c;
      float* out = turned_ + 8 * c;
      for (int i = 0; i < 4; ++i, q += kLanes, out += kLanes) {
        const F low = load(q), high = load(q + 4 * kLanes);
        store(out, fma(low, cosine, mul(high, sine)));
        store(out + 4 * kLanes, sub(mul(high, cosine), mul(low, sine)));
      }
    });
  }

  // For keys of kPairs vectors of pairs and no other channels; kPairs = 0 for all other keys.
  template <int kPairs, class Keys>
  KVPRESS_APART void multiply_rows(const Keys keys, int first, int end, Positions positions, Quad* out) const {
    const int half = kPairs ? kPairs * kLanes : half_, channels = kPairs ? 2 * half : channels_;
    const int whole = half / kLanes * kLanes;
    const float *fine = p_.fine, *turned = turned_;
    for (int r = first; r < end; ++r) {
      F sums[4];
      unrolled<4>([&](auto i) KVPRESS_INLINE_LAMBDA { sums[i] = set1(0.f); });
      const float *cosines = fine + positions[r] % kStep * 2 * half, *sines = cosines + half, *q = turned;
      auto low = keys.cursor(r, 0), high = keys.cursor(r, half);
      const auto add_pairs = [&](F a, F b, F cosine, F sine) KVPRESS_INLINE_LAMBDA {
        const F x = sub(mul(a, cosine), mul(b, sine)), y = fma(b, cosine, mul(a, sine));
        unrolled<4>([&](auto i) KVPRESS_INLINE_LAMBDA {
          sums[i] = fma(y, load(q + (4 + i) * kLanes), fma(x, load(q + i * kLanes), sums[i]));
        });
        q += 8 * kLanes;
      };
      for (int c = 0; c < whole; c += Keys::kVectors * kLanes, low.advance(), high.advance())
        unrolled<Keys::kVectors>([&](auto v) KVPRESS_INLINE_LAMBDA {
          const int at = c + v * kLanes;
          add_pairs(low.template read<v>(), high.template read<v>(), load(cosines + at), load(sines + at));
        });
      if (const int left = half - whole) {
        const F cosine = load_part(cosines + whole, left), sine = load_part(sines + whole, left);
        add_pairs(low.template read<0>(), high.template read<0>(), cosine, sine);
      }
      auto rest = keys.cursor(r, 2 * half);
      for (int c = 2 * half; c < channels; c += Keys::kVectors * kLanes, rest.advance())
        unrolled<Keys::kVectors>([&](auto v) KVPRESS_INLINE_LAMBDA {
          const F x = rest.template read<v>();
          unrolled<4>([&](auto i) KVPRESS_INLINE_LAMBDA { sums[i] = fma(x, load(q + i * kLanes), sums[i]); });
          q += 4 * kLanes;
        });
      store_sums(reinterpret_cast<float*>(out + r), sums[0], sums[1], sums[2], sums[3]);
    }
  }

  // Call step(first channel, cosines, sines) for a vector of pairs at a time.
  template <class Step>
  KVPRESS_INLINE void for_pairs(const float* angles, Step&& step) const {
    int c = 0;
    for (; c + kLanes <= half_; c += kLanes) step(c, load(angles + c), load(angles + half_ + c));
    const int left = half_ - c;
    if (left) step(c, load_part(angles + c, left), load_part(angles + half_ + c, left));
  }

  const CodedProblem& p_;
  const int half_, channels_;
  const int pairs_, width_;  // vectors of pairs; numbers of all queries
  uint64_t block_ = 0;       // block of positions that turned_ is rotated for
  // By vector of channels, then by query: first and second channels of pairs, then the channels that are not rotated.
  Buffer<float> queries_, turned_;
};

}  // namespace kvpress
