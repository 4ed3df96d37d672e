// SPDX-License-Identifier: Apache-2.0
// Codebooks of keys as 16-bit integers, for models that compute in 16 bits.
#pragma once

#include "centroids.h"
#include "products.h"

#if defined(__AVX2__)
#define KVPRESS_WHOLE_BOOKS 1
namespace kvpress {

constexpr int kWide = 2 * kLanes;       // 16-bit numbers in a vector
constexpr int kWholeEntries = 256;      // entries of every group, indexed by a byte
constexpr int64_t kWholeRows = 2048;    // fewer rows do not pay for rounding a codebook

// Store the low 16 bits of numbers to which kMagic was added.
KVPRESS_INLINE void store_low_halves(int16_t* out, F x) {
  using Halves = int16_t __attribute__((vector_size(2 * kLanes)));
  const Halves low = __builtin_convertvector((Words)x, Halves);
  std::memcpy(out, &low, sizeof low);
}

KVPRESS_INLINE Words load_wide(const int16_t* p) {
  Words x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// One codebook of keys whose channels are all rotated, in units of its channels: [groups, entries, coupled]. The two channels
// of a rotated pair have one unit.
class WholeBook {
  static constexpr float kMost = 23160;  // a pair is at most sqrt(2) times as long, which still fits 16 bits
  static constexpr int kPattern = 16;  // numbers after which the channels of a group and the lanes of a vector repeat

 public:
  explicit WholeBook(const Coded& side)
      : side_(side),
        half_(int(side.channels() / 2)),
        numbers_(side.book_groups * side.group_size()),
        units_(half_),
        group_(side.group_size()) {}

  static bool fits(const Coded& side) {
    return side.bits == 8 && side.entries == kWholeEntries && side.book_groups == side.groups &&
           (side.coupled == 4 || side.coupled == 8 || side.coupled == 16);
  }

  void begin(int64_t book) {
    if (book == book_) return;
    book_ = book;
    const int64_t size = side_.group_size();
    std::fill_n(static_cast<float*>(units_), half_, 0.f);
    for (int g = 0; g < side_.groups; ++g) measure(read_book(side_, book, g, group_), units_of(g));
    for (int g = 0; g < side_.groups; ++g) round(read_book(side_, book, g, group_), units_of(g), numbers_ + g * size);
  }

  const int16_t* numbers() const { return numbers_; }
  float unit(int channel) const { return units_[channel % half_]; }

 private:
  float* units_of(int group) const { return units_ + int(group * side_.coupled) % half_; }

  void measure(const float* numbers, float* units) const {
    F largest[kPattern / kLanes] = {};
    for (int64_t i = 0; i < side_.group_size(); i += kPattern)
      unrolled<kPattern / kLanes>([&](auto v) KVPRESS_INLINE_LAMBDA {
        largest[v] = max(largest[v], abs(load(numbers + i + v * kLanes)));
      });
    float each[kPattern];
    for (int v = 0; v < kPattern / kLanes; ++v) store(each + v * kLanes, largest[v]);
    for (int i = 0; i < kPattern; ++i) {
      float& unit = units[i % side_.coupled];
      unit = std::max(unit, each[i] / kMost);
    }
  }

  void round(const float* numbers, const float* units, int16_t* out) const {
    float each[kPattern];
    for (int i = 0; i < kPattern; ++i) {
      const float unit = units[i % side_.coupled];
      each[i] = unit == 0 ? 0.f : 1 / unit;
    }
    for (int64_t i = 0; i < side_.group_size(); i += kPattern)
      unrolled<kPattern / kLanes>([&](auto v) KVPRESS_INLINE_LAMBDA {
        const int64_t at = i + v * kLanes;
        store_low_halves(out + at, fma(load(numbers + at), load(each + v * kLanes), set1(kMagic)));
      });
  }

  const Coded& side_;
  const int half_;
  int64_t book_ = -1;
  Buffer<int16_t> numbers_;
  Buffer<float> units_, group_;
};

// Load kWide numbers: the centroids that neighbouring groups' codes index.
template <int kCoupled>
KVPRESS_INLINE Words load_centroids(const int16_t* group, const uint8_t* codes) {
  uint64_t word = 0;  // one load and shifts: single bytes would take as many loads as the centroids
  std::memcpy(&word, codes, kWide / kCoupled);
  const auto centroid = [&](int i) KVPRESS_INLINE_LAMBDA {
    return group + (int64_t(i) * kWholeEntries + int64_t(word >> 8 * i & 255)) * kCoupled;
  };
  const auto eight = [&](int i) KVPRESS_INLINE_LAMBDA {
    if constexpr (kCoupled == 4) {
      const double *first = (const double*)centroid(2 * i), *second = (const double*)centroid(2 * i + 1);
      return _mm_castpd_si128(_mm_loadh_pd(_mm_load_sd(first), second));
    } else {
      return _mm_loadu_si128((const __m128i*)(centroid(i * 8 / kCoupled) + i * 8 % kCoupled));
    }
  };
#if defined(__AVX512F__)
  __m512i x = _mm512_castsi128_si512(eight(0));
  x = _mm512_inserti32x4(x, eight(1), 1);
  x = _mm512_inserti32x4(x, eight(2), 2);
  return (Words)_mm512_inserti32x4(x, eight(3), 3);
#else
  return (Words)_mm256_inserti128_si256(_mm256_castsi128_si256(eight(0)), eight(1), 1);
#endif
}

}  // namespace kvpress
#endif
