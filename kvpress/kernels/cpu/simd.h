// SPDX-License-Identifier: Apache-2.0
// One float vector `F` of kLanes lanes per instruction set. Code that uses this file is written once for all of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// For code that is fast only if the caller's constants are compiled into it.
#define KVPRESS_INLINE inline __attribute__((always_inline))
#define KVPRESS_INLINE_LAMBDA __attribute__((always_inline))

namespace kvpress {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
};
struct e8m0 {
  uint8_t bits;
};

// Vectors of e4m3 numbers are loaded divided by this: with float16 conversion, loading then only moves bits.
constexpr float kE4m3Unit = 256;

constexpr float kMagic = 0x1.8p23f;  // adding this rounds a number up to 2^22 and puts the integer into the low bits

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  const uint32_t wide = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &wide, sizeof out);
  return out;
}

inline float to_float(e4m3 x) {
  const int exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
  const uint32_t wide = uint32_t(exponent + 120) << 23 | uint32_t(mantissa) << 20;
  float out;
  std::memcpy(&out, &wide, sizeof out);
  if (exponent == 0) out = float(mantissa) * 0x1p-9f;  // subnormal
  return x.bits >> 7 ? -out : out;
}

inline float to_float(e8m0 x) {
  const uint32_t wide = x.bits ? uint32_t(x.bits) << 23 : 0x00400000u;
  float out;
  std::memcpy(&out, &wide, sizeof out);
  return out;
}

#if defined(__F16C__)
inline float to_float(f16 x) { return _cvtsh_ss(x.bits); }
inline f16 to_half(float x) { return {_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)}; }
#elif defined(__aarch64__)
inline float to_float(f16 x) {
  __fp16 half;
  std::memcpy(&half, &x, sizeof half);
  return half;
}
inline f16 to_half(float x) {
  const __fp16 half = __fp16(x);
  f16 out;
  std::memcpy(&out, &half, sizeof out);
  return out;
}
#else
inline float to_float(f16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  uint32_t wide = (magnitude << 13) + (uint32_t(112) << 23);
  if (magnitude >= 0x7c00) wide += uint32_t(112) << 23;  // infinity and NaN keep the top exponent
  float out;
  if (magnitude < 0x0400) {
    out = float(magnitude) * 0x1p-24f;  // subnormal
  } else {
    std::memcpy(&out, &wide, sizeof out);
  }
  return sign ? -out : out;
}

// Round to nearest, ties to even.
inline f16 to_half(float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof wide);
  const uint16_t sign = uint16_t(wide >> 16 & 0x8000);
  uint32_t magnitude = wide & 0x7fffffff;
  if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (magnitude < 0x38800000) {
    // Subnormal: the last bit of a float in [0.5, 1) is worth as much as that of a subnormal half, so the addition rounds.
    const float shifted = std::abs(x) + 0.5f;
    std::memcpy(&magnitude, &shifted, sizeof magnitude);
    return {uint16_t(sign | (magnitude - 0x3f000000))};
  }
  magnitude += 0xfff + (magnitude >> 13 & 1);
  return {uint16_t(sign | std::min(magnitude - 0x38000000 >> 13, uint32_t(0x7c00)))};
}
#endif

#if defined(__AVX512F__)

using F = __m512;
constexpr int kLanes = 16;

inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
#define KVPRESS_WIDENS 1
template <class Bits>
inline F widen(Bits halves) {
  return _mm512_cvtph_ps((__m256i)halves);
}
inline F load_parts(const f16* const (&p)[2]) {
  const __m256i first = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)p[0]));
  return _mm512_cvtph_ps(_mm256_inserti128_si256(first, _mm_loadu_si128((const __m128i*)p[1]), 1));
}
inline F load_parts(const f16* const (&p)[4]) {
  const auto pair = [&](int i) KVPRESS_INLINE_LAMBDA {
    return _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i*)p[i]), _mm_loadl_epi64((const __m128i*)p[i + 1]));
  };
  return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(pair(0)), pair(2), 1));
}
inline F load(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline void store(uint8_t* p, F x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtusepi32_epi8(_mm512_cvtps_epu32(x))); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F round(F a) { return _mm512_roundscale_ps(a, 0); }
// p * 2^n for integer n; underflows to zero.
inline F ldexp(F p, F n) { return _mm512_scalef_ps(p, n); }
inline float sum(F x) { return _mm512_reduce_add_ps(x); }
inline float max_lane(F x) { return _mm512_reduce_max_ps(x); }

// Store the four horizontal sums in out[0..3].
inline void store_sums(float* out, F a, F b, F c, F d) {
  const F ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const F cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const F abcd = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

// Split two vectors into the numbers at even and at odd places; join_pairs is the inverse.
#define KVPRESS_PAIRS 1
inline void part_pairs(F& a, F& b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const F evens = _mm512_permutex2var_ps(a, even, b);
  b = _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b), a = evens;
}
inline void join_pairs(F& a, F& b) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const F lows = _mm512_permutex2var_ps(a, low, b);
  b = _mm512_permutex2var_ps(a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b), a = lows;
}

