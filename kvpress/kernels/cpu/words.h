// SPDX-License-Identifier: Apache-2.0
// Transposes bytes of several rows into vectors of kLanes words.
#pragma once

#include "simd.h"

#if defined(__AVX2__) || defined(__ARM_NEON)
namespace kvpress {

constexpr int kBlock = 16;                     // bytes of a row that are loaded at once
constexpr int kBlockVectors = kBlock / kLanes;  // vectors that have a word for each byte of a block

#if defined(__AVX2__)
using Block = __m128i;
inline Block load_block(const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); }
inline Block load_half_block(const uint8_t* p) { return _mm_loadl_epi64((const __m128i*)p); }
#else
using Block = uint8x16_t;
inline Block load_block(const uint8_t* p) { return vld1q_u8(p); }
inline Block load_half_block(const uint8_t* p) { return vcombine_u8(vld1_u8(p), vdup_n_u8(0)); }
#endif

// Load up to 16 bytes; the others are zero.
inline Block load_bytes(const uint8_t* p, int count) {
  if (count >= kBlock) return load_block(p);
#if defined(__AVX512F__)
  return _mm_maskz_loadu_epi8(__mmask16((1u << std::max(count, 0)) - 1), p);
#else
  if (count == kBlock / 2) return load_half_block(p);
  uint8_t bytes[kBlock] = {};  // read back before all stores are done: this stall takes longer than all other work on the row
  std::memcpy(bytes, p, std::max(count, 0));
  return load_block(bytes);
#endif
}

// Load up to 16 bytes of kLanes / 4 rows, `step` apart in the list, one row per 128 bits.
inline Words load_lanes(const uint8_t* const* rows, int step, int offset, int count) {
#if defined(__AVX512F__)
  __m512i x = _mm512_castsi128_si512(load_bytes(rows[0] + offset, count));
  x = _mm512_inserti32x4(x, load_bytes(rows[step] + offset, count), 1);
  x = _mm512_inserti32x4(x, load_bytes(rows[2 * step] + offset, count), 2);
  return (Words)_mm512_inserti32x4(x, load_bytes(rows[3 * step] + offset, count), 3);
#elif defined(__AVX2__)
  const __m256i x = _mm256_castsi128_si256(load_bytes(rows[0] + offset, count));
  return (Words)_mm256_inserti128_si256(x, load_bytes(rows[step] + offset, count), 1);
#else
  return (Words)load_bytes(rows[0] + offset, count);
#endif
}

// Interleave the lower or the upper words of a and b within each 128 bits; zip_*_pairs interleave pairs of words.
#if defined(__AVX512F__)
KVPRESS_INLINE Words zip_low(Words a, Words b) { return (Words)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b); }
KVPRESS_INLINE Words zip_high(Words a, Words b) { return (Words)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b); }
KVPRESS_INLINE Words zip_low_pairs(Words a, Words b) { return (Words)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b); }
KVPRESS_INLINE Words zip_high_pairs(Words a, Words b) { return (Words)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
KVPRESS_INLINE Words zip_low(Words a, Words b) { return (Words)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b); }
KVPRESS_INLINE Words zip_high(Words a, Words b) { return (Words)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b); }
KVPRESS_INLINE Words zip_low_pairs(Words a, Words b) { return (Words)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b); }
KVPRESS_INLINE Words zip_high_pairs(Words a, Words b) { return (Words)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b); }
#else
KVPRESS_INLINE Words zip_low(Words a, Words b) { return (Words)vzip1q_s32((int32x4_t)a, (int32x4_t)b); }
KVPRESS_INLINE Words zip_high(Words a, Words b) { return (Words)vzip2q_s32((int32x4_t)a, (int32x4_t)b); }
KVPRESS_INLINE Words zip_low_pairs(Words a, Words b) { return (Words)vzip1q_s64((int64x2_t)a, (int64x2_t)b); }
KVPRESS_INLINE Words zip_high_pairs(Words a, Words b) { return (Words)vzip2q_s64((int64x2_t)a, (int64x2_t)b); }
#endif

