// Entry point of lookup attention for one instruction-set level. Returns -1, or the number of a stream that refers to
// rows, books or positions which are not stored.

#include "lookup.h"

extern "C" int kvpress_lookup(const kvpress::Lookup* p) {
  using namespace kvpress;
  const bool wide_values = p->values.bits > 8;
  if (p->keys.bits > 8) return wide_values ? look_up_all<uint16_t, uint16_t>(*p) : look_up_all<uint16_t, uint8_t>(*p);
  return wide_values ? look_up_all<uint8_t, uint16_t>(*p) : look_up_all<uint8_t, uint8_t>(*p);
}
