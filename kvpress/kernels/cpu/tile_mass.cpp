// SPDX-License-Identifier: Apache-2.0
// Entry point of tile mass, compiled once per instruction-set level; see tile_mass.h.

#include "tile_mass.h"

extern "C" int kvpress_tile_mass(const kvpress::TileMass* p) {
  using namespace kvpress;
#if defined(__AVX512BF16__)
  if (p->dtype == kBfloat16) return tile_mass_all<PairProduct>(*p);
#endif
  return tile_mass_all<FloatProduct>(*p);
}
