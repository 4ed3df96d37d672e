// SPDX-License-Identifier: Apache-2.0
// Attention on codes with integer dot products: nothing is dequantised.
//
// The scales of a key group are folded into the queries, which become 16-bit integers. Integer dot products give the logit to
// about 2^-15 of the largest term. Probabilities times value scales are rounded likewise.
#pragma once

#include "products.h"
#include "whole_codes.h"

#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define KVPRESS_INTEGERS 1

namespace kvpress {

constexpr float kIntRange = 32512.f;  // 127 * 256: the largest magnitude whose high byte fits int8

using UnsignedWords = uint32_t __attribute__((vector_size(sizeof(F))));
using SignedBytes = int8_t __attribute__((vector_size(kLanes)));

inline Words load_words(const int32_t* p) {
  Words x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void store_words(int32_t* p, Words x) { std::memcpy(p, &x, sizeof x); }

inline F load_half(const f16* p, int count) {
  if (count >= kLanes) return load(p);
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(__mmask16((1u << std::max(count, 0)) - 1), p));
#else
  return load_part(p, std::max(count, 0));
#endif
}

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#define KVPRESS_WHOLE_FACTORS 1
constexpr bool kWholeFactors = true;  // products of 16 bits, which one instruction adds in pairs
#else
constexpr bool kWholeFactors = false;  // products of bytes, which one instruction adds in fours, with less work on the codes
#endif

// Rounds x * y of two vectors to integer factors of codes, and splits these into two planes. Of four factors in a row, with
// 16-bit products the first and third go to one plane and the second and fourth to the other. With byte products the high bytes
// of all four go to one plane and the low bytes to the other: factor = 256 * high + low, both signed.
class Factors {
 public:
  KVPRESS_INLINE void operator()(F x0, F y0, F x1, F y1, int8_t* first, int8_t* second) const {
    // 128 rounds the high byte; the xor removes it from the low byte.
    const F magic = set1(kMagic + (kWholeFactors ? 0.f : 128.f));
    const Words a = (Words)fma(x0, y0, magic), b = (Words)fma(x1, y1, magic);
#if defined(__AVX512F__)
    const __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)a, _mm512_slli_epi32((__m512i)b, 16));
    __m512i planes = _mm512_permutexvar_epi32(order_, _mm512_shuffle_epi8(both, pick_));
    if constexpr (!kWholeFactors) planes = _mm512_xor_si512(planes, flip_);
    _mm256_storeu_si256((__m256i*)first, _mm512_castsi512_si256(planes));
    _mm256_storeu_si256((__m256i*)second, _mm512_extracti64x4_epi64(planes, 1));
#elif defined(__AVX2__)
    const __m256i both = _mm256_blend_epi16((__m256i)a, _mm256_slli_epi32((__m256i)b, 16), 0xaa);
    const __m256i planes = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(both, pick_), order_);
    _mm_storeu_si128((__m128i*)first, _mm256_castsi256_si128(planes));
    _mm_storeu_si128((__m128i*)second, _mm256_extracti128_si256(planes, 1));
#else
    put(first, a >> 8), put(first + kLanes, b >> 8);
    put(second, a ^ 0x80), put(second + kLanes, b ^ 0x80);
#endif
  }

 private:
#if defined(__AVX2__)
  // Order of bytes within each 128 bits: those of a and b for the first plane, then those for the second.
  static __m128i pick() {
    if (kWholeFactors) return _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return _mm_setr_epi8(1, 5, 9, 13, 3, 7, 11, 15, 0, 4, 8, 12, 2, 6, 10, 14);
  }
#if defined(__AVX512F__)
  const __m512i pick_ = _mm512_broadcast_i32x4(pick());
  const __m512i order_ = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i flip_ = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi8(int8_t(0x80)), 1);
#else
  const __m256i pick_ = _mm256_broadcastsi128_si256(pick());
  const __m256i order_ = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
#endif
#else
  static KVPRESS_INLINE void put(int8_t* out, Words x) {
    const SignedBytes bytes = __builtin_convertvector(x, SignedBytes);
    std::memcpy(out, &bytes, sizeof bytes);
  }
#endif
};

