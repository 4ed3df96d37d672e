// SPDX-License-Identifier: Apache-2.0
// Logits of quantised keys with scales per channel and group of rows, or with one scale per row.
#pragma once

#include "ahead.h"
#include "integer_dot.h"
#include "words.h"

#if defined(KVPRESS_INTEGERS)
namespace kvpress {

class IntegerKeys {
  static constexpr f16 kOne{0x3c00};
  static constexpr int kMaxChannels = 512;  // a constant distance between queries makes them addressable by offset

 public:
  static bool fits(const Rows& side) {
    const bool numbers = side.dtype == kFloat16 && !side.levels && (side.zero || by_row(side));
    if (kWholeFactors && WholeCodes::plane_of(side).bytes % 2) return false;  // pairs of factors begin at even channels
    return numbers && (side.group_channels == 1 || by_row(side)) && side.channels <= kMaxChannels;
  }

  // True if every row has one scale and one zero: queries are then folded once for all rows.
  static bool by_row(const Rows& side) { return side.group_channels == side.channels && side.group_rows == 1; }

  IntegerKeys(const PackedRows& rows, int64_t queries)
      : rows_(rows),
        codes_(rows, kTile),
        queries_(int(queries)),
        stride_(round_up(rows.side().channels, kQueryPad)),
        largest_(stride_),
        zero_dot_(queries),
        bytes_(queries * 2 * kMaxChannels + 64),
        columns_(round_up(codes_.plane().bytes, kBlock) / 4),
        sums_(queries * kLanes),
        ones_(round_up(rows.side().channels, 2 * kLanes)),
        by_row_(by_row(rows.side())),
        zero_point_(float(rows.side().zero_point)),
        // No sum of products may exceed 32 bits.
        range_(std::min(kIntRange, float(INT32_MAX / widest(rows.side().channels, codes_.plane().bits)))) {}

  // Set queries float32 [M, stride], zero-padded to a multiple of kQueryPad.
  void begin(const float* q, int) {
    q_ = q;
    group_ = -1;
    for (int c = 0; c < stride_; c += kLanes) {
      F best = set1(0.f);
      for (int m = 0; m < queries_; ++m) best = max(best, abs(load(q + m * stride_ + c)));
      store(largest_ + c, best);
    }
    if (!by_row_) return;
    std::fill_n(static_cast<f16*>(ones_), rows_.side().channels, kOne);
    fold(ones_, ones_);
  }

  // Return the number of rows that are scored at once: up to kTile, of one group if rows share scales; 0 if these are too few
  // to pay for folding the group's scales into the queries.
  int run(const int64_t* rows, int count, bool contiguous) const {
    count = std::min(count, kTile);
    if (by_row_) return count;
    const int run = rows_.run(rows, count, contiguous);
    return run < 4 ? 0 : run;
  }

  // Logits of `count` rows; kTile are written per query.
  void score(const int64_t* rows, int count, float* scores, Ahead& ahead) {
    if (const int64_t group = by_row_ ? -1 : rows_.group(rows[0]); group != group_) {
      const int64_t at = group * rows_.side().channels;
      group_ = group;
      fold(scales() + at, zeros() + at);
    }
    const uint8_t* codes[kTile];
    codes_.locate(rows, count, kTile, codes);
    const int blocks = round_up(count, kLanes) / kLanes * round_up(codes_.plane().bytes, kBlock) / kBlock;
    for (int first = 0; first < count; first += kLanes) {
      for_bits(codes_.plane().bits, [&](auto bits) {
        if (first == 0) kOften<bits> ? ahead.spread(4 * blocks) : ahead.spread_lines(blocks);
        for_query_tiles(queries_, [&](auto tile, int m) {
          m == 0 ? dot<bits, tile, true>(codes + first, m, ahead) : dot<bits, tile, false>(codes + first, m, ahead);
        });
      });
      F unit = set1(unit_), offset = set1(1.f);
      if (by_row_) {
        const f16* const zero = zeros();
        float scale[kLanes], offsets[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const int64_t row = rows[std::min(first + i, count - 1)];
          scale[i] = to_float(scales()[row]), offsets[i] = zero ? to_float(zero[row]) : scale[i] * -zero_point_;
        }
        unit = mul(unit, load(scale)), offset = load(offsets);
      }
      for (int m = 0; m < queries_; ++m) {
        const F product = (F)__builtin_convertvector(load_words(sums_ + kLanes * m), Floats);
        store(scores + m * kScoreStride + first, fma(product, unit, mul(offset, set1(zero_dot_[m]))));
      }
    }
  }

 private:
  const f16* scales() const { return static_cast<const f16*>(rows_.side().scale); }
  const f16* zeros() const { return static_cast<const f16*>(rows_.side().zero); }

