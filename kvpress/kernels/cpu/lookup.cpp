// Entry point of lookup decoding for one instruction-set level. Returns -1, or the number of a stream that refers to
// rows, books or positions which are not stored.

#include "lookup.h"

extern "C" int kvpress_lookup(const kvpress::Lookup* p) {
  using namespace kvpress;
  if (p->keys.wide) return p->values.wide ? look_up_all<uint16_t, uint16_t>(*p) : look_up_all<uint16_t, uint8_t>(*p);
  return p->values.wide ? look_up_all<uint8_t, uint16_t>(*p) : look_up_all<uint8_t, uint8_t>(*p);
}
