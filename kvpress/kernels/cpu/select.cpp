// SPDX-License-Identifier: Apache-2.0
// Entry point of row selection, compiled once per instruction-set level. Returns -1, or the number of a stream without a score
// for each of its rows, or with row numbers beyond 32 bits.

#include "select.h"

extern "C" int kvpress_select(const kvpress::Select* p) { return kvpress::select_all(*p); }
