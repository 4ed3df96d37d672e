// SPDX-License-Identifier: Apache-2.0
// Instruction-set levels of libraries.py that this processor supports.

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>

namespace {

// Read from cpuid, because older compilers have no name for this feature.
bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
}

}  // namespace
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

// Bit i is set if the processor supports level i.
extern "C" int kvpress_levels() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
#define KVPRESS_HAS(feature) (__builtin_cpu_supports(feature) != 0)
  const bool avx2 = KVPRESS_HAS("avx2") && KVPRESS_HAS("fma");
  const bool avx512 = avx2 && KVPRESS_HAS("avx512f") && KVPRESS_HAS("avx512bw") && KVPRESS_HAS("avx512vl") &&
                      KVPRESS_HAS("avx512dq");
  const bool vnni = avx512 && KVPRESS_HAS("avx512vnni"), vbmi = vnni && KVPRESS_HAS("avx512vbmi");
  const bool levels[] = {true, avx2, avx2 && has_avx_vnni(), avx512, vnni, vbmi, vbmi && KVPRESS_HAS("avx512bf16")};
  int bits = 0;
  for (int i = 0; i < int(sizeof levels); ++i) bits |= levels[i] << i;
  return bits;
#elif defined(__aarch64__) && defined(__linux__)
  return 1 | (getauxval(AT_HWCAP) >> 20 & 1) << 1;  // HWCAP_ASIMDDP
#elif defined(__aarch64__) && defined(__APPLE__)
  return 3;
#else
  return 1;
#endif
}