#elif defined(__AVX2__)

using F = __m256;
constexpr int kLanes = 8;

inline F set1(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline F load(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
#define KVPRESS_WIDENS 1
template <class Bits>
inline F widen(Bits halves) {
  return _mm256_cvtph_ps((__m128i)halves);
}
inline F load_parts(const f16* const (&p)[2]) {
  return _mm256_cvtph_ps(_mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i*)p[0]), _mm_loadl_epi64((const __m128i*)p[1])));
}
inline F load(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline void store(uint8_t* p, F x) {
  const __m256i words = _mm256_cvtps_epi32(x);
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(halves, halves));
}
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F ldexp(F p, F n) {
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  const F live = _mm256_cmp_ps(n, set1(-126.f), _CMP_NLT_UQ);
  return _mm256_and_ps(live, mul(p, _mm256_castsi256_ps(power)));
}
inline float max_lane(F x) {
  __m128 best = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  best = _mm_max_ps(best, _mm_movehl_ps(best, best));
  return _mm_cvtss_f32(_mm_max_ss(best, _mm_movehdup_ps(best)));
}
inline float sum(F x) {
  __m128 total = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  total = _mm_add_ps(total, _mm_movehl_ps(total, total));
  return _mm_cvtss_f32(_mm_add_ss(total, _mm_movehdup_ps(total)));
}

inline void store_sums(float* out, F a, F b, F c, F d) {
  const F abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}

#define KVPRESS_PAIRS 1
inline void part_pairs(F& a, F& b) {
  const auto ordered = [](F x) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8)); };
  const F evens = ordered(_mm256_shuffle_ps(a, b, 0x88));
  b = ordered(_mm256_shuffle_ps(a, b, 0xdd)), a = evens;
}
inline void join_pairs(F& a, F& b) {
  const F low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
  a = _mm256_permute2f128_ps(low, high, 0x20), b = _mm256_permute2f128_ps(low, high, 0x31);
}

#else

// GCC and Clang lower this to the vectors of the target (SSE2, NEON, ...).
typedef float F __attribute__((vector_size(16)));
constexpr int kLanes = 4;

