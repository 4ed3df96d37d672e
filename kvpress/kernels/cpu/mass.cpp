// SPDX-License-Identifier: Apache-2.0
// Entry point of the statistics of received weights, compiled once per instruction-set level. Returns -1, or the number of a
// stream outside the storage.

#include "mass.h"

extern "C" int kvpress_mass(const kvpress::Mass* p) {
  using namespace kvpress;
#if defined(__AVX512BF16__)
  if (p->query_dtype == kBfloat16 && p->key_dtype == kBfloat16) return receive_all<PairProduct>(*p);
#endif
  return receive_all<FloatProduct>(*p);
}
