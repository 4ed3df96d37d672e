// SPDX-License-Identifier: Apache-2.0
// Entry point of quantisation for one instruction-set level; always succeeds.

#include "quantise.h"

extern "C" int kvpress_quantise(const kvpress::Quantise* p) {
  kvpress::quantise_all(*p);
  return 0;
}
