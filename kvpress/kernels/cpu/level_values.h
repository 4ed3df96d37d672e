// SPDX-License-Identifier: Apache-2.0
// Weighted sums of values, directly from codes of levels or numbers.
#pragma once

#include "ahead.h"
#include "whole_levels.h"

namespace kvpress {

template <class Levels>
class LevelValues {
 public:
  static bool fits(int64_t bits, int64_t channels) { return bits <= Levels::kBits && CodeColumns::fits(bits, channels); }

  LevelValues(int bits, int channels, int tables) : columns_(bits, channels, kChunk), levels_(bits, tables) {}

  Levels& levels() { return levels_; }

  // Load up to kChunk rows.
  void load(const uint8_t* const* rows, int count) { columns_.load(rows, count); }

  // acc[i, c] += sum over the rows of weights[i, t] * channel c of row t, for channels [begin, end), both multiples of four.
  // Weights [kQueries, kScoreStride] are zero from `count` to the next multiple of kLanes. Every four channels advance `ahead`
  // by one step of several lines.
  template <int kQueries>
  void mix(const float* weights, int count, int begin, int end, float* acc, int acc_stride, Ahead& ahead) const {
    columns_.with_width([&](auto three) { mix<kQueries, three>(weights, count, begin, end, acc, acc_stride, ahead); });
  }

 private:
  template <int kQueries, bool kThree>
  __attribute__((noinline)) void mix(const float* weights, int count, int begin, int end, float* acc, int acc_stride,
                                     Ahead& ahead) const {
    constexpr int kWidth = kLanes == 16 ? 4 : 2;  // channels at once: their sums fill the registers
    for (int c = begin; c < end; c += 4) {
      ahead.next_lines();
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
  }

  CodeColumns columns_;
  Levels levels_;
};

#if defined(KVPRESS_WHOLE_LEVELS)
// The same with weights and levels rounded to integers.
template <>
class LevelValues<WholeLevels> {
 public:
  static bool fits(int64_t bits, int64_t channels) { return bits <= WholeLevels::kBits && CodeColumns::fits(bits, channels); }

  LevelValues(int bits, int channels, int tables)
      : columns_(bits, channels, kChunk), levels_(bits, tables), whole_(4 * kWholeStride) {}

  WholeLevels& levels() { return levels_; }

  // Load rows with neighbouring rows side by side, so that one instruction adds their products.
  void load(const uint8_t* const* rows, int count) {
    columns_.load(rows, count);
    columns_.change(count, [](Words words) KVPRESS_INLINE_LAMBDA { return transpose_fours(words); });
  }

  template <int kQueries>
  void mix(const float* weights, int count, int begin, int end, float* acc, int acc_stride, Ahead& ahead) const {
    float unit[kQueries];
    for (int i = 0; i < kQueries; ++i)
      unit[i] = round_weights(weights + i * kScoreStride, count, whole_ + i * kWholeStride) * levels_.unit();
    columns_.with_width([&](auto three) { mix_whole<kQueries, three>(unit, count, begin, end, acc, acc_stride, ahead); });
  }

 private:
  static constexpr int kWholeStride = 2 * (kChunk + 2 * kLanes);

  // Round weights to integers and return their unit.
  static float round_weights(const float* weights, int count, int16_t* out) {
    F largest = set1(0.f), sums = set1(0.f);
    for (int t = 0; t < count; t += kLanes) {
      const F magnitude = abs(::kvpress::load(weights + t));
      largest = max(largest, magnitude), sums = add(sums, magnitude);
    }
    const FactorUnit unit(max_lane(largest), sum(sums), round_up(count, kLanes));
    const F inverse = set1(unit.inverse());
    for (int t = 0; t < count; t += 2 * kLanes)
      put_fours_twice(mul(::kvpress::load(weights + t), inverse), mul(::kvpress::load(weights + t + kLanes), inverse),
                      out + 2 * t);
    return unit.unit();
  }

  template <int kQueries, bool kThree>
  __attribute__((noinline)) void mix_whole(const float* unit, int count, int begin, int end, float* acc, int acc_stride,
                                           Ahead& ahead) const {
    const WholeLevels levels = levels_;
    for (int c = begin; c < end; c += 4) {
      ahead.next_lines();
      Words sums[kQueries][2];
      unrolled<2 * kQueries>([&](auto j) KVPRESS_INLINE_LAMBDA { sums[j / 2][j % 2] = Words{}; });
      const int16_t* whole = whole_;
      for (int t = 0; t < count; t += kLanes, whole += 2 * kLanes) {
        Words found[2];
        levels.look_up(columns_.read<kThree>(c / 4, t), found);
        unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
          Words weight;
          std::memcpy(&weight, whole + i * kWholeStride, sizeof weight);
          add_pairs(sums[i][0], found[0], weight), add_pairs(sums[i][1], found[1], weight);
        });
      }
      unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
        const __m128 product = _mm_cvtepi32_ps(add_quads(add_neighbours(sums[i][0], sums[i][1])));
        float* const at = acc + i * acc_stride + c;
        _mm_storeu_ps(at, _mm_add_ps(_mm_loadu_ps(at), _mm_mul_ps(product, _mm_set1_ps(unit[i]))));
      });
    }
  }

  CodeColumns columns_;
  WholeLevels levels_;
  Buffer<int16_t> whole_;  // [4, kWholeStride]: weights, each group of four stored twice
};
#endif

}  // namespace kvpress
