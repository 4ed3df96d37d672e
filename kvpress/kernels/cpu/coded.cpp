// SPDX-License-Identifier: Apache-2.0
// Entry point of attention on codes, compiled once per instruction-set level. Returns -1, or the number of a stream that refers
// to rows, codebooks or positions that are not stored.

#include "coded.h"

extern "C" int kvpress_coded(const kvpress::CodedProblem* p) {
  using namespace kvpress;
  const bool wide_values = p->values.bits > 8;
  if (p->keys.bits > 8) return wide_values ? attend_codes<uint16_t, uint16_t>(*p) : attend_codes<uint16_t, uint8_t>(*p);
  return wide_values ? attend_codes<uint8_t, uint16_t>(*p) : attend_codes<uint8_t, uint8_t>(*p);
}
