// SPDX-License-Identifier: Apache-2.0
// Products of many rows with a few queries, for statistics that keep the products in registers. A tile of rows is transposed
// once; each register then has one channel of neighbouring rows.
#pragma once

#include "buffer.h"
#include "problem.h"
#include "simd.h"

namespace kvpress {

// Elements of any dtype, read as float32.
class Elements {
 public:
  Elements(const void* data, int64_t dtype) : data_(data), dtype_(dtype) {}

  const void* data() const { return data_; }

  void prefetch(int64_t first, int64_t count) const {
    const int64_t bytes = dtype_ == kFloat32 ? 4 : 2;
    prefetch_row(static_cast<const char*>(data_) + first * bytes, count * bytes);
  }

  void read(int64_t first, int64_t count, float* out) const {
    switch (dtype_) {
      case kFloat32:
        return read(static_cast<const float*>(data_) + first, count, out);
      case kFloat16:
        return read(static_cast<const f16*>(data_) + first, count, out);
      default:
        return read(static_cast<const bf16*>(data_) + first, count, out);
    }
  }

 private:
  template <class T>
  static void read(const T* from, int64_t count, float* out) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, load(from + i));
    for (; i < count; ++i) out[i] = to_float(from[i]);
  }

  const void* data_;
  int64_t dtype_;
};

constexpr int kTileVectors = kLanes == 16 ? 4 : 2;  // vectors of rows handled at once
constexpr int kTileQueries = kLanes == 4 ? 4 : 6;   // queries handled at once; the sums fill the registers
constexpr int kTileRows = kTileVectors * kLanes;

// Product in float32. A Unit is the query's operand of one multiplication; it covers kDepth channels.
struct FloatProduct {
  using Unit = float;
  static constexpr int kDepth = 1;
  static void pack(const Elements& from, int64_t first, int64_t count, Unit* out) { from.read(first, count, out); }
  static KVPRESS_INLINE F step(F sum, const Unit* keys, Unit query) { return fma(load(keys), set1(query), sum); }
};

#if defined(__AVX512BF16__)
// Exact products of bfloat16 pairs with float32 sums.
struct PairProduct {
  using Unit = uint32_t;
  static constexpr int kDepth = 2;
  static void pack(const Elements& from, int64_t first, int64_t count, Unit* out) {
    const bf16* row = static_cast<const bf16*>(from.data()) + first;
    int64_t i = 0;
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) _mm512_storeu_si512(out + i / 2, _mm512_loadu_si512(row + i));
    if (i == count) return;
    out[(count - 1) / 2] = 0;  // an odd last channel is paired with zero
    std::memcpy(out + i / 2, row + i, (count - i) * sizeof(bf16));
  }
  static KVPRESS_INLINE F step(F sum, const Unit* keys, Unit query) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(keys), (__m512bh)_mm512_set1_epi32(int(query)));
  }
};
#endif

// Units of one row.
template <class Product>
inline int tile_depth(int64_t channels) {
  return int((channels + Product::kDepth - 1) / Product::kDepth);
}

// Units of a tile. Its depth is padded to full blocks; products skip the padding.
template <class Product>
inline int tile_size(int64_t channels) {
  return kTileRows * round_up(tile_depth<Product>(channels), 16);
}

#if defined(__AVX512F__)
// to[j, i] = from[i, j] for 16 x 16 words; strides count words.
inline void transpose_block(const void* from, int64_t from_stride, void* to, int64_t to_stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(static_cast<const int32_t*>(from) + i * from_stride);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int k = 0; k < 2; ++k) {
      a[i + 2 * k] = _mm512_unpacklo_epi64(b[i + k], b[i + k + 2]);
      a[i + 2 * k + 1] = _mm512_unpackhi_epi64(b[i + k], b[i + k + 2]);
    }
  // Quarter q of a[i + k] now has column 4 q + k of rows i .. i + 3.
  const auto put = [&](int column, __m512i x) {
    _mm512_storeu_si512(static_cast<int32_t*>(to) + column * to_stride, x);
  };
  for (int k = 0; k < 4; ++k) {
    const __m512i even_low = _mm512_shuffle_i32x4(a[k], a[4 + k], 0x88);
    const __m512i even_high = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(a[k], a[4 + k], 0xdd);
    const __m512i odd_high = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0xdd);
    put(k, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
    put(4 + k, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    put(8 + k, _mm512_shuffle_i32x4(even_low, even_high, 0xdd));
    put(12 + k, _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
  }
}
#endif

// Builds tiles: tile[d, t] = unit d of row t.
template <class Product>
class Transpose {
  using Unit = typename Product::Unit;

 public:
  explicit Transpose(int64_t channels)
      : channels_(channels),
        depth_(tile_depth<Product>(channels)),
        stride_(round_up(depth_, 16)),
        rows_(16 * stride_) {}

  // Rows past `size` are undefined; `first` and `stride` count elements.
  void load(const Elements& from, int64_t first, int64_t stride, int size, Unit* tile) {
    load(from, [&](int t) { return first + t * stride; }, size, tile);
  }

  // The same for rows at any address: row t begins at element at(t).
  template <class At>
  void load(const Elements& from, At&& at, int size, Unit* tile) {
    for (int t = 0; t < size; t += 16) {
      for (int i = 0; i < std::min(16, kTileRows - t); ++i)
        Product::pack(from, at(std::min(t + i, size - 1)), channels_, rows_ + i * stride_);
#if defined(__AVX512F__)
      for (int d = 0; d < stride_; d += 16)
        transpose_block(rows_ + d, stride_, tile + d * kTileRows + t, kTileRows);
#else
      for (int d = 0; d < depth_; ++d)
        for (int i = 0; i < std::min(16, kTileRows - t); ++i) tile[d * kTileRows + t + i] = rows_[i * stride_ + d];
#endif
    }
  }

 private:
  const int64_t channels_;
  const int depth_, stride_;
  Buffer<Unit> rows_;
};

// sums[i] = products of query i with the rows of a tile.
template <class Product, int kQueries>
KVPRESS_INLINE void tile_product(const typename Product::Unit* tile, const typename Product::Unit* queries, int depth,
                                 F (&sums)[kQueries][kTileVectors]) {
  for (auto& query : sums)
    for (F& x : query) x = set1(0.f);
  for (int d = 0; d < depth; ++d, tile += kTileRows)
    for (int i = 0; i < kQueries; ++i)
      for (int v = 0; v < kTileVectors; ++v)
        sums[i][v] = Product::step(sums[i][v], tile + v * kLanes, queries[i * depth + d]);
}

}  // namespace kvpress
