// SPDX-License-Identifier: Apache-2.0
// Plain C struct of page bounds and label scores; its fields are listed in scores/cpu.py.
#pragma once

#include <cstdint>

namespace kvpress {

struct Scores {
  const void* q;          // [N, M, D]
  const void* low;        // [R, D], or null for labels
  const void* high;       // [R, D], or codes of labels uint8 [R, D * bits / 8]
  const void* scale;      // [R] of codes, or null
  const void* zero;       // [R], or null
  double zero_point;      // code of value 0, without `zero`
  const int64_t* starts;  // [N]
  const int64_t* counts;  // [N]
  float* out;             // [N, most]
  int64_t rows;
  int64_t streams;
  int64_t queries;
  int64_t channels;
  int64_t stride;         // elements between two rows; bytes for codes
  int64_t dtype;          // of low and high, or of scale and zero
  int64_t query_dtype;
  int64_t bits;           // of a code
  int64_t most;
  int64_t threads;
};

}  // namespace kvpress
