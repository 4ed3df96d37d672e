// SPDX-License-Identifier: Apache-2.0
// Weighted sums of quantised values with scales per row and group of channels.
#pragma once

#include "ahead.h"
#include "integer_dot.h"
#include "words.h"

#if defined(KVPRESS_INTEGERS)
namespace kvpress {

// Transposes scales: halves [rows, groups] become [groups, kChunk].
class ScaleColumns {
 public:
  explicit ScaleColumns(int groups)
      : groups_(groups)
#if defined(__AVX512F__)
        ,
        pairs_((groups + 1) / 2),
        pick_(groups),
        live_(groups * pairs_) {
    for (int g = 0; g < groups_; ++g)
      for (int t = 0; t < 32; ++t) {
        const int at = t * groups_ + g;
        reinterpret_cast<uint16_t*>(&pick_[g])[t] = uint16_t(at % 64);
        live_[g * pairs_ + at / 64] |= __mmask32(1) << t;
      }
  }
#else
  {
  }
#endif

  // `rows` is a multiple of 32.
  void operator()(const uint16_t* from, int rows, f16* out) const {
#if defined(__AVX512F__)
    for (int t = 0; t < rows; t += 32, from += 32 * groups_)
      for (int g = 0; g < groups_; ++g) {
        __m512i picked = _mm512_setzero_si512();
        for (int k = 0; k < pairs_; ++k) {
          const __m512i a = _mm512_loadu_si512(from + 64 * k), b = _mm512_loadu_si512(from + 64 * k + 32);
          picked = _mm512_or_si512(picked, _mm512_maskz_permutex2var_epi16(live_[g * pairs_ + k], a, pick_[g], b));
        }
        _mm512_store_si512(out + g * kChunk + t, picked);
      }
#else
    if (groups_ == 1) return copy<1>(from, rows, out);
    if (groups_ == 2) return copy<2>(from, rows, out);
    if (groups_ == 4) return copy<4>(from, rows, out);
    return copy<0>(from, rows, out);
#endif
  }

 private:
  const int groups_;
#if defined(__AVX512F__)
  const int pairs_;
  Buffer<__m512i> pick_;    // [groups]: source index of each of 32 rows' scales
  Buffer<__mmask32> live_;  // [groups, pairs]: rows whose scale is in each pair of source vectors
#else
  // With a constant number of groups, compilers turn the loop into shuffles.
  template <int kGroups>
  void copy(const uint16_t* from, int rows, f16* out) const {
    const int groups = kGroups ? kGroups : groups_;
    for (int g = 0; g < groups; ++g)
      for (int t = 0; t < rows; ++t) out[g * kChunk + t].bits = from[t * groups + g];
  }
#endif
};

class IntegerValues {
  // If all products of weight and scale are below this, they add nothing to a sum of weights that is at least one.
  static constexpr float kSmallest = 1e-27f;

 public:
  // Sixteen neighbouring channels of a part are accumulated together, so they must share a scale.
  static bool fits(const Rows& side) {
    if (side.dtype != kFloat16 || side.levels || side.group_rows != 1) return false;
    const Plane plane = WholeCodes::plane_of(side);
    for (int first = 0; first < side.channels; first += plane.bytes)
      for (int at = 0; at < plane.bytes; at += 16) {
        const int last = first + std::min(at + 16, plane.bytes) - 1;
        if ((first + at) / side.group_channels != last / side.group_channels) return false;
      }
    return true;
  }

  IntegerValues(const PackedRows& rows, int64_t queries)
      : rows_(rows),
        whole_(rows, kChunk),
        queries_(int(queries)),
        groups_(int(rows.scales_per_row())),
        columns_(groups_),
        halves_(kChunk * groups_ + 64),
        scale_(groups_ * kChunk),
        zero_(rows.side().zero ? groups_ * kChunk : 0),
        zero_sum_(queries * groups_),
        unit_(queries * groups_),
        bytes_(queries * 2 * groups_ * kChunk),
        words_(kChunk / 4 * kBlockVectors) {}

