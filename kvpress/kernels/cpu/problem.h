// SPDX-License-Identifier: Apache-2.0
// The plain C structures that decode attention takes: eight bytes a field, in the order in which Python packs them
// (formats/*.py list those of rows, decode/cpu.py the others).
#pragma once

#include <cstdint>

namespace kvpress {

enum Dtype : int64_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kFloat8 = 3, kPower = 4 };  // kFloat8 is e4m3, kPower e8m0

// What is added to decoded rows. Each half is absent when its first pointer is null.
struct Correction {
  const void* factor;      // [R, rank]
  const void* basis;       // [bases, rank, channels]
  const int32_t* chunk;    // [R]: the basis of each row
  const int32_t* first;    // [R + 1]: where the outliers of each row begin
  const uint8_t* channel;  // [outliers]
  const void* delta;       // [outliers]
  int64_t factor_dtype;    // of factor and basis
  int64_t delta_dtype;
  int64_t rank;
  int64_t bases;
  int64_t outliers;
};

// Rows of keys or values. Dense ones leave `scale` and what follows from `bits` on zero.
struct Rows {
  const void* data;          // dense [R, channels], or codes uint8 [R, channels * bits / 8]
  const void* scale;         // [R / group_rows, channels / group_channels]
  const void* zero;          // same shape as scale, or null
  const int32_t* lengths;    // [groups]: rows of each group where these are not group_rows, or null
  int64_t channels;
  int64_t stride;            // elements (dense) or bytes (codes) between two rows
  int64_t dtype;             // of data (dense) or of scale and zero (codes)
  int64_t bits;
  int64_t group_rows;
  int64_t group_channels;
  int64_t groups;            // rows of scale and zero
  const void* levels;        // float16 [2^bits]: what each code stands for, or null where it is its number
  const void* row_scale;     // [R]: factor of the product of each key with a query, or null
  int64_t row_dtype;         // of row_scale
  double zero_point;         // code that stands for 0 where there are neither `zero` nor `levels`
  Correction correction;
};

// What is added to the products of queries with rows, by the position of a row: row r of stream n is at positions[r] + shift[n].
struct Added {
  const float* products;     // [N, M, places], or null for nothing
  const int64_t* shift;      // [N]
  const int32_t* positions;  // [R], or null for the row numbers
  int64_t places;

  // Of one row; false where it is at no place.
  bool holds(int64_t stream, int64_t row) const { return !products || uint64_t(place(stream, row)) < uint64_t(places); }
  int64_t place(int64_t stream, int64_t row) const { return (positions ? positions[row] : row) + shift[stream]; }
  // By place, of query m of all N * M.
  const float* of(int64_t m) const { return products + m * places; }
};

// Queries, and where their results go.
struct Asked {
  const float* q;        // [N, M, D]
  float* out;            // [N, M, Dv]
  float* lse;            // [N, M]
  int64_t streams;       // N
  int64_t queries;       // M
  int64_t causal;        // query tokens per stream, 0 when every query sees every row
  int64_t bf16_queries;  // every element of q is exactly representable in bfloat16
  int64_t exact;         // the model computes in float32: levels are not rounded to whole numbers
  int64_t threads;
  double scale;
  double softcap;        // 0 when absent
  Added added;
};

// Queries and which rows they attend to, whatever the format of the rows.
struct Attention : Asked {
  const int64_t* starts;    // [N], or null when `listed` is given
  const int32_t* listed;    // [N, listed_stride] row numbers, or null
  const int64_t* lengths;   // [N]
  const int64_t* owner;     // [N]: whose books and shifts a stream reads, or null for its own
  const float* log_weight;  // [R], added to the logits, or null
  int64_t rows;             // R
  int64_t listed_stride;

  int64_t owner_of(int64_t stream) const { return owner ? owner[stream] : stream; }
};

struct Problem : Attention {
  Rows keys;
  Rows values;
};

}  // namespace kvpress
