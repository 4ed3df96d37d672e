// SPDX-License-Identifier: Apache-2.0
// Products of queries with keys, directly from codes of levels or numbers.
#pragma once

#include "ahead.h"
#include "whole_levels.h"

namespace kvpress {

template <class Levels>
class LevelKeys {
 public:
  static constexpr int kRows = 2 * kLanes;  // rows handled at once

  static bool fits(int64_t bits, int64_t channels) { return bits <= Levels::kBits && CodeColumns::fits(bits, channels); }

  // For at most `tiles` tiles of four queries. With two sets of tables, a code decodes to one level of each set.
  LevelKeys(int bits, int channels, int tables, int /*tiles*/, int sets = 1)
      : channels_(channels),
        columns_(bits, channels, kRows),
        levels_{Levels(bits, tables), Levels(bits, sets > 1 ? tables : 0)} {}

  Levels& levels(int set = 0) { return levels_[set]; }

  // Set queries [tiles, channels], four per element. They are not copied.
  void take(const Quad* queries, int /*tiles*/) { queries_ = queries; }

  // Load up to kRows rows.
  void load(const uint8_t* const* rows, int count) { columns_.load(rows, count); }

  // out[i, t] += scale[t] * product of query i of a tile with channels [begin, end) of row t, for the first kQueries queries.
  // `begin` and `end` are multiples of four; out [kQueries, stride]. Every four channels advance `ahead` by one step.
  template <int kQueries>
  void multiply(int tile, int begin, int end, const float* scale, float* out, int stride, Ahead& ahead, int set = 0) const {
    const float* const queries = reinterpret_cast<const float*>(queries_ + tile * channels_);
    columns_.with_width([&](auto three) {
      multiply<kQueries, three>(queries, begin, end, scale, out, stride, ahead, levels_[set]);
    });
  }

  // The same for four queries and the first 2 * `half` channels of keys that are rotated on the fly, without scales. The cosine
  // of pair i and row t is angles[i * step + t]; its sine is `sine` elements later.
  void multiply_rotated(const float* queries, int half, const float* angles, int64_t step, int64_t sine, float* out,
                        int stride, Ahead& ahead) const {
    columns_.with_width([&](auto three) { multiply_rotated<three>(queries, half, angles, step, sine, out, stride, ahead); });
  }

 private:
  template <int kQueries, bool kThree>
  __attribute__((noinline)) void multiply(const float* queries, int begin, int end, const float* scale, float* out,
                                          int stride, Ahead& ahead, const Levels& levels) const {
    F sums[kQueries][2];
    unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA { sums[i][0] = sums[i][1] = set1(0.f); });
    for (int c = begin; c < end; c += 4) {
      ahead.next_lines();
      const Words a = columns_.read<kThree>(c / 4, 0), b = columns_.read<kThree>(c / 4, kLanes);
      unrolled<4>([&](auto j) KVPRESS_INLINE_LAMBDA {
        const F x = levels.template level<kThree>(c + j, a >> 8 * j), y = levels.template level<kThree>(c + j, b >> 8 * j);
        add_products<kQueries>(x, y, queries + 4 * (c + j), sums);
      });
    }
    unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
      unrolled<2>([&](auto v) KVPRESS_INLINE_LAMBDA {
        float* at = out + i * stride + v * kLanes;
        store(at, fma(sums[i][v], ::kvpress::load(scale + v * kLanes), ::kvpress::load(at)));
      });
    });
  }

  template <bool kThree>
  __attribute__((noinline)) void multiply_rotated(const float* queries, int half, const float* angles, int64_t step,
                                                  int64_t sine, float* out, int stride, Ahead& ahead) const {
    F sums[4][2];
    unrolled<4>([&](auto i) KVPRESS_INLINE_LAMBDA { sums[i][0] = sums[i][1] = set1(0.f); });
    for (int c = 0; c < half; c += 4) {
      ahead.next_lines();
      const Words a[] = {columns_.read<kThree>(c / 4, 0), columns_.read<kThree>(c / 4, kLanes)};
      const Words b[] = {columns_.read<kThree>((half + c) / 4, 0), columns_.read<kThree>((half + c) / 4, kLanes)};
      unrolled<4>([&](auto j) KVPRESS_INLINE_LAMBDA {
        const int low = c + j, high = half + low;
        F x[2], y[2];
        unrolled<2>([&](auto v) KVPRESS_INLINE_LAMBDA {
          const float* at = angles + low * step + v * kLanes;
          const F cosine = ::kvpress::load(at), sines = ::kvpress::load(at + sine);
          const F first = levels_[0].template level<kThree>(low, a[v] >> 8 * j);
          const F second = levels_[0].template level<kThree>(high, b[v] >> 8 * j);
          x[v] = sub(mul(first, cosine), mul(second, sines));
          y[v] = fma(second, cosine, mul(first, sines));
        });
        add_products<4>(x[0], x[1], queries + 4 * low, sums);
        add_products<4>(y[0], y[1], queries + 4 * high, sums);
      });
    }
    unrolled<4>([&](auto i) KVPRESS_INLINE_LAMBDA {
      unrolled<2>([&](auto v) KVPRESS_INLINE_LAMBDA {
        float* at = out + i * stride + v * kLanes;
        store(at, add(::kvpress::load(at), sums[i][v]));
      });
    });
  }

  template <int kQueries>
  static KVPRESS_INLINE void add_products(F x, F y, const float* q, F (&sums)[kQueries][2]) {
    unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
      const F query = set1(q[i]);
      sums[i][0] = fma(x, query, sums[i][0]), sums[i][1] = fma(y, query, sums[i][1]);
    });
  }

  const int channels_;
  const Quad* queries_ = nullptr;
  CodeColumns columns_;
  Levels levels_[2];
};

