// SPDX-License-Identifier: Apache-2.0
// Entry point, compiled once per instruction-set level; see prefill.h.

#include "prefill.h"

extern "C" int kvpress_prefill(const kvpress::Prefill* p) {
  using namespace kvpress;
#if defined(__AVX512BF16__)
  if (p->dtype == kBfloat16) return prefill_all<PairProduct>(*p);
#endif
  return prefill_all<FloatProduct>(*p);
}