inline F set1(float x) { return F{x, x, x, x}; }
template <class T>
inline F load(const T* p) {
  F x{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
  if constexpr (std::is_same_v<T, e4m3>) x /= kE4m3Unit;
  return x;
}
inline F load(const float* p) {
  F x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
#if defined(__aarch64__)
inline F load(const bf16* p) { return (F)vshll_n_u16(vld1_u16((const uint16_t*)p), 16); }
#define KVPRESS_WIDENS 1
template <class Bits>
inline F widen(Bits halves) {
  return (F)vcvt_f32_f16((float16x4_t)halves);
}
#endif
inline F load(const uint8_t* p) { return F{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
inline void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
inline void store(uint8_t* p, F x) {
  for (int i = 0; i < kLanes; ++i) p[i] = uint8_t(int(x[i]));
}
inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F div(F a, F b) { return a / b; }
inline F fma(F a, F b, F c) { return a * b + c; }
inline F max(F a, F b) { return a > b ? a : b; }
inline F min(F a, F b) { return a < b ? a : b; }
inline F round(F a) {
  return (a + set1(kMagic)) - set1(kMagic);
}
inline F ldexp(F p, F n) {
  using Ints = int32_t __attribute__((vector_size(sizeof(F))));
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return (F)((Ints)(p * (F)power) & ~(Ints)(n < -126.f));
}
inline float sum(F x) { return (x[0] + x[1]) + (x[2] + x[3]); }
inline float max_lane(F x) {
  const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}

inline void store_sums(float* out, F a, F b, F c, F d) {
  store(out, F{sum(a), sum(b), sum(c), sum(d)});
}

#endif

// Number of vector registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

// Vectors of kLanes 32-bit integers, and of floats for conversions between the two.
using Words = int32_t __attribute__((vector_size(sizeof(F))));
using Floats = float __attribute__((vector_size(sizeof(F))));

#if defined(KVPRESS_WIDENS)
constexpr bool kConvertsHalves = true;  // a vector at a time
using Halves = int16_t __attribute__((vector_size(2 * kLanes)));  // bits of kLanes 16-bit numbers

template <class Bits>
inline Bits load_bits(const void* p) {
  Bits bits;
  std::memcpy(&bits, p, sizeof bits);
  return bits;
}

inline F load(const f16* p) { return widen(load_bits<Halves>(p)); }

// Convert the upper byte of each element; the lower byte is ignored. Moving the bits of an e4m3 number into a half divides it
// by kE4m3Unit, subnormal or not; the arithmetic shift copies its sign.
inline F from_e4m3(Halves x) { return widen(x >> 1 & int16_t(0xbf80)); }
inline F load(const e4m3* p) {
  using Bytes = uint8_t __attribute__((vector_size(kLanes)));
  return from_e4m3(__builtin_convertvector(load_bits<Bytes>(p), Halves) << 8);
}
#else
constexpr bool kConvertsHalves = false;
#endif

// True for types that are loaded as pairs of vectors, numbers at even and at odd places: half the instructions, because one
// number of each pair is already in place, or nearly so.
#if defined(KVPRESS_PAIRS)
template <class T>
constexpr bool kPaired = std::is_same_v<T, bf16> || std::is_same_v<T, e4m3>;
inline void load_pairs(const bf16* p, F& even, F& odd) {
  const Words x = load_bits<Words>(p);
  even = (F)(x << 16), odd = (F)(x & int32_t(0xffff0000));
}
inline void load_pairs(const e4m3* p, F& even, F& odd) {
  const Halves x = load_bits<Halves>(p);
  even = from_e4m3(x << 8), odd = from_e4m3(x);
}
#else
template <class T>
constexpr bool kPaired = false;
inline void part_pairs(F&, F&) {}
inline void join_pairs(F&, F&) {}
template <class T>
inline void load_pairs(const T*, F&, F&) {}
#endif

// Load a vector from one address, or in several parts from different addresses.
template <class T>
KVPRESS_INLINE F load_parts(const T* const (&p)[1]) {
  return load(p[0]);
}

// One number for each of four queries.
typedef float Quad __attribute__((vector_size(16)));

inline F abs(F x) { return max(x, sub(set1(0.f), x)); }

// 2^x for x <= 128; relative error 2e-7, zero below -150 (Cephes exp2f coefficients).
// NaN stays NaN with kKeepsNaN, and otherwise counts as -inf: `max` returns its second argument if either is NaN.
template <bool kKeepsNaN = false>
inline F exp2(F x) {
  x = kKeepsNaN ? max(set1(-150.f), x) : max(x, set1(-150.f));
  const F n = round(x), f = sub(x, n);
  F p = set1(1.535336188319500e-4f);
  for (float c : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f,
                  6.931472028550421e-1f, 1.f})
    p = fma(p, f, set1(c));
  return ldexp(p, n);
}

// Load a vector of which only the first `count` elements may be read; the others are zero.
template <class T>
inline F load_part(const T* p, int count) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, p, count * sizeof(T));
  return load(lanes);
}

// Call step(0), ..., step(kCount - 1) with constant arguments. Arrays indexed by them are in registers from the start; a loop
// that the compiler unrolls later leaves them on the stack.
template <class Step, int... kIndex>
KVPRESS_INLINE void unrolled(std::integer_sequence<int, kIndex...>, Step&& step) {
  (step(std::integral_constant<int, kIndex>{}), ...);
}
template <int kCount, class Step>
KVPRESS_INLINE void unrolled(Step&& step) {
  unrolled(std::make_integer_sequence<int, kCount>{}, step);
}

// Prefetch a cache line into the L2 cache: L1 has too few miss buffers to keep the memory bus busy. kNear prefetches into L1,
// for data that is read at once. Any address is allowed. The asm is volatile because GCC removes a function that only
// prefetches, as one without side effects.
template <bool kNear = false>
KVPRESS_INLINE void prefetch_line(const char* p) {
#if defined(__x86_64__) || defined(__i386__)
  if constexpr (kNear)
    asm volatile("prefetcht0 %0" ::"m"(*p));
  else
    asm volatile("prefetcht1 %0" ::"m"(*p));
#else
  __builtin_prefetch(p, 0, kNear ? 3 : 2);
#endif
}

template <bool kNear = false>
inline void prefetch_row(const void* row, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) prefetch_line<kNear>(static_cast<const char*>(row) + b);
}

inline int round_up(int64_t x, int64_t to) { return int((x + to - 1) / to * to); }

}  // namespace kvpress
