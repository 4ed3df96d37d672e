// SPDX-License-Identifier: Apache-2.0
// Codebooks: one group as float32, and rows assembled from the centroids that their codes index.
#pragma once

#include "codebook.h"
#include "dense.h"

namespace kvpress {

// Return one group of a codebook as float32.
inline const float* read_book(const Coded& side, int64_t book, int64_t group, float* scratch) {
  const int64_t count = side.group_size(), first = book * side.book_groups * count + group * side.group_step();
  if (!side.half) return static_cast<const float*>(side.book) + first;
  const f16* from = static_cast<const f16*>(side.book) + first;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(scratch + i, load(from + i));
  for (; i < count; ++i) scratch[i] = to_float(from[i]);
  return scratch;
}

// out[0 .. coupled) = one centroid; kCoupled is `coupled`, or 0 if that is not constant.
template <int kCoupled>
KVPRESS_INLINE void put_centroid(const float* from, int coupled, float* out) {
  if constexpr (kCoupled > 0)
    std::memcpy(out, from, kCoupled * sizeof *from);
  else
    std::copy_n(from, coupled, out);
}

template <int kCoupled>
KVPRESS_INLINE void put_centroid(const f16* from, int coupled, float* out) {
  if constexpr (kCoupled > 0 && kCoupled % kLanes == 0) {
    for (int j = 0; j < kCoupled; j += kLanes) store(out + j, load(from + j));
    return;
  }
#if defined(__F16C__)
  if constexpr (kCoupled % 8 == 0 && kCoupled > 0) {
    for (int j = 0; j < kCoupled; j += 8)
      _mm256_storeu_ps(out + j, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j))));
    return;
  }
  if constexpr (kCoupled == 4) {
    _mm_storeu_ps(out, _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
    return;
  }
#endif
  for (int j = 0; j < coupled; ++j) out[j] = to_float(from[j]);
}

// Rows of floats, `stride` apart. A cursor reads the vectors of a row, kVectors of them between calls of advance().
struct FloatRows {
  static constexpr int kVectors = 1;
  const float* first;
  int stride;

  struct Cursor {
    const float* at;
    template <int kVector>
    KVPRESS_INLINE F read() const {
      return load(at);
    }
    KVPRESS_INLINE void advance() { at += kLanes; }
  };
  KVPRESS_INLINE Cursor cursor(int row, int channel) const { return {first + row * stride + channel}; }
};

// Rows read directly from their centroids: a vector is one centroid, several, or part of one. Every group has a codebook of its
// own and every code indexes an entry, so byte codes have a constant distance between codebooks.
template <int kCoupled, class T, class Index>
struct CentroidRows {
  static constexpr int kParts = std::max(1, kLanes / kCoupled), kVectors = std::max(1, kCoupled / kLanes);
  const T* centroids;
  int64_t entries;
  IndexBlock<Index> codes;

  static bool fits(const Coded& side, const IndexRows<Index>& indices) {
    return side.coupled == kCoupled && indices.names_groups() && side.book_groups == side.groups;
  }

  struct Cursor {
    const T* group;
    const int64_t entries;
    const Index* code;

    KVPRESS_INLINE int64_t step() const { return kCoupled * (sizeof(Index) == 1 ? 256 : entries); }
    template <int kVector>
    KVPRESS_INLINE F read() const {
      const T* parts[kParts];
      unrolled<kParts>([&](auto i) KVPRESS_INLINE_LAMBDA {
        parts[i] = group + i * step() + int64_t(code[i]) * kCoupled + kVector * kLanes;
      });
      return load_parts(parts);
    }
    KVPRESS_INLINE void advance() { group += kParts * step(), code += kParts; }
  };
  KVPRESS_INLINE Cursor cursor(int row, int channel) const {
    const int group = channel / kCoupled;
    const Cursor first{centroids, entries, codes.row(row) + group};
    return {centroids + group * first.step(), entries, first.code};
  }
};

// Assembles rows of one side from centroids, as float32.
template <class Index>
class Assembler {
 public:
  explicit Assembler(const Coded& side)
      : side_(side),
        stride_(round_up(side.channels(), kLanes) + kLanes),
        narrow_(side.half && (side.coupled < 4 || !kConvertsHalves)),
        book_(narrow_ ? side.book_groups * side.group_size() : 0),
        tile_(kTile * stride_) {}

  void begin(int64_t book) {
    const int64_t group = side_.group_size(), first = book * side_.book_groups * group;
    centroids_ = static_cast<const char*>(side_.book) + first * (side_.half ? 2 : 4);
    if (!narrow_) return;
    // Converting a few numbers at a time would cost more than converting the codebook once.
    for (int64_t g = 0; g < side_.book_groups; ++g) read_book(side_, book, g, book_ + g * group);
    centroids_ = book_;
  }

  // Return whether rows are assembled from a float16 codebook.
  bool holds_halves() const { return side_.half && !narrow_; }
  const void* centroids() const { return centroids_; }  // of the first group

  int stride() const { return stride_; }  // elements between rows; at least a full vector of zeros follows the last channel

  // Call step(rows [size, stride()], first row, size) for kTile rows at a time, so that no load waits for the stores of
  // centroids.
  template <class Step>
  void for_tiles(IndexRows<Index>& indices, IndexBlock<Index> block, int count, Step&& step) {
    for (int t = 0; t < count; t += kTile) {
      const int size = std::min(kTile, count - t);
      const IndexBlock<Index> rows{block.row(t), block.stride};
      if (holds_halves())
        fill(static_cast<const f16*>(centroids_), indices, rows, size);
      else
        fill(static_cast<const float*>(centroids_), indices, rows, size);
      step(static_cast<const float*>(tile_), t, size);
    }
  }

 private:
  template <class T>
  void fill(const T* centroids, IndexRows<Index>& indices, IndexBlock<Index> block, int size) {
    switch (side_.coupled) {
      case 1:
        return fill<1>(centroids, indices, block, size);
      case 2:
        return fill<2>(centroids, indices, block, size);
      case 4:
        return fill<4>(centroids, indices, block, size);
      case 8:
        return fill<8>(centroids, indices, block, size);
      case 16:
        return fill<16>(centroids, indices, block, size);
      default:
        return fill<0>(centroids, indices, block, size);
    }
  }

  template <int kCoupled, class T>
  KVPRESS_APART void fill(const T* centroids, IndexRows<Index>& indices, IndexBlock<Index> block, int size) {
    const int coupled = kCoupled ? kCoupled : int(side_.coupled), groups = int(side_.groups);
    const int64_t step = side_.group_step();
    for (int i = 0; i < size; ++i) {
      const Index* codes = indices.split(block.row(i));
      const T* group = centroids;
      float* out = tile_ + i * stride_;
      for (int g = 0; g < groups; ++g, group += step, out += coupled)
        put_centroid<kCoupled>(group + int64_t(codes[g]) * coupled, coupled, out);
    }
  }

  const Coded& side_;
  const int stride_;
  const bool narrow_;
  Buffer<float> book_, tile_;
  const void* centroids_ = nullptr;
};

}  // namespace kvpress
