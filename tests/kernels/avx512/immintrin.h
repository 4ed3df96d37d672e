// SPDX-License-Identifier: Apache-2.0
// Replaces the compiler's header, so that kernels for AVX-512 run on a processor without it. SIMDe (Debian: libsimde-dev)
// implements the intrinsics; those that its release lacks are defined below. The compiler's macros for extensions of the
// processor are defined at the end, after the headers that test them.
#pragma once

#include_next <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cmath>
#include <cstring>

namespace emulated {

template <class To, class From>
inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class T, int kCount>
struct Lanes {
  T lane[kCount];
};
using Floats = Lanes<float, 16>;
using Words = Lanes<int32_t, 16>;

inline Floats floats(__m512 x) { return bits<Floats>(x); }

inline __m512 cvtph_ps(__m256i x) {
  const auto half = bits<Lanes<__m128i, 2>>(x);
  return bits<__m512>(Lanes<__m256, 2>{{_mm256_cvtph_ps(half.lane[0]), _mm256_cvtph_ps(half.lane[1])}});
}
inline __m512i cvtepu16_epi32(__m256i x) {
  const auto half = bits<Lanes<__m128i, 2>>(x);
  return bits<__m512i>(Lanes<__m256i, 2>{{_mm256_cvtepu16_epi32(half.lane[0]), _mm256_cvtepu16_epi32(half.lane[1])}});
}
inline __m512i cvtepu8_epi32(__m128i x) {
  return bits<__m512i>(
      Lanes<__m256i, 2>{{_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(x, x))}});
}
inline __m512 cvtepi32_ps(__m512i x) {
  const auto half = bits<Lanes<__m256i, 2>>(x);
  return bits<__m512>(Lanes<__m256, 2>{{_mm256_cvtepi32_ps(half.lane[0]), _mm256_cvtepi32_ps(half.lane[1])}});
}
inline __m512i cvtps_epi32(__m512 x) {
  const auto half = bits<Lanes<__m256, 2>>(x);
  return bits<__m512i>(Lanes<__m256i, 2>{{_mm256_cvtps_epi32(half.lane[0]), _mm256_cvtps_epi32(half.lane[1])}});
}
inline __m512i cvtps_epu32(__m512 x) {
  Words out;
  for (int i = 0; i < 16; ++i) out.lane[i] = int32_t(uint32_t(std::nearbyint(floats(x).lane[i])));
  return bits<__m512i>(out);
}
inline __m128i cvtusepi32_epi8(__m512i x) {
  Lanes<uint8_t, 16> out;
  for (int i = 0; i < 16; ++i) {
    const uint32_t word = uint32_t(bits<Words>(x).lane[i]);
    out.lane[i] = uint8_t(word > 255 ? 255 : word);
  }
  return bits<__m128i>(out);
}
// Reduce in the order of the compiler's header: halves, then quarters, and so on.
template <class Step>
inline float reduce(__m512 x, Step step) {
  Floats all = floats(x);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) all.lane[i] = step(all.lane[i], all.lane[i + width]);
  return all.lane[0];
}

// Masked-out lanes are neither read nor written.
template <class Vector, class T>
inline Vector load_some(uint64_t mask, const void* p) {
  Lanes<T, sizeof(Vector) / sizeof(T)> out{};
  for (size_t i = 0; i < sizeof out.lane / sizeof(T); ++i)
    if (mask >> i & 1) std::memcpy(&out.lane[i], static_cast<const T*>(p) + i, sizeof(T));
  return bits<Vector>(out);
}
inline void store_some(float* p, uint64_t mask, __m512 x) {
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) p[i] = floats(x).lane[i];
}

}  // namespace emulated

#undef _mm512_cvtepi32_ps
#undef _mm512_cvtps_epi32
#undef _mm512_madd_epi16
#define _mm512_madd_epi16 simde_mm512_madd_epi16
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_cvtps_epu32 emulated::cvtps_epu32
#define _mm512_cvtusepi32_epi8 emulated::cvtusepi32_epi8
#define _mm512_extractf32x8_ps(x, i) (emulated::bits<emulated::Lanes<__m256, 2>>(x).lane[i])
#define _mm512_reduce_add_ps(x) emulated::reduce(x, [](float a, float b) { return a + b; })
#define _mm512_reduce_max_ps(x) emulated::reduce(x, [](float a, float b) { return a > b ? a : b; })
#define _mm_maskz_loadu_epi8 emulated::load_some<__m128i, uint8_t>
#define _mm256_maskz_loadu_epi16 emulated::load_some<__m256i, uint16_t>
#define _mm512_maskz_loadu_ps emulated::load_some<__m512, float>
#define _mm512_mask_storeu_ps emulated::store_some

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512DQ__ 1
#if KVPRESS_EMULATED >= 2
#define __AVX512VNNI__ 1
#endif
#if KVPRESS_EMULATED >= 3
#define __AVX512VBMI__ 1
#endif
#if KVPRESS_EMULATED >= 4
#define __AVX512BF16__ 1
#endif
