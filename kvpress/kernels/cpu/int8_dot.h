// SPDX-License-Identifier: Apache-2.0
// Attention on codes with 8-bit integer dot products: nothing is dequantised.
//
// A key group folds its scales into the queries, which become 16-bit integers split into two signed bytes: two integer
// dot products give the logit to about 2^-15 of the largest term. Probabilities times value scales are split likewise.
#pragma once

#include "buffer.h"
#include "codes.h"

#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define KVPRESS_INT8 1

namespace kvpress {

constexpr float kIntRange = 32512.f;  // 127 * 256: the largest magnitude whose high byte stays within int8

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

// Split round(x * y) of two vectors into signed bytes: product = 256 * high + low.
class ByteSplit {
 public:
  KVPRESS_INLINE void operator()(F x0, F y0, F x1, F y1, int8_t* high, int8_t* low) const {
    // 1.5 * 2^23 puts the integer into the low mantissa bits; 128 rounds the high byte and is undone by the xor.
    const F magic = set1(0x1.8p23f + 128.f);
    const Words a = (Words)fma(x0, y0, magic), b = (Words)fma(x1, y1, magic);
#if defined(__AVX512VBMI__)
    const __m512i bytes = _mm512_xor_si512(_mm512_permutex2var_epi8((__m512i)a, pick_, (__m512i)b), flip_);
    _mm256_storeu_si256((__m256i*)high, _mm512_castsi512_si256(bytes));
    _mm256_storeu_si256((__m256i*)low, _mm512_extracti64x4_epi64(bytes, 1));
#else
    put(high, a >> 8), put(high + kLanes, b >> 8);
    put(low, a ^ 0x80), put(low + kLanes, b ^ 0x80);
#endif
  }

 private:
#if defined(__AVX512VBMI__)
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
#else
  static KVPRESS_INLINE void put(int8_t* out, Words x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    // The first byte of every word, moved together in each half; converting would take twice as many shuffles.
    const __m256i first = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                           0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i picked = _mm256_shuffle_epi8((__m256i)x, first);
    _mm_storel_epi64((__m128i*)out,
                     _mm_or_si128(_mm256_castsi256_si128(picked), _mm256_extracti128_si256(picked, 1)));
#else
    const SignedBytes bytes = __builtin_convertvector(x, SignedBytes);
    std::memcpy(out, &bytes, sizeof bytes);
#endif
  }
#endif
};

#if defined(__AVX512VNNI__)
constexpr bool kWholeBytes = true;  // products of 8-bit codes do not overflow
#else
constexpr bool kWholeBytes = false;
#endif

// Codes that are multiplied at once; those of 8 bits go in two halves where products of whole bytes would overflow.
template <int kBits>
constexpr int kHalves = kBits == 8 && !kWholeBytes ? 2 : 1;

// Takes the codes of one part out of words, one per byte; of 8-bit codes the given half.
template <int kBits>
class Part {
 public:
  KVPRESS_INLINE Part(int part, int half)
      : right_(UnsignedWords{} + uint32_t(kBits == 8 ? 4 * half : kBits * part)),
        mask_(UnsignedWords{} + ((1u << std::min(kBits, 4)) - 1) * 0x01010101u) {}

  KVPRESS_INLINE Words operator()(Words word) const {
    if constexpr (kBits == 8 && kWholeBytes) return word;
    return (Words)(((UnsignedWords)word >> right_) & mask_);
  }

 private:
  const UnsignedWords right_, mask_;
};

// sum[lane] += four unsigned codes of the lane times the same four signed bytes. Sums are plain vectors: compilers leave
// arrays of classes that hold one on the stack.
#if defined(__AVX512VNNI__)
constexpr bool kNarrow = false;
// Assembly, because compilers neither fold the broadcast into the instruction nor leave the sums in place, which costs as
// much as the product itself.
KVPRESS_INLINE void multiply_add(Words& sum, Words codes, const int8_t* four) {
  Words x = sum;  // an operand of its own, because what is passed by reference must live in memory
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(x) : "v"(codes), "m"(*reinterpret_cast<const int32_t(*)[1]>(four)));
  sum = x;
}
#elif defined(__AVX2__)
constexpr bool kNarrow = true;  // sums of 16 bits, see kSums
KVPRESS_INLINE void multiply_add(Words& sum, Words codes, const int8_t* four) {
  int32_t bytes;
  std::memcpy(&bytes, four, sizeof bytes);
#if defined(__AVX512F__)
  const Words product = (Words)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(bytes));
#else
  const Words product = (Words)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(bytes));
#endif
  // Assembly, because compilers add up trees of products, which do not fit into the registers, or copy every sum.
  Words x = sum;
  asm("vpaddw %1, %0, %0" : "+v"(x) : "v"(product));
  sum = x;
}
#else
constexpr bool kNarrow = false;
KVPRESS_INLINE void multiply_add(Words& sum, Words codes, const int8_t* four) {
  sum = (Words)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t*)four)));
}
#endif

// How many products of two codes of so many bits and two bytes a sum of 16 bits holds: 8, 42 or 127 with 4, 2 or 1 bits.
template <int kBits>
constexpr int kSums = INT16_MAX / (2 * 128 * ((1 << std::min(kBits, 4)) - 1));

// The sum per lane of 32 bits.
KVPRESS_INLINE Words whole(Words sum) {
  if constexpr (!kNarrow) return sum;
#if defined(__AVX512F__)
  return (Words)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  return (Words)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#endif
}

// 2^left (256 high + low)
KVPRESS_INLINE Words joined(Words high, Words low, int left) { return ((whole(high) << 8) + whole(low)) << left; }

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
