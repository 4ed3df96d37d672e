// SPDX-License-Identifier: Apache-2.0
// Which instruction-set level of libraries.py this processor supports.

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

extern "C" int kvpress_level() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
#define KVPRESS_HAS(feature) (__builtin_cpu_supports(feature) != 0)
  if (!KVPRESS_HAS("avx2") || !KVPRESS_HAS("fma")) return 0;
  if (!KVPRESS_HAS("avx512f") || !KVPRESS_HAS("avx512bw") || !KVPRESS_HAS("avx512vl") || !KVPRESS_HAS("avx512dq"))
    return 1;
  if (!KVPRESS_HAS("avx512vnni")) return 2;
  if (!KVPRESS_HAS("avx512vbmi")) return 3;
  return KVPRESS_HAS("avx512bf16") ? 5 : 4;
#elif defined(__aarch64__) && defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#elif defined(__aarch64__) && defined(__APPLE__)
  return 1;
#else
  return 0;
#endif
}
