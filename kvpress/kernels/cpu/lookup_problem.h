// The plain C structures of lookup attention; filled in field by field by lookup.py.
#pragma once

#include <cstdint>

namespace kvpress {

// Rows of codes of one side and their books [books, groups, entries, coupled].
struct Coded {
  const uint8_t* codes;  // packed as kernels/packed.py says
  const void* book;
  int64_t stride;  // bytes between two rows
  int64_t bits;
  int64_t half;    // the book is float16, not float32
  int64_t groups;
  int64_t entries;
  int64_t coupled;

  int64_t channels() const { return groups * coupled; }
};

// Row numbers of some rows of a stream: listed ones, or one after the other.
struct Stretch {
  const int32_t* listed;  // or null
  int64_t first;

  int64_t operator[](int t) const { return listed ? listed[t] : first + t; }
};

constexpr int kStep = 64;  // positions per row of the coarse angles, as in kernels/coded.py

struct Lookup {
  const float* q;                 // [N, M, D]
  const int64_t* starts;          // [N], or null when `listed` is given
  const int32_t* listed;          // [N, listed_stride] row numbers, or null
  const int64_t* lengths;         // [N]
  const int64_t* book_of_stream;  // [N]
  const int32_t* positions;       // [R], or null for the row numbers
  const int64_t* shift;           // [N], what to add to them; null when keys are not rotated
  const float* coarse;            // [blocks, 2, rotary / 2], cosines and sines of every kStep-th position
  const float* fine;              // [kStep, 2, rotary / 2], of those in between
  const float* bias;              // [R] or null
  float* out;                     // [N, M, Dv]
  float* lse;                     // [N, M]
  int64_t rows;
  int64_t streams;
  int64_t queries;
  int64_t listed_stride;
  int64_t books;
  int64_t blocks;
  int64_t rotary;                 // leading channels that are rotated, 0 without angles
  int64_t causal;
  int64_t threads;
  double scale;
  double softcap;                 // 0 when absent
  Coded keys;
  Coded values;

  Stretch stretch(int64_t stream, int64_t at) const {
    return listed ? Stretch{listed + stream * listed_stride + at, 0} : Stretch{nullptr, starts[stream] + at};
  }

  // Where a row of a stream stands; a negative position wraps past every table.
  uint64_t position(int64_t stream, int64_t row) const {
    return uint64_t(positions ? positions[row] : row) + uint64_t(shift[stream]);
  }
};

}  // namespace kvpress