  // logit = sum_c (q_c scale_c) code_c + sum_c q_c zero_c: both factors depend on the group only.
  void fold(const f16* scale, const f16* zero) {
    const int channels = int(rows_.side().channels);
    F best = set1(0.f);
    for (int c = 0; c < channels; c += kLanes)
      best = max(best, abs(mul(load_half(scale + c, channels - c), load(largest_ + c))));
    const float bound = max_lane(best);
    unit_ = bound / range_;
    for_query_tiles(queries_, [&](auto tile, int m) {
      fold_tile<tile>(scale, zero, channels, set1(bound > 0 ? range_ / bound : 0.f), m);
    });
  }

  template <int kQueries>
  void fold_tile(const f16* scale, const f16* zero, int channels, F to_int, int m) {
    // Local variables, because a store of bytes may alias every member.
    const float* const queries = q_ + m * stride_;
    int8_t* const bytes = bytes_ + m * 2 * kMaxChannels;
    const int stride = stride_;
    const Factors to_factors;
    F dot[4] = {set1(0.f), set1(0.f), set1(0.f), set1(0.f)};
    for (int c = 0; c < channels; c += 2 * kLanes) {
      const int left = channels - c, rest = left - kLanes;
      const F s0 = mul(load_half(scale + c, left), to_int), s1 = mul(load_half(scale + c + kLanes, rest), to_int);
      const F z0 = load_half(zero + c, left), z1 = load_half(zero + c + kLanes, rest);
      unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
        const float* q = queries + i * stride + c;
        int8_t* at = bytes + i * 2 * kMaxChannels + c;
        const F q0 = load(q), q1 = load(q + kLanes);
        to_factors(q0, s0, q1, s1, at, at + kMaxChannels);
        dot[i] = fma(q0, z0, fma(q1, z1, dot[i]));
      });
    }
    float sums[4];
    store_sums(sums, dot[0], dot[1], dot[2], dot[3]);
    std::copy_n(sums, kQueries, zero_dot_ + m);
  }

  // Sets of sums: every second part of the codes stays one code from the right, and has its own set.
  static constexpr int sets(int bits) { return bits < 8 && !kSignedCodes ? 2 : 1; }

  // Largest sum of `channels` codes, including those that are larger because they stay in place.
  static int64_t widest(int64_t channels, int bits) { return channels / sets(bits) << sets(bits) * bits; }

  // Products with a tile of queries. The first tile transposes the codes on the way, which overlaps shuffles with
  // multiplications.
  template <int kBits, int kQueries, bool kFirst>
  __attribute__((noinline))  // GCC keeps the sums in registers only in a separate function
  void dot(const uint8_t* const* codes, int m, Ahead& later) {
    const Plane& plane = codes_.plane();
    const int8_t* factors = bytes_ + m * 2 * kMaxChannels;
    using Codes = Part<kBits>;
    constexpr int kSums = kQueries * Codes::kSums, kSets = sets(kBits);
    Words sums[kSets][kSums];
    unrolled<kSets * kSums>([&](auto i) KVPRESS_INLINE_LAMBDA { sums[i / kSums][i % kSums] = Words{}; });
    Ahead ahead = later;
    for (int at = 0; at < plane.bytes; at += kBlock) {
      Words* column = columns_ + at / 4;
      const int left = plane.bytes - at;
      if (kFirst) transpose_rows(codes, at, left, column);
      if (kFirst && !kOften<kBits>) ahead.next_lines();
      for (int k = 0; k < 4; ++k) {
        if (kBits == 1 && k * 4 >= left) break;  // the plane may be shorter than a block
        if (kFirst && kOften<kBits>) ahead.next();
        unrolled<8 / kBits>([&](auto part) KVPRESS_INLINE_LAMBDA {
          Words word[Codes::kWords];
          Codes(part, part % kSets * kBits)(column[k], word);
          const int8_t* const of_part = factors + part * plane.bytes + at + 4 * k;
          Codes::template multiply<kQueries>(sums[part % kSets], word, of_part, 2 * kMaxChannels, kMaxChannels);
        });
      }
    }
    if (kFirst) later = ahead;
    unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
      Words total = Codes::total(sums[0] + i * Codes::kSums);
      if constexpr (kSets > 1) total += Codes::total(sums[1] + i * Codes::kSums) >> kBits;
      store_words(sums_ + kLanes * (m + i), total);
    });
  }

  const PackedRows& rows_;
  WholeCodes codes_;
  const int queries_, stride_;
  const float* q_ = nullptr;
  int64_t group_ = -1;
  float unit_ = 0;
  Buffer<float> largest_, zero_dot_;
  Buffer<int8_t> bytes_;  // [M, 2, kMaxChannels]: the two planes of factors
  Buffer<Words> columns_;
  Buffer<int32_t> sums_;
  Buffer<f16> ones_;
  const bool by_row_;
  const float zero_point_, range_;
};

}  // namespace kvpress
#endif
