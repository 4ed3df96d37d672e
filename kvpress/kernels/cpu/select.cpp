// SPDX-License-Identifier: Apache-2.0
// Entry points of row selection, compiled once per instruction-set level. They return -1, or the number of a stream that is out
// of range: without a score for each of its rows, or with row numbers beyond 32 bits.

#include "select.h"
#include "split_rows.h"

extern "C" int kvpress_select(const kvpress::Select* p) { return kvpress::select_all(*p); }

extern "C" int kvpress_split_rows(const kvpress::SplitRows* p) { return p->split(); }
