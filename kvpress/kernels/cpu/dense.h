// SPDX-License-Identifier: Apache-2.0
// Dense rows: dot products of queries with four rows at a time, and weighted sums of rows.
#pragma once

#include <algorithm>
#include <type_traits>

#include "problem.h"
#include "simd.h"

namespace kvpress {

constexpr int kChunk = 256;                // rows whose logits are kept at once
constexpr int kAhead = 24;                 // maximum prefetch distance in dense rows
constexpr int kAheadCoded = 64;            // prefetch distance in quantised rows, which are shorter
constexpr int kAheadLabels = 512;          // prefetch distance in labels: past the page that hardware prefetchers follow
constexpr int kScoreStride = kChunk + 32;  // a kernel may write a full vector past the last row
constexpr int kTile = 16;                  // rows handled at once
constexpr int kQueryPad = 32;              // queries are zero-padded to a multiple of this

inline bool on_intel() {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

// Prefetch distance in dense rows of `bytes` bytes. On Intel, a distance past the page that the hardware prefetcher follows
// costs a fifth of the bandwidth; on AMD, the longer distance is faster.
inline int rows_ahead(int64_t bytes) {
  return on_intel() ? int(std::clamp<int64_t>(2560 / bytes, 4, kAhead)) : kAhead;
}

// Number of listed dense rows that are prefetched together, and the prefetch distance in rows. On Intel, prefetching many rows
// into the L1 cache just before they are read is faster by a fifth than prefetching one row between two products.
struct Burst {
  int rows, ahead;
};

// Burst for pairs of `bytes` bytes; on Intel, at most half of the smallest L1 cache.
inline Burst burst_of_listed(int64_t bytes) {
  return on_intel() ? Burst{int(std::clamp<int64_t>((16 << 10) / bytes / 4 * 4, 4, 32)), 0} : Burst{4, kAhead};
}

// Row numbers of one step of a stream. Rows from `count` to `known` belong to the next step and are listed for prefetching.
struct Chunk {
  int64_t rows[kChunk + kAheadCoded];
  int count, known;
  int next;  // number of rows of the next step
  bool contiguous;  // row numbers are consecutive
};

// Call step(number of queries, first query) with kMost queries at a time, at most 4, then once with the remaining ones.
template <int kMost = 4, class Step>
inline void for_query_tiles(int queries, Step&& step) {
  int m = 0;
  for (; m + kMost <= queries; m += kMost) step(std::integral_constant<int, kMost>{}, m);
  if (kMost > 3 && queries - m == 3) step(std::integral_constant<int, std::min(kMost, 3)>{}, m);
  if (kMost > 2 && queries - m == 2) step(std::integral_constant<int, std::min(kMost, 2)>{}, m);
  if (queries - m == 1) step(std::integral_constant<int, 1>{}, m);
}

// True if products use fewer sums than four rows times four queries, because 16 registers do not hold these. Without vector
// conversion, converting a row again costs more than sums in memory.
constexpr bool kFewSums = kRegisters == 16 && kConvertsHalves;

// Queries multiplied with a row at once. With few sums, two passes of two queries over four rows, which convert each row twice,
// cost less than four queries on two rows; except for e4m3, which takes several instructions per number.
template <class T>
constexpr int kDotQueries = kFewSums && !std::is_same_v<T, e4m3> ? 2 : 4;

// Vectors of neighbouring channels that are loaded at once: two for types that are loaded as pairs.
template <class T>
constexpr int kAtOnce = kPaired<T> ? 2 : 1;

// Load kVectors vectors of neighbouring channels. If the type is loaded as pairs and kVectors is even, x[2 v] has the even
// channels of two vectors, x[2 v + 1] the odd ones.
template <class T, int kVectors>
KVPRESS_INLINE void load_block(const T* p, F (&x)[kVectors]) {
  if constexpr (kPaired<T> && kVectors % 2 == 0)
    unrolled<kVectors / 2>(
        [&](auto v) KVPRESS_INLINE_LAMBDA { load_pairs(p + 2 * v * kLanes, x[2 * v], x[2 * v + 1]); });
  else
    unrolled<kVectors>([&](auto v) KVPRESS_INLINE_LAMBDA { x[v] = load(p + v * kLanes); });
}

// Apply part_pairs or join_pairs to two vectors in memory.
KVPRESS_INLINE void in_place(void (&step)(F&, F&), float* p) {
  F a = load(p), b = load(p + kLanes);
  step(a, b);
  store(p, a), store(p + kLanes, b);
}

// Float32 multiply-accumulate of keys and queries, kAtOnce vectors per step.
template <class T>
struct FloatDot {
  using Key = T;
  using Query = float;
  struct Vector {
    F at[kAtOnce<T>];
  };
  static constexpr int kWidth = kAtOnce<T> * kLanes;
  static void put_query(const float* q, int channels, float* out) {
    std::fill(std::copy_n(q, channels, out), out + round_up(channels, kWidth), 0.f);
    if constexpr (kPaired<T>)
      for (int c = 0; c < channels; c += kWidth) in_place(part_pairs, out + c);
  }
  static KVPRESS_INLINE Vector load_key(const T* p) {
    Vector key;
    load_block(p, key.at);
    return key;
  }
  static KVPRESS_INLINE Vector load_query(const float* p) {
    Vector query;
    load_block(p, query.at);
    return query;
  }
  static KVPRESS_INLINE F step(F sum, Vector key, Vector query) {
    unrolled<kAtOnce<T>>([&](auto v) KVPRESS_INLINE_LAMBDA { sum = fma(key.at[v], query.at[v], sum); });
    return sum;
  }
};

#if defined(__AVX512BF16__)
// Exact products of bfloat16 pairs with float32 sums: half the instructions of FloatDot.
struct PairDot {
  using Key = bf16;
  using Query = bf16;
  using Vector = __m512bh;
  static constexpr int kWidth = 2 * kLanes;
  static void put_query(const float* q, int channels, bf16* out) {
    for (int c = 0; c < channels; ++c) {
      uint32_t wide;  // exact by contract (Problem::bf16_queries): truncation does not round
      std::memcpy(&wide, &q[c], sizeof wide);
      out[c] = {uint16_t(wide >> 16)};
    }
  }
  static Vector load_key(const bf16* p) { return (Vector)_mm512_loadu_si512(p); }
  static Vector load_query(const bf16* p) { return (Vector)_mm512_loadu_si512(p); }
  static F step(F sum, Vector key, Vector query) { return _mm512_dpbf16_ps(sum, key, query); }
};
#endif

// Convert queries float32 [queries, channels] to the layout of the products, [queries, stride]. Padding stays zero.
template <class Dot>
inline void pad_queries(const float* q, int64_t queries, int64_t channels, typename Dot::Query* out, int stride) {
  for (int64_t m = 0; m < queries; ++m) Dot::put_query(q + m * channels, int(channels), out + m * stride);
}

// sums[m][kFirst + r] = lanes of row_(kFirst + r) . query_m for kRows rows and kQueries queries.
template <class Dot, int kQueries, int kRows, int kFirst>
KVPRESS_INLINE void dot_rows(const typename Dot::Key* const* rows, const typename Dot::Query* queries, int query_stride,
                             int channels, F (&sums)[kQueries][4]) {
  using Vector = typename Dot::Vector;
  unrolled<kQueries>([&](auto m) KVPRESS_INLINE_LAMBDA {
    unrolled<kRows>([&](auto r) KVPRESS_INLINE_LAMBDA { sums[m][kFirst + r] = set1(0.f); });
  });
  const typename Dot::Key* from[kRows];
  unrolled<kRows>([&](auto r) KVPRESS_INLINE_LAMBDA { from[r] = rows[kFirst + r]; });
  typename Dot::Key tail[kRows][Dot::kWidth];
  // One loop body for full and partial vectors: with a second copy, compilers spill the sums to memory.
  for (int at = 0; at < channels; at += Dot::kWidth) {
    if (channels - at < Dot::kWidth) {
      std::memset(static_cast<void*>(tail), 0, sizeof tail);
      unrolled<kRows>([&](auto r) KVPRESS_INLINE_LAMBDA {
        std::memcpy(tail[r], from[r] + at, (channels - at) * sizeof(tail[r][0]));
        from[r] = tail[r] - at;
      });
    }
    const auto key = [&](auto r) KVPRESS_INLINE_LAMBDA { return Dot::load_key(from[r] + at); };
    const auto query = [&](auto m) KVPRESS_INLINE_LAMBDA { return Dot::load_query(queries + m * query_stride + at); };
    const auto add = [&](auto m, auto r, Vector k, Vector q) KVPRESS_INLINE_LAMBDA {
      sums[m][kFirst + r] = Dot::step(sums[m][kFirst + r], k, q);
    };
    if constexpr (kRows < kQueries) {  // the smaller set of vectors stays in registers
      Vector keys[kRows];
      unrolled<kRows>([&](auto r) KVPRESS_INLINE_LAMBDA { keys[r] = key(r); });
      unrolled<kQueries>([&](auto m) KVPRESS_INLINE_LAMBDA {
        const Vector q = query(m);
        unrolled<kRows>([&](auto r) KVPRESS_INLINE_LAMBDA { add(m, r, keys[r], q); });
      });
    } else {
      Vector held[kQueries];
      unrolled<kQueries>([&](auto m) KVPRESS_INLINE_LAMBDA { held[m] = query(m); });
      unrolled<kRows>([&](auto r) KVPRESS_INLINE_LAMBDA {
        const Vector k = key(r);
        unrolled<kQueries>([&](auto m) KVPRESS_INLINE_LAMBDA { add(m, r, k, held[m]); });
      });
    }
  }
}

// scores[m * kScoreStride + r] = row_r . query_m for four rows and kQueries queries.
template <class Dot, int kQueries>
inline void dot_four(const typename Dot::Key* const rows[4], const typename Dot::Query* queries, int query_stride,
                     int channels, float* scores) {
  constexpr int kRows = kFewSums && kQueries > 2 ? 2 : 4;
  F sums[kQueries][4];
  unrolled<4 / kRows>([&](auto part) KVPRESS_INLINE_LAMBDA {
    dot_rows<Dot, kQueries, kRows, kRows * part>(rows, queries, query_stride, channels, sums);
  });
  unrolled<kQueries>([&](auto m) KVPRESS_INLINE_LAMBDA {
    store_sums(scores + m * kScoreStride, sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
  });
}

// Scores of `count` rows given by pointer; the last four-row step repeats the final row. `ahead(t)` is called once per row and
// may prefetch.
template <class Dot, class RowAt, class Ahead>
void score_rows(RowAt row_at, int count, const typename Dot::Query* queries, int query_stride, int query_count,
                int channels, float* scores, Ahead ahead) {
  for (int t = 0; t < count; t += 4) {
    const typename Dot::Key* rows[4];
    for (int r = 0; r < 4; ++r) {
      rows[r] = row_at(t + r < count ? t + r : count - 1);
      ahead(t + r);
    }
    for_query_tiles<kDotQueries<typename Dot::Key>>(query_count, [&](auto tile, int m) {
      dot_four<Dot, tile>(rows, queries + m * query_stride, query_stride, channels, scores + m * kScoreStride + t);
    });
  }
}

// acc[m, c ..] += sum_t weights[m, t] * row_t[c ..] for kVectors vectors of channels.
template <class T, int kQueries, int kVectors, class Load, class Ahead>
inline void mix_block(const T* const* rows, int count, const float* weights, float* acc, int acc_stride, int c, Load load_at,
                      Ahead ahead) {
  F sums[kQueries][kVectors];
  const auto for_sums = [&](auto&& step) KVPRESS_INLINE_LAMBDA {
    unrolled<kQueries>([&](auto m) KVPRESS_INLINE_LAMBDA {
      unrolled<kVectors>(
          [&](auto v) KVPRESS_INLINE_LAMBDA { step(sums[m][v], acc + m * acc_stride + c + v * kLanes); });
    });
  };
  for_sums([](F& sum, const float* at) KVPRESS_INLINE_LAMBDA { sum = load(at); });
  for (int t = 0; t < count; ++t) {
    ahead(t);
    F x[kVectors];
    load_at(rows[t] + c, x);
    unrolled<kQueries>([&](auto m) KVPRESS_INLINE_LAMBDA {
      const F weight = set1(weights[m * kScoreStride + t]);
      unrolled<kVectors>([&](auto v) KVPRESS_INLINE_LAMBDA { sums[m][v] = fma(weight, x[v], sums[m][v]); });
    });
  }
  for_sums([](F& sum, float* at) KVPRESS_INLINE_LAMBDA { store(at, sum); });
}

// acc[m, :] += sum_t weights[m, t] * row_t; rows of acc are padded to a full vector.
//
// Sixteen rows at a time: the first block of channels reads them from memory in an order that the hardware prefetcher follows,
// and later blocks find them in the L1 cache. More rows would reload the sums less often, which is faster for cached rows but
// slower for rows from memory.
template <class T, class RowAt, class Ahead>
void mix_rows(RowAt row_at, int count, const float* weights, int query_count, int channels, float* acc, int acc_stride,
              Ahead ahead) {
  constexpr int kVectors = kLanes == 16 ? 4 : 2;  // as many sums as the registers hold
  constexpr int kBlockChannels = kVectors * kLanes;
  const auto for_pairs = [&](auto& step) {
    const int whole = channels / kBlockChannels * kBlockChannels;
    for (int m = 0; m < query_count; ++m)
      for (int c = 0; c < whole; c += 2 * kLanes) in_place(step, acc + m * acc_stride + c);
  };
  if constexpr (kPaired<T>) for_pairs(part_pairs);
  const auto whole = [](const T* p, auto& x) KVPRESS_INLINE_LAMBDA { load_block(p, x); };
  const auto part = [&](const T* p, F(&x)[1]) { x[0] = load_part(p, channels % kLanes); };
  const auto quiet = [](int) {};
  for (int t = 0; t < count; t += kTile) {
    const int size = std::min(kTile, count - t);
    const T* rows[kTile];
    for (int i = 0; i < size; ++i) rows[i] = row_at(t + i);
    for_query_tiles(query_count, [&](auto tile, int m) {
      const float* w = weights + m * kScoreStride + t;
      float* a = acc + m * acc_stride;
      int c = 0;
      for (; c + kBlockChannels <= channels; c += kBlockChannels)
        if (m == 0 && c == 0)
          mix_block<T, tile, kVectors>(rows, size, w, a, acc_stride, c, whole, [&](int i) { ahead(t + i); });
        else
          mix_block<T, tile, kVectors>(rows, size, w, a, acc_stride, c, whole, quiet);
      for (; c + kLanes <= channels; c += kLanes) mix_block<T, tile, 1>(rows, size, w, a, acc_stride, c, whole, quiet);
      if (c < channels) mix_block<T, tile, 1>(rows, size, w, a, acc_stride, c, part, quiet);
    });
  }
  if constexpr (kPaired<T>) for_pairs(join_pairs);
}

}  // namespace kvpress
