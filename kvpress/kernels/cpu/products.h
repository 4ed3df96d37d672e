// SPDX-License-Identifier: Apache-2.0
// Integer products of 16 bits with sums of 32 bits.
#pragma once

#include "simd.h"

#if defined(__AVX2__)
namespace kvpress {

// sum += x. In assembly, because compilers turn the additions into trees, which do not fit into the registers, or copy every
// sum. Sums are plain vectors: compilers leave arrays of classes that contain a vector on the stack.
KVPRESS_INLINE void add_to(Words& sum, Words x) {
#if defined(KVPRESS_EMULATED)
  sum += x;
#else
  Words total = sum;  // a separate operand, because a variable passed by reference must be in memory
  asm("vpaddd %1, %0, %0" : "+v"(total) : "v"(x));
  sum = total;
#endif
}

using Shorts = int16_t __attribute__((vector_size(sizeof(Words))));

// a * b / 2^15, rounded, for elements of 16 bits.
KVPRESS_INLINE Words multiply_fractions(Words a, Words b) {
#if defined(__AVX512F__)
  return (Words)_mm512_mulhrs_epi16((__m512i)a, (__m512i)b);
#else
  return (Words)_mm256_mulhrs_epi16((__m256i)a, (__m256i)b);
#endif
}

// a[2 lane] * b[2 lane] + a[2 lane + 1] * b[2 lane + 1], for elements of 16 bits.
KVPRESS_INLINE Words multiply_pairs(Words a, Words b) {
#if defined(__AVX512F__)
  return (Words)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  return (Words)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

// sum += multiply_pairs(a, b)
KVPRESS_INLINE void add_pairs(Words& sum, Words a, Words b) {
#if defined(__AVX512VNNI__) && !defined(KVPRESS_EMULATED)
  Words total = sum;
  asm("vpdpwssd %2, %1, %0" : "+v"(total) : "v"(a), "v"(b));
  sum = total;
#elif defined(__AVXVNNI__)
  Words total = sum;
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(total) : "x"(a), "x"(b));
  sum = total;
#else
  add_to(sum, multiply_pairs(a, b));
#endif
}

}  // namespace kvpress
#endif
