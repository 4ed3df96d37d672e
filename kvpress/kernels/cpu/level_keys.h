// SPDX-License-Identifier: Apache-2.0
// Products of queries with keys whose codes stand for levels or numbers, straight from the codes.
#pragma once

#include "levels.h"

namespace kvpress {

template <class Levels>
class LevelKeys {
 public:
  static constexpr int kRows = 2 * kLanes;  // worked on at once

  static bool fits(int64_t bits, int64_t channels) { return bits <= Levels::kBits && CodeColumns::fits(bits, channels); }

  // A code may stand for a level in each of two sets of tables.
  LevelKeys(int bits, int channels, int tables, int sets = 1)
      : columns_(bits, channels, kRows), levels_{Levels(bits, tables), Levels(bits, sets > 1 ? tables : 0)} {}

  Levels& levels(int set = 0) { return levels_[set]; }

  // Takes up to kRows rows.
  void load(const uint8_t* const* rows, int count) { columns_.load(rows, count); }

  // out[i, t] += scale[t] * product of query i with the channels from `begin` to `end` of row t, both multiples of four.
  // Queries [channels, 4], of which the first kQueries count; out [kQueries, stride].
  template <int kQueries>
  void multiply(const float* queries, int begin, int end, const float* scale, float* out, int stride, int set = 0) const {
    columns_.with_width([&](auto three) {
      multiply<kQueries, three>(queries, begin, end, scale, out, stride, levels_[set]);
    });
  }

  // The same for the first 2 `half` channels of keys that are rotated on the way, without scales. The cosine of pair i and
  // row t is at angles[i * step + t], its sine `sine` after it.
  void multiply_rotated(const float* queries, int half, const float* angles, int64_t step, int64_t sine, float* out,
                        int stride) const {
    columns_.with_width([&](auto three) { multiply_rotated<three>(queries, half, angles, step, sine, out, stride); });
  }

 private:
  template <int kQueries, bool kThree>
  __attribute__((noinline)) void multiply(const float* queries, int begin, int end, const float* scale, float* out,
                                          int stride, const Levels& levels) const {
    F sums[kQueries][2];
    unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA { sums[i][0] = sums[i][1] = set1(0.f); });
    for (int c = begin; c < end; c += 4) {
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
                                                  int64_t sine, float* out, int stride) const {
    F sums[4][2];
    unrolled<4>([&](auto i) KVPRESS_INLINE_LAMBDA { sums[i][0] = sums[i][1] = set1(0.f); });
    for (int c = 0; c < half; c += 4) {
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

  CodeColumns columns_;
  Levels levels_[2];
};

}  // namespace kvpress
