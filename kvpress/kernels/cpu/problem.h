// SPDX-License-Identifier: Apache-2.0
// Plain C structs of decode attention: eight bytes per field, in the order in which Python packs them (formats/*.py for rows,
// decode/cpu.py for the other structs).
#pragma once

#include <cstdint>

namespace kvpress {

enum Dtype : int64_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kFloat8 = 3, kPower = 4 };  // kFloat8 is e4m3, kPower e8m0

// Low-rank terms and outliers that are added to decoded rows; absent if `factor` or `first`, respectively, is null.
struct Correction {
  const void* factor;      // [R, rank]
  const void* basis;       // [bases, rank, channels]
  const int32_t* chunk;    // [R]: basis of each row
  const int32_t* first;    // [R + 1]: index of the first outlier of each row
  const uint8_t* channel;  // [outliers]
  const void* delta;       // [outliers]
  int64_t factor_dtype;    // of factor and basis
  int64_t delta_dtype;
  int64_t rank;
  int64_t bases;
  int64_t outliers;
};

// Rows of keys or values. Dense rows leave `scale` and the fields from `bits` on zero.
struct Rows {
  const void* data;          // dense [R, channels], or codes uint8 [R, channels * bits / 8]
  const void* scale;         // [R / group_rows, channels / group_channels]
  const void* zero;          // same shape as scale, or null
  const int32_t* lengths;    // [groups]: rows of each group, or null if all have group_rows
  int64_t channels;
  int64_t stride;            // elements (dense) or bytes (codes) between two rows
  int64_t dtype;             // of data (dense) or of scale and zero (codes)
  int64_t bits;
  int64_t group_rows;
  int64_t group_channels;
  int64_t groups;            // rows of scale and zero
  const void* levels;        // float16 [2^bits]: value of each code, or null if a code is its own value
  const void* row_scale;     // [R]: factor of the products of each key, or null
  int64_t row_dtype;         // of row_scale
  double zero_point;         // code of value 0, without `zero` and `levels`
  Correction correction;
};

// Offsets added to the products of queries with rows, by place: row r of stream n has place positions[r] + shift[n].
struct Added {
  const float* products;     // [N, M, places], or null without offsets
  const int64_t* shift;      // [N]
  const int32_t* positions;  // [R], or null for the row numbers
  int64_t places;

  // Return whether the place of a row is in range.
  bool holds(int64_t stream, int64_t row) const { return !products || uint64_t(place(stream, row)) < uint64_t(places); }
  int64_t place(int64_t stream, int64_t row) const { return (positions ? positions[row] : row) + shift[stream]; }
  // Offsets of query m of N * M, by place.
  const float* of(int64_t m) const { return products + m * places; }
};

// Queries and outputs.
struct Asked {
  const float* q;        // [N, M, D]
  float* out;            // [N, M, Dv]
  float* lse;            // [N, M]
  int64_t streams;       // N
  int64_t queries;       // M
  int64_t causal;        // query tokens per stream; 0 if every query attends to every row
  int64_t bf16_queries;  // every element of q is exactly representable in bfloat16
  int64_t exact;         // the model computes in float32: levels are not rounded to integers
  int64_t threads;
  double scale;
  double softcap;        // 0 when absent
  Added added;
};

// Queries and the rows that they attend to, in any storage format.
struct Attention : Asked {
  const int64_t* starts;    // [N], or null with `listed`
  const int32_t* listed;    // [N, listed_stride] row numbers, or null
  const int64_t* lengths;   // [N]
  const int64_t* owner;     // [N]: stream whose codebooks and shifts a stream reads, or null for its own
  const void* log_weight;   // [R], added to the logits, or null
  int64_t rows;             // R
  int64_t listed_stride;
  int64_t weight_dtype;     // of log_weight: float32 or float16

  int64_t owner_of(int64_t stream) const { return owner ? owner[stream] : stream; }
};

struct Problem : Attention {
  Rows keys;
  Rows values;
};

}  // namespace kvpress
