// Attention on codes with 8-bit integer dot products (AVX-512 VNNI): nothing is dequantised.
//
// A key group folds its scales into the queries, which become 16-bit integers split into two signed bytes: two integer
// dot products give the logit to about 2^-15 of the largest term. Probabilities times value scales are split likewise.
#pragma once

#include "buffer.h"
#include "codes.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define KVPRESS_INT8 1

namespace kvpress {

constexpr float kIntRange = 32512.f;  // 127 * 256: the largest magnitude whose high byte stays within int8

inline __mmask16 first_lanes(int count) { return __mmask16((1u << std::clamp(count, 0, 16)) - 1); }

inline __m512 load_half(const f16* p, int count) {
  if (count >= 16) return load(p);
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), p));
}

inline __m128i load_bytes(const uint8_t* p, int count) {
  if (count >= 16) return _mm_loadu_si128((const __m128i*)p);
  return _mm_maskz_loadu_epi8(first_lanes(count), p);
}

// Up to 16 bytes of four rows, `step` apart in the list, one row per 128-bit lane.
inline __m512i load_lanes(const uint8_t* const* rows, int step, int offset, int count) {
  __m512i x = _mm512_castsi128_si512(load_bytes(rows[0] + offset, count));
  x = _mm512_inserti32x4(x, load_bytes(rows[step] + offset, count), 1);
  x = _mm512_inserti32x4(x, load_bytes(rows[2 * step] + offset, count), 2);
  return _mm512_inserti32x4(x, load_bytes(rows[3 * step] + offset, count), 3);
}

// Split round(x * y) of two vectors into signed bytes: product = 256 * high + low.
class ByteSplit {
 public:
  KVPRESS_INLINE void operator()(F x0, F y0, F x1, F y1, int8_t* high, int8_t* low) const {
    // 1.5 * 2^23 puts the integer into the low mantissa bits; 128 rounds the high byte and is undone by the xor.
    const F magic = set1(0x1.8p23f + 128.f);
    const __m512i bytes = _mm512_xor_si512(
        _mm512_permutex2var_epi8(_mm512_castps_si512(fma(x0, y0, magic)), pick_,
                                 _mm512_castps_si512(fma(x1, y1, magic))),
        flip_);
    _mm256_storeu_si256((__m256i*)high, _mm512_castsi512_si256(bytes));
    _mm256_storeu_si256((__m256i*)low, _mm512_extracti64x4_epi64(bytes, 1));
  }

 private:
  static __m512i pick() {
    alignas(64) uint8_t index[64];
    for (int i = 0; i < 32; ++i) {
      index[i] = uint8_t(4 * i + 1);
      index[32 + i] = uint8_t(4 * i);
    }
    return _mm512_load_si512(index);
  }
  const __m512i pick_ = pick();
  const __m512i flip_ = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi8(int8_t(0x80)), 1);
};

// Codes of one part, still one per byte, multiplied by 2^kShift.
template <int kBits, int kShift>
inline __m512i part_of(__m512i word, int part) {
  if constexpr (kBits == 8) return word;
  const int right = part * kBits - kShift;
  const __m512i moved = right >= 0 ? _mm512_srli_epi32(word, right) : _mm512_slli_epi32(word, -right);
  return _mm512_and_si512(moved, _mm512_set1_epi8(int8_t(((1 << kBits) - 1) << kShift)));
}

// sum[lane] += four unsigned codes of the lane times the same four signed bytes. Assembly, because compilers neither
// fold the broadcast into the instruction nor leave the sums in place, which costs as much as the product itself.
KVPRESS_INLINE void multiply_add(__m512i& sum, __m512i codes, const int8_t* four) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<const int32_t(*)[1]>(four)));
}

// Instantiate `step` for the widths that a plane can have.
template <class Step>
inline void for_plane(const Plane& plane, Step&& step) {
  using std::integral_constant;
  if (plane.shift) return step(integral_constant<int, 1>{}, integral_constant<int, 2>{});
  if (plane.bits == 1) return step(integral_constant<int, 1>{}, integral_constant<int, 0>{});
  if (plane.bits == 2) return step(integral_constant<int, 2>{}, integral_constant<int, 0>{});
  if (plane.bits == 4) return step(integral_constant<int, 4>{}, integral_constant<int, 0>{});
  step(integral_constant<int, 8>{}, integral_constant<int, 0>{});
}

}  // namespace kvpress
#endif
