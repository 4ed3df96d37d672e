// SPDX-License-Identifier: Apache-2.0
// Entry point of quantisation, compiled once per instruction-set level; always returns 0.

#include "quantise.h"

extern "C" int kvpress_quantise(const kvpress::Quantise* p) {
  kvpress::quantise_all(*p);
  return 0;
}
