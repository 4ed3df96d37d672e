// SPDX-License-Identifier: Apache-2.0
// Levels as integers, for products of 16 bits: twice as many at once as in float32.
//
// A level is a multiple of 1 / 4092 of the largest one, which rounds it by about 2^-13. The other factor gets the remaining
// bits of 32: it is as large as the sum of products allows, 11 to 15 bits.
#pragma once

#include "levels.h"
#include "products.h"

#if defined(__AVX2__)
#define KVPRESS_WHOLE_LEVELS 1

namespace kvpress {

// One table of levels, looked up by shuffles of bytes.
class WholeLevels {
 public:
  static constexpr int kBits = 4;            // maximum bits of a code
  static constexpr float kLargest = 4092.f;  // a multiple of 12, so that the levels of e2m1 are exact

  WholeLevels(int bits, int /*tables*/) : mask_(0x01010101 * ((1 << bits) - 1)) {}

  // Set the table from levels that are `stride` apart. Codes past the last of `entries` decode to the last level.
  void set(int /*table*/, const float* levels, int entries, int stride = 1) {
    float largest = 0;
    for (int i = 0; i < entries; ++i) largest = std::max(largest, std::abs(levels[i * stride]));
    unit_ = largest / kLargest;
    for (int i = 0; i < kLevels; ++i) {
      const float level = levels[std::min(i, entries - 1) * stride];
      const int whole = largest > 0 ? int(std::lrint(level / largest * kLargest)) : 0;
      low_[i] = uint8_t(whole), high_[i] = uint8_t(whole >> 8);
    }
  }

  // Value of the integer 1.
  float unit() const { return unit_; }

  // Look up the levels of the four codes in the low bits of each lane's bytes: out[0] has those of the first two lanes of each
  // 128 bits, out[1] those of the other two.
  KVPRESS_INLINE void look_up(Words codes, Words (&out)[2]) const {
    const Words index = codes & mask_;
#if defined(__AVX512F__)
    const auto table = [](const uint8_t* p) { return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)p)); };
    const __m512i low = _mm512_shuffle_epi8(table(low_), (__m512i)index);
    const __m512i high = _mm512_shuffle_epi8(table(high_), (__m512i)index);
    out[0] = (Words)_mm512_unpacklo_epi8(low, high), out[1] = (Words)_mm512_unpackhi_epi8(low, high);
#else
    const auto table = [](const uint8_t* p) { return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)p)); };
    const __m256i low = _mm256_shuffle_epi8(table(low_), (__m256i)index);
    const __m256i high = _mm256_shuffle_epi8(table(high_), (__m256i)index);
    out[0] = (Words)_mm256_unpacklo_epi8(low, high), out[1] = (Words)_mm256_unpackhi_epi8(low, high);
#endif
  }

 private:
  const int mask_;
  float unit_ = 0;
  alignas(16) uint8_t low_[kLevels] = {}, high_[kLevels] = {};
};

// Unit of factors that are rounded to integers: as small as the sum of their products with levels allows.
class FactorUnit {
 public:
  // Largest magnitude and sum of magnitudes of `count` factors.
  FactorUnit(float largest, float sum, int count) {
    if (!(largest > 0)) return;
    const float most = float(INT32_MAX) / WholeLevels::kLargest - float(count);  // rounding adds up to half a unit to each
    inverse_ = std::min(most / sum, 32512.f / largest);
    unit_ = 1 / inverse_;
  }

  float unit() const { return unit_; }
  float inverse() const { return inverse_; }

 private:
  float unit_ = 0, inverse_ = 0;
};

// Add neighbouring lanes. In each 128 bits, `a` has two lanes for each of the first two of four items and `b` for the other
// two; the result has one lane per item.
KVPRESS_INLINE Words add_neighbours(Words a, Words b) {
#if defined(__AVX512F__)
  const __m512 x = _mm512_castsi512_ps((__m512i)a), y = _mm512_castsi512_ps((__m512i)b);
  return (Words)_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)) + (Words)_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd));
#else
  return (Words)_mm256_hadd_epi32((__m256i)a, (__m256i)b);
#endif
}

// Broadcast four factors of 16 bits.
KVPRESS_INLINE Words repeat_four(const int16_t* factors) {
  int64_t four;
  std::memcpy(&four, factors, sizeof four);
  using Fours = int64_t __attribute__((vector_size(sizeof(Words))));
  return (Words)(Fours{} + four);
}

// Round 2 * kLanes floats to 16-bit integers and store each group of four twice.
KVPRESS_INLINE void put_fours_twice(F a, F b, int16_t* out) {
#if defined(__AVX512F__)
  const __m512i both = _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));
  _mm512_storeu_si512(out, _mm512_unpacklo_epi64(both, both));
  _mm512_storeu_si512(out + 2 * kLanes, _mm512_unpackhi_epi64(both, both));
#else
  const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
  _mm256_storeu_si256((__m256i*)out, _mm256_unpacklo_epi64(both, both));
  _mm256_storeu_si256((__m256i*)(out + 2 * kLanes), _mm256_unpackhi_epi64(both, both));
#endif
}

// Lane i of the result is the sum of lanes i of all 128-bit parts.
KVPRESS_INLINE __m128i add_quads(Words x) {
#if defined(__AVX512F__)
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256((__m512i)x), _mm512_extracti64x4_epi64((__m512i)x, 1));
#else
  const __m256i half = (__m256i)x;
#endif
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// Within each 128 bits, lane i becomes the bytes i of its four lanes.
KVPRESS_INLINE Words transpose_fours(Words x) {
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#if defined(__AVX512F__)
  return (Words)_mm512_shuffle_epi8((__m512i)x, _mm512_broadcast_i32x4(order));
#else
  return (Words)_mm256_shuffle_epi8((__m256i)x, _mm256_broadcastsi128_si256(order));
#endif
}

}  // namespace kvpress
#endif
