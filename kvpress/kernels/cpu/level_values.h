// SPDX-License-Identifier: Apache-2.0
// Weighted sums of values whose codes stand for levels or numbers, straight from the codes.
#pragma once

#include "levels.h"

namespace kvpress {

template <class Levels>
class LevelValues {
 public:
  static bool fits(int64_t bits, int64_t channels) { return bits <= Levels::kBits && CodeColumns::fits(bits, channels); }

  LevelValues(int bits, int channels, int tables) : columns_(bits, channels, kChunk), levels_(bits, tables) {}

  Levels& levels() { return levels_; }

  // Takes up to kChunk rows.
  void load(const uint8_t* const* rows, int count) { columns_.load(rows, count); }

  // acc[i, c] += sum over the rows of weights[i, t] * channel c of row t, for the channels from `begin` to `end`, both
  // multiples of four. Weights [kQueries, kScoreStride] are zero from `count` to the next multiple of kLanes.
  template <int kQueries>
  void mix(const float* weights, int count, int begin, int end, float* acc, int acc_stride) const {
    columns_.with_width([&](auto three) { mix<kQueries, three>(weights, count, begin, end, acc, acc_stride); });
  }

 private:
  template <int kQueries, bool kThree>
  __attribute__((noinline)) void mix(const float* weights, int count, int begin, int end, float* acc, int acc_stride) const {
    constexpr int kWidth = kLanes == 16 ? 4 : 2;  // channels at once: their sums fill the register file
    for (int c = begin; c < end; c += 4)
      unrolled<4 / kWidth>([&](auto part) KVPRESS_INLINE_LAMBDA {
        F sums[kWidth][4];
        unrolled<4 * kWidth>([&](auto k) KVPRESS_INLINE_LAMBDA { sums[k / 4][k % 4] = set1(0.f); });
        for (int t = 0; t < count; t += kLanes) {
          const Words word = columns_.read<kThree>(c / 4, t);
          F weight[kQueries];
          unrolled<kQueries>(
              [&](auto i) KVPRESS_INLINE_LAMBDA { weight[i] = ::kvpress::load(weights + i * kScoreStride + t); });
          unrolled<kWidth>([&](auto k) KVPRESS_INLINE_LAMBDA {
            const int j = part * kWidth + k;
            const F x = levels_.template level<kThree>(c + j, word >> 8 * j);
            unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA { sums[k][i] = fma(weight[i], x, sums[k][i]); });
          });
        }
        unrolled<kWidth>([&](auto k) KVPRESS_INLINE_LAMBDA {
          float found[4];
          store_sums(found, sums[k][0], sums[k][1], sums[k][2], sums[k][3]);
          for (int i = 0; i < kQueries; ++i) acc[i * acc_stride + c + part * kWidth + k] += found[i];
        });
      });
  }

  CodeColumns columns_;
  Levels levels_;
};

}  // namespace kvpress