// sum[lane] += codes of the lane times four bytes of factors, the same for all lanes.
KVPRESS_INLINE void multiply_add(Words& sum, Words codes, const int8_t* factors) {
#if defined(__ARM_FEATURE_DOTPROD)
  sum = (Words)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t*)factors)));
#else
  int32_t four;
  std::memcpy(&four, factors, sizeof four);
#if defined(KVPRESS_WHOLE_FACTORS)
  add_pairs(sum, codes, Words{} + four);
#elif defined(KVPRESS_EMULATED)
  sum = (Words)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
#else
  Words total = sum;
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(total) : "v"(codes), "m"(*reinterpret_cast<const int32_t(*)[1]>(factors)));
  sum = total;
#endif
#endif
}

#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool kSignedCodes = true;  // codes are multiplied as signed bytes, so they must be below 128
#else
constexpr bool kSignedCodes = false;
#endif

// Extracts the codes of one part from words of four bytes, and multiplies them.
template <int kBits>
class Part {
  static constexpr bool kTwoDigits = kSignedCodes && kBits == 8;
  static constexpr int kDigit = kTwoDigits ? 4 : kBits;  // bits of a code that are multiplied at once

 public:
  // Vectors of codes. 16-bit factors need two: the first and third codes, and the second and fourth. Byte factors need one with
  // all four codes, or two with the low and high digits of codes that are too large.
  static constexpr int kWords = kWholeFactors || kTwoDigits ? 2 : 1;
  // Sums of a query: for byte factors, one for each plane and each digit.
  static constexpr int kSums = kWholeFactors ? 1 : 2 * kWords;

  // Codes may stay `left` bits from the right, unless they are signed: they are 2^left() times as large then, and codes that
  // stay in place take fewer instructions to extract.
  KVPRESS_INLINE Part(int part, int left)
      : left_(kSignedCodes ? 0 : left),
        right_(UnsignedWords{} + uint32_t(kBits * part - left_)),
        mask_(UnsignedWords{} + (((1u << kDigit) - 1) << left_) * (kWholeFactors ? 0x00010001u : 0x01010101u)) {}

  int left() const { return left_; }

  KVPRESS_INLINE void operator()(Words word, Words* codes) const {
    const UnsignedWords first = (UnsignedWords)word >> right_;
    codes[0] = (Words)(first & mask_);
    if constexpr (kWords == 2) codes[1] = (Words)(first >> (kTwoDigits ? 4 : 8) & mask_);
  }

  // sums[kSums m ...] += codes times the factors of kQueries queries. Queries are `stride` bytes apart, planes `plane` bytes.
  template <int kQueries>
  static KVPRESS_INLINE void multiply(Words* sums, const Words* codes, const int8_t* factors, int stride, int plane) {
    unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
      unrolled<2 * (kWholeFactors ? 1 : kWords)>([&](auto s) KVPRESS_INLINE_LAMBDA {
        multiply_add(sums[i * kSums + s % kSums], codes[kWholeFactors ? s : s / 2], factors + i * stride + s % 2 * plane);
      });
    });
  }

  // Combine the sums of one query.
  static KVPRESS_INLINE Words total(const Words* sums) {
    if constexpr (kWholeFactors) return sums[0];
    const Words low = (sums[0] << 8) + sums[1 % kSums];
    if constexpr (!kTwoDigits) return low;
    return low + (((sums[2 % kSums] << 8) + sums[3 % kSums]) << 4);
  }

 private:
  const int left_;
  const UnsignedWords right_, mask_;
};

// True if every opportunity is used to prefetch. Short codes need few prefetches, and each call costs as much as a tenth of the
// products in between.
template <int kBits>
constexpr bool kOften = kBits >= 4;

// Call `step` with the bits of a plane as a constant.
template <class Step>
inline void for_bits(int bits, Step&& step) {
  using std::integral_constant;
  if (bits == 1) return step(integral_constant<int, 1>{});
  if (bits == 2) return step(integral_constant<int, 2>{});
  if (bits == 4) return step(integral_constant<int, 4>{});
  step(integral_constant<int, 8>{});
}

}  // namespace kvpress
#endif