// Transpose kLanes rows: lane t of column k has bytes 4k .. 4k + 3 of row t.
KVPRESS_INLINE void transpose_rows(const uint8_t* const* rows, int offset, int count, Words* column) {
  Words x[4];
  for (int i = 0; i < 4; ++i) x[i] = load_lanes(rows + i, 4, offset, count);
  const Words first[] = {zip_low(x[0], x[1]), zip_high(x[0], x[1])}, last[] = {zip_low(x[2], x[3]), zip_high(x[2], x[3])};
  for (int i = 0; i < 2; ++i) {
    column[2 * i] = zip_low_pairs(first[i], last[i]);
    column[2 * i + 1] = zip_high_pairs(first[i], last[i]);
  }
}

// Interleaves the bytes of four rows: lane i of all vectors together has byte i of the four rows.
class Interleave {
 public:
  KVPRESS_INLINE void operator()(const uint8_t* const* rows, int offset, int count, Words* out) const {
#if defined(__AVX512VBMI__)
    out[0] = (Words)_mm512_permutexvar_epi8(bytes_, (__m512i)load_lanes(rows, 1, offset, count));
#elif defined(__AVX512F__)
    const __m512i words = _mm512_permutexvar_epi32(words_, (__m512i)load_lanes(rows, 1, offset, count));
    out[0] = (Words)_mm512_shuffle_epi8(words, bytes_);
#elif defined(__AVX2__)
    const __m256i even = (__m256i)load_lanes(rows, 2, offset, count);
    const __m256i odd = (__m256i)load_lanes(rows + 1, 2, offset, count);
    const __m256i pairs[2] = {_mm256_unpacklo_epi8(even, odd), _mm256_unpackhi_epi8(even, odd)};
    for (int v = 0; v < 2; ++v) out[v] = (Words)_mm256_shuffle_epi8(_mm256_permute4x64_epi64(pairs[v], 0xd8), bytes_);
#else
    Block row[4];
    for (int i = 0; i < 4; ++i) row[i] = load_bytes(rows[i] + offset, count);
    const uint8x16x2_t a = vzipq_u8(row[0], row[1]), b = vzipq_u8(row[2], row[3]);
    for (int v = 0; v < 2; ++v) {
      const uint16x8x2_t words = vzipq_u16(vreinterpretq_u16_u8(a.val[v]), vreinterpretq_u16_u8(b.val[v]));
      out[2 * v] = (Words)words.val[0];
      out[2 * v + 1] = (Words)words.val[1];
    }
#endif
  }

 private:
#if defined(__AVX512F__)
  static __m512i order(bool words) {
    alignas(64) uint8_t byte[64];
    alignas(64) uint32_t word[16];
    for (int i = 0; i < 16; ++i) word[i] = 4 * (i % 4) + i / 4;
#if defined(__AVX512VBMI__)
    for (int i = 0; i < 64; ++i) byte[i] = uint8_t(16 * (i % 4) + i / 4);
#else
    for (int i = 0; i < 64; ++i) byte[i] = uint8_t(4 * (i % 4) + i % 16 / 4);
#endif
    return words ? _mm512_load_si512(word) : _mm512_load_si512(byte);
  }
  const __m512i bytes_ = order(false), words_ = order(true);
#elif defined(__AVX2__)
  const __m256i bytes_ = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 0, 1, 8, 9, 2, 3, 10, 11,
                                          4, 5, 12, 13, 6, 7, 14, 15);
#endif
};

}  // namespace kvpress
#else
namespace kvpress {

inline void transpose_rows(const uint8_t* const* rows, int offset, int count, Words* column) {
  for (int t = 0; t < kLanes; ++t) {
    int32_t words[4] = {};
    std::memcpy(words, rows[t] + offset, std::clamp(count, 0, 16));
    for (int k = 0; k < 4; ++k) column[k][t] = words[k];
  }
}

}  // namespace kvpress
#endif