#if defined(KVPRESS_WHOLE_LEVELS)
// The same with queries and levels rounded to integers, and without rotation.
template <>
class LevelKeys<WholeLevels> {
 public:
  static constexpr int kRows = 2 * kLanes;

  static bool fits(int64_t bits, int64_t channels) { return bits <= WholeLevels::kBits && CodeColumns::fits(bits, channels); }

  LevelKeys(int bits, int channels, int tables, int tiles, int /*sets*/ = 1)
      : channels_(channels),
        columns_(bits, channels, kRows),
        levels_{WholeLevels(bits, tables), WholeLevels(bits, tables)},
        whole_(tiles * channels * 4),
        unit_(tiles * 4) {}

  WholeLevels& levels(int set = 0) { return levels_[set]; }

  void take(const Quad* queries, int tiles) {
    for (int tile = 0; tile < tiles; ++tile, queries += channels_)
      for (int i = 0; i < 4; ++i) {
        float largest = 0, sum = 0;
        for (int c = 0; c < channels_; ++c) {
          const float magnitude = std::abs(queries[c][i]);
          largest = std::max(largest, magnitude), sum += magnitude;
        }
        const FactorUnit unit(largest, sum, channels_);
        unit_[4 * tile + i] = unit.unit();
        for (int c = 0; c < channels_; ++c) *place(tile, i, c) = int16_t(std::lrint(queries[c][i] * unit.inverse()));
      }
  }

  void load(const uint8_t* const* rows, int count) { columns_.load(rows, count); }

  template <int kQueries>
  void multiply(int tile, int begin, int end, const float* scale, float* out, int stride, Ahead& ahead, int set = 0) const {
    columns_.with_width([&](auto three) {
      multiply<kQueries, three>(tile, begin, end, scale, out, stride, ahead, levels_[set]);
    });
  }

 private:
  // Query i of a tile at channel c, in the layout [channels / 4, four queries, four channels].
  int16_t* place(int tile, int i, int c) const { return whole_ + ((tile * channels_ + c / 4 * 4) + i) * 4 + c % 4; }

  template <int kQueries, bool kThree>
  __attribute__((noinline)) void multiply(int tile, int begin, int end, const float* scale, float* out, int stride,
                                          Ahead& ahead, const WholeLevels& given) const {
    const WholeLevels levels = given;
    for (int t = 0; t < kRows; t += kLanes) {
      Words sums[kQueries][2];
      unrolled<2 * kQueries>([&](auto j) KVPRESS_INLINE_LAMBDA { sums[j / 2][j % 2] = Words{}; });
      const int16_t* queries = place(tile, 0, begin);
      for (int c = begin; c < end; c += 4, queries += 16) {
        Words found[2];
        if (t == 0) ahead.next_lines();
        levels.look_up(columns_.read<kThree>(c / 4, t), found);
        unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
          const Words query = repeat_four(queries + 4 * i);
          add_pairs(sums[i][0], found[0], query), add_pairs(sums[i][1], found[1], query);
        });
      }
      unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
        const F product = (F)__builtin_convertvector(add_neighbours(sums[i][0], sums[i][1]), Floats);
        const F unit = mul(::kvpress::load(scale + t), set1(unit_[4 * tile + i] * levels.unit()));
        float* const at = out + i * stride + t;
        store(at, fma(product, unit, ::kvpress::load(at)));
      });
    }
  }

  const int channels_;
  CodeColumns columns_;
  WholeLevels levels_[2];
  Buffer<int16_t> whole_;  // [tiles, channels / 4, 4, 4]: four channels of each of four queries
  Buffer<float> unit_;     // [tiles, 4]
};
#endif

}  // namespace kvpress