  // acc[m, :] += sum_t weights[m, t] value_t; weights are zero from `count` to the next multiple of 32.
  void mix(const Chunk& chunk, const float* weights, float* acc, int acc_stride, Ahead& ahead) {
    const int padded = round_up(chunk.count, 32);
    whole_.locate(chunk.rows, chunk.count, padded, codes_);
    transpose_scales(rows_.side().scale, chunk, padded, scale_);
    if (rows_.side().zero) transpose_scales(rows_.side().zero, chunk, padded, zero_);
    for_query_tiles(queries_, [&](auto tile, int m) {
      for (int g = 0; g < groups_; ++g) fold<tile>(m, g, weights + m * kScoreStride, padded);
    });
    const Plane& plane = whole_.plane();
    for_bits(plane.bits, [&](auto bits) {
      constexpr int kParts = std::min(8 / bits, kRegisters / 8 / Part<bits>::kSums);
      const int every = round_up(plane.bytes, kLanes) / kLanes * ((queries_ + 3) / 4);
      ahead.spread((kOften<bits> ? every : round_up(plane.bytes, kBlock) / kBlock) * padded / 4);
      for (int at = 0; at < plane.bytes; at += kBlock)
        for_query_tiles(queries_, [&](auto tile, int m) {
          float* out = acc + m * acc_stride;
          unrolled<8 / bits / kParts>([&](auto step) {
            for (int vector = 0; vector < kBlockVectors; ++vector) {
              const int first = at + vector * kLanes;
              if (first >= plane.bytes) break;
              const Span span{at, vector, std::min(kLanes, plane.bytes - first), padded, m};
              if (m == 0 && step == 0 && vector == 0)
                accumulate<bits, tile, step * kParts, kParts, step == 0>(span, out, acc_stride, ahead);
              else
                accumulate<bits, tile, step * kParts, kParts, false>(span, out, acc_stride, ahead);
            }
          });
        });
    });
    const int width = int(rows_.side().group_channels);
    for (int m = 0; m < queries_; ++m)
      for (int g = 0; g < groups_; ++g)
        for (int c = 0; c < width; ++c) acc[m * acc_stride + g * width + c] += zero_sum_[m * groups_ + g];
  }

 private:
  // Transpose the scales of the chunk from [rows, groups] to [groups, rows].
  void transpose_scales(const void* base, const Chunk& chunk, int padded, f16* out) {
    columns_(gather_scales(static_cast<const uint16_t*>(base), chunk, padded), padded, out);
  }

  // Return the scales in place if they can be read as full vectors, else a zero-padded copy.
  const uint16_t* gather_scales(const uint16_t* from, const Chunk& chunk, int padded) {
    const uint16_t* first = from + chunk.rows[0] * groups_;
    if (chunk.contiguous && chunk.count == padded && groups_ % 2 == 0) return first;
    if (chunk.contiguous) {
      std::copy_n(first, chunk.count * groups_, static_cast<uint16_t*>(halves_));
    } else {
      for (int t = 0; t < chunk.count; ++t)
        for (int g = 0; g < groups_; ++g) halves_[t * groups_ + g] = from[chunk.rows[t] * groups_ + g];
    }
    std::fill(halves_ + chunk.count * groups_, halves_ + padded * groups_, uint16_t(0));
    return halves_;
  }

