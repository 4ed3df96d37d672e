// Logits of quantised keys whose scales are per channel and shared by a group of rows.
#pragma once

#include "vbmi_dot.h"

#if defined(KVPRESS_INT8)
namespace kvpress {

class Int8Keys {
  static constexpr int kMaxChannels = 512;  // a constant distance between queries keeps them addressable by offset

 public:
  static bool fits(const Rows& side) {
    return side.dtype == kFloat16 && side.group_channels == 1 && side.channels <= kMaxChannels;
  }

  Int8Keys(const PackedRows& rows, int64_t queries, int query_stride)
      : rows_(rows),
        queries_(int(queries)),
        stride_(query_stride),
        largest_(query_stride),
        zero_dot_(queries),
        bytes_(queries * 2 * kMaxChannels + 64),
        columns_(rows.side().stride / 4 + 8),
        sums_(queries * 16) {}

  // Queries float32 [M, stride], zero padded.
  void begin(const float* q) {
    q_ = q;
    group_ = -1;
    for (int c = 0; c < stride_; c += 16) {
      F best = set1(0.f);
      for (int m = 0; m < queries_; ++m) best = max(best, _mm512_abs_ps(load(q + m * stride_ + c)));
      store(largest_ + c, best);
    }
  }

  // Logits of up to 16 rows of one group; sixteen are written per query.
  void score(int64_t group, const int64_t* rows, int count, float* scores) {
    if (group != group_) fold(group);
    std::memset(static_cast<void*>(sums_), 0, queries_ * 64);
    const uint8_t* codes[16];
    rows_.locate(rows, count, 16, codes);
    for (const Plane& plane : rows_.planes())
      for_plane(plane, [&](auto bits, auto shift) {
        for_query_tiles(queries_, [&](auto tile, int m) {
          m == 0 ? dot<bits, shift, tile, true>(plane, codes, m) : dot<bits, shift, tile, false>(plane, codes, m);
        });
      });
    for (int m = 0; m < queries_; ++m) {
      const F product = _mm512_cvtepi32_ps(_mm512_load_si512(sums_ + 16 * m));
      store(scores + m * kScoreStride, fma(product, set1(unit_), set1(zero_dot_[m])));
    }
  }

 private:
  // logit = sum_c (q_c scale_c) code_c + sum_c q_c zero_c: both factors depend on the group only.
  void fold(int64_t group) {
    group_ = group;
    const int channels = int(rows_.side().channels);
    const f16* scale = static_cast<const f16*>(rows_.side().scale) + group * channels;
    const f16* zero = static_cast<const f16*>(rows_.side().zero) + group * channels;
    F best = set1(0.f);
    for (int c = 0; c < channels; c += 16)
      best = max(best, _mm512_abs_ps(mul(load_half(scale + c, channels - c), load(largest_ + c))));
    const float bound = max_lane(best);
    unit_ = bound / kIntRange;
    for_query_tiles(queries_, [&](auto tile, int m) {
      fold_tile<tile>(scale, zero, channels, set1(bound > 0 ? kIntRange / bound : 0.f), m);
    });
  }

  template <int kQueries>
  void fold_tile(const f16* scale, const f16* zero, int channels, F to_int, int m) {
    // Locals, because a store of bytes may alias every member.
    const float* const queries = q_ + m * stride_;
    int8_t* const bytes = bytes_ + m * 2 * kMaxChannels;
    const int stride = stride_;
    const ByteSplit split;
    F dot[4] = {set1(0.f), set1(0.f), set1(0.f), set1(0.f)};
    for (int c = 0; c < channels; c += 32) {
      const int left = channels - c;
      const F s0 = mul(load_half(scale + c, left), to_int), s1 = mul(load_half(scale + c + 16, left - 16), to_int);
      const F z0 = load_half(zero + c, left), z1 = load_half(zero + c + 16, left - 16);
      unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
        const float* q = queries + i * stride + c;
        int8_t* high = bytes + i * 2 * kMaxChannels + c;
        const F q0 = load(q), q1 = load(q + 16);
        split(q0, s0, q1, s1, high, high + kMaxChannels);
        dot[i] = fma(q0, z0, fma(q1, z1, dot[i]));
      });
    }
    float sums[4];
    store_sums(sums, dot[0], dot[1], dot[2], dot[3]);
    std::copy_n(sums, kQueries, zero_dot_ + m);
  }

  // Sixteen rows become columns: lane t of column k holds bytes 4k .. 4k + 3 of row t.
  static KVPRESS_INLINE void transpose(const uint8_t* const* codes, int offset, int count, __m512i* column) {
    __m512i x[4];
    for (int i = 0; i < 4; ++i) x[i] = load_lanes(codes + i, 4, offset, count);
    const __m512i lo01 = _mm512_unpacklo_epi32(x[0], x[1]), hi01 = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i lo23 = _mm512_unpacklo_epi32(x[2], x[3]), hi23 = _mm512_unpackhi_epi32(x[2], x[3]);
    column[0] = _mm512_unpacklo_epi64(lo01, lo23);
    column[1] = _mm512_unpackhi_epi64(lo01, lo23);
    column[2] = _mm512_unpacklo_epi64(hi01, hi23);
    column[3] = _mm512_unpackhi_epi64(hi01, hi23);
  }

  // The first tile of queries transposes as it goes, which overlaps shuffles with multiplications.
  template <int kBits, int kShift, int kQueries, bool kFirst>
  __attribute__((noinline))  // GCC keeps the sums in registers only in a function of its own
  void dot(const Plane& plane, const uint8_t* const* codes, int m) {
    __m512i high[kQueries], low[kQueries];
    unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA { high[i] = low[i] = _mm512_setzero_si512(); });
    const int8_t* bytes = bytes_ + m * 2 * kMaxChannels;
    for (int at = 0; at < plane.bytes; at += 16) {
      __m512i* column = columns_ + at / 4;
      if (kFirst) transpose(codes, plane.offset + at, plane.bytes - at, column);
      for (int k = 0; k < 4; ++k)
        unrolled<8 / kBits>([&](auto part) KVPRESS_INLINE_LAMBDA {
          const __m512i word = part_of<kBits, kShift>(column[k], part);
          const int8_t* query = bytes + part * plane.bytes + at + 4 * k;
          unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
            multiply_add(high[i], word, query + i * 2 * kMaxChannels);
            multiply_add(low[i], word, query + (i * 2 + 1) * kMaxChannels);
          });
        });
    }
    unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
      int32_t* sum = sums_ + 16 * (m + i);
      const __m512i product = _mm512_add_epi32(_mm512_slli_epi32(high[i], 8), low[i]);
      _mm512_store_si512(sum, _mm512_add_epi32(product, _mm512_load_si512(sum)));
    });
  }

  const PackedRows& rows_;
  const int queries_, stride_;
  const float* q_ = nullptr;
  int64_t group_ = -1;
  float unit_ = 0;
  Buffer<float> largest_, zero_dot_;
  Buffer<int8_t> bytes_;  // [M, {high, low}, kMaxChannels]
  Buffer<__m512i> columns_;
  Buffer<int32_t> sums_;
};

}  // namespace kvpress
#endif
