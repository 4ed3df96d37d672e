// SPDX-License-Identifier: Apache-2.0
// Entry point of the choice of rows for one instruction-set level. Returns -1, or the number of a stream that has no
// score for each of its rows, or rows without a 32-bit number.

#include "select.h"

extern "C" int kvpress_select(const kvpress::Select* p) { return kvpress::select_all(*p); }