  // Round weights times the scales of a group to factors of two bytes per row, and sum its weighted zeros. The unit follows the
  // largest product: the largest weight may belong to a row of small scale, such as an attention sink. Zeros that are not
  // stored are -zero_point * scale.
  template <int kQueries>
  void fold(int m, int g, const float* weights, int padded) {
    const bool stored = rows_.side().zero;
    const f16 *scale = scale_ + g * kChunk, *zero = stored ? zero_ + g * kChunk : scale;
    const float zero_factor = stored ? 1.f : -float(rows_.side().zero_point);
    F largest[4], zeros[4];
    unrolled<4>([&](auto i) KVPRESS_INLINE_LAMBDA { largest[i] = zeros[i] = set1(0.f); });
    for (int t = 0; t < padded; t += kLanes) {
      const F s = abs(load(scale + t)), z = load(zero + t);
      unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
        const F w = load(weights + i * kScoreStride + t);
        largest[i] = max(largest[i], mul(w, s));
        zeros[i] = fma(w, z, zeros[i]);
      });
    }
    float sums[4];
    store_sums(sums, zeros[0], zeros[1], zeros[2], zeros[3]);
    F to_int[kQueries];
    for (int i = 0; i < kQueries; ++i) {
      const float top = std::max(max_lane(largest[i]), kSmallest);
      to_int[i] = set1(kIntRange / top);
      unit(g, m)[i] = top / kIntRange;
      zero_sum_[(m + i) * groups_ + g] = sums[i] * zero_factor;
    }
    const Factors to_factors;
    int8_t* const byte = bytes(g, m);
    for (int t = 0; t < padded; t += 2 * kLanes) {
      const F s0 = load(scale + t), s1 = load(scale + t + kLanes);
      unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
        int8_t* at = byte + i * 2 * kChunk + t;
        const F w0 = load(weights + i * kScoreStride + t), w1 = load(weights + i * kScoreStride + t + kLanes);
        to_factors(mul(w0, to_int[i]), s0, mul(w1, to_int[i]), s1, at, at + kChunk);
      });
    }
  }

  // Range of one accumulate() call: `count` bytes of one vector of the block `at` of the plane, for queries from `m` on.
  struct Span {
    int at, vector, count, rows, m;
    int first() const { return at + vector * kLanes; }
  };

  // Word q: lane i has byte `first + i` of rows 4q .. 4q + 3. The first call makes the words on the way, which overlaps
  // shuffles with multiplications; later calls read them from words_.
  template <int kBits, int kQueries, int kPart, int kParts, bool kFirst>
  void accumulate(const Span& span, float* acc, int acc_stride, Ahead& later) {
    const Plane& plane = whole_.plane();
    const int8_t* weight[kParts];
    const float* units[kParts];
    unrolled<kParts>([&](auto p) KVPRESS_INLINE_LAMBDA {
      const int channel = (kPart + p) * plane.bytes + span.first();
      const int group = channel / int(rows_.side().group_channels);
      weight[p] = bytes(group, span.m), units[p] = unit(group, span.m);
    });
    const uint8_t* const* const codes = codes_;  // a local variable, because stores may alias every member
    const Interleave interleave;
    const int vector = kFirst ? 0 : span.vector, offset = span.at, left = plane.bytes - span.at;
    using Codes = Part<kBits>;
    constexpr int kSums = kQueries * Codes::kSums;
    Words sums[kParts][kSums];
    unrolled<kParts * kSums>([&](auto j) KVPRESS_INLINE_LAMBDA { sums[j / kSums][j % kSums] = Words{}; });
    Words* word = words_;
    Ahead ahead = later;
    for (int t = 0; t < span.rows; t += 4, word += kBlockVectors) {
      if (kFirst) interleave(codes + t, offset, left, word);
      if (kFirst || kOften<kBits>) ahead.next();
      unrolled<kParts>([&](auto p) KVPRESS_INLINE_LAMBDA {
        Words part[Codes::kWords];
        Codes(kPart + p, kBits * (kPart + p))(word[vector], part);
        Codes::template multiply<kQueries>(sums[p], part, weight[p] + t, 2 * kChunk, kChunk);
      });
    }
    later = ahead;
    unrolled<kParts>([&](auto p) KVPRESS_INLINE_LAMBDA {
      const float power = std::ldexp(1.f, -Codes(kPart + p, kBits * (kPart + p)).left());
      float* out = acc + (kPart + p) * plane.bytes + span.first();
      unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
        const F product = (F)__builtin_convertvector(Codes::total(sums[p] + i * Codes::kSums), Floats);
        add_part(out + i * acc_stride, mul(product, set1(units[p][i] * power)), span.count);
      });
    });
  }

  // out[0 .. count) += x
  static KVPRESS_INLINE void add_part(float* out, F x, int count) {
#if defined(__AVX512F__)
    const __mmask16 live = __mmask16((1u << count) - 1);
    _mm512_mask_storeu_ps(out, live, add(x, _mm512_maskz_loadu_ps(live, out)));
#else
    if (count == kLanes) return store(out, add(load(out), x));
    float lanes[kLanes];
    store(lanes, x);
    for (int c = 0; c < count; ++c) out[c] += lanes[c];
#endif
  }

  int8_t* bytes(int group, int m) const { return bytes_ + (group * queries_ + m) * 2 * kChunk; }
  float* unit(int group, int m) const { return unit_ + group * queries_ + m; }

  const PackedRows& rows_;
  WholeCodes whole_;
  const int queries_, groups_;
  const ScaleColumns columns_;
  Buffer<uint16_t> halves_;
  Buffer<f16> scale_, zero_;  // [groups, kChunk]
  Buffer<float> zero_sum_;    // [M, groups]
  Buffer<float> unit_;        // [groups, M]: unit of the factors
  Buffer<int8_t> bytes_;      // [groups, M, 2, kChunk]: the two planes of factors
  Buffer<Words> words_;       // [kChunk / 4, kBlockVectors]
  const uint8_t* codes_[kChunk];
};

}  // namespace kvpress
#endif
