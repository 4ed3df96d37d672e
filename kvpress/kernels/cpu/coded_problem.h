// SPDX-License-Identifier: Apache-2.0
// Plain C structs of decode attention on codes that index centroids.
#pragma once

#include <algorithm>

#include "problem.h"

namespace kvpress {

// Codes of one side, and their codebooks [books, book_groups, entries, coupled].
struct Coded {
  const uint8_t* codes;   // packed as in formats/packing.py
  const void* book;
  const void* row_scale;  // [R]: factor of each row, or null
  int64_t stride;         // bytes between two rows
  int64_t bits;
  int64_t half;           // the codebook is float16, not float32
  int64_t scale_dtype;
  int64_t books;
  int64_t groups;
  int64_t book_groups;    // `groups`, or 1 if one codebook serves all groups
  int64_t entries;
  int64_t coupled;
  Correction correction;  // outliers only

  int64_t channels() const { return groups * coupled; }
  // Numbers of one group, and distance from one group to the next.
  int64_t group_size() const { return entries * coupled; }
  int64_t group_step() const { return book_groups > 1 ? group_size() : 0; }
};

// Row numbers of some rows of a stream: listed, or consecutive.
struct Stretch {
  const int32_t* listed;  // or null
  int64_t first;

  int64_t operator[](int t) const { return listed ? listed[t] : first + t; }
};

constexpr int kStep = 64;  // positions per row of the coarse angles, as in formats/rotary.py

// Positions of some rows: one per row, or consecutive.
struct Positions {
  const uint64_t* each;  // or null
  uint64_t first;

  uint64_t operator[](int t) const { return each ? each[t] : first + uint64_t(t); }

  // Call step(block, first, end) for each run of rows in one block of kStep positions, up to row `count`.
  template <class Step>
  void for_blocks(int count, Step&& step) const {
    for (int i = 0, end; i < count; i = end) {
      end = end_of_block(i, count);
      step((*this)[i] / kStep, i, end);
    }
  }

 private:
  // Return the first row after t, or `count`, that is in another block.
  int end_of_block(int t, int count) const {
    if (!each) return int(std::min<uint64_t>(uint64_t(count), t + kStep - (first + uint64_t(t)) % kStep));
    int end = t + 1;
    while (end < count && each[end] / kStep == each[t] / kStep) ++end;
    return end;
  }
};

struct CodedProblem : Attention {
  const float* coarse;       // [blocks, 2, rotary / 2]: cosines and sines of every kStep-th position; null without angles
  const float* fine;         // [kStep, 2, rotary / 2]: cosines and sines of the positions below kStep
  const int64_t* shift;      // by owner: added to positions
  const int32_t* positions;  // [R], or null for the row numbers
  int64_t blocks;
  int64_t rotary;            // leading channels that are rotated; 0 without angles
  Coded keys;
  Coded values;

  Stretch stretch(int64_t stream, int64_t at) const {
    return listed ? Stretch{listed + stream * listed_stride + at, 0} : Stretch{nullptr, starts[stream] + at};
  }

  int64_t book_of(int64_t stream) const { return owner_of(stream) % keys.books; }

  // Positions of the rows of a stream; a negative position wraps to a number past every table.
  struct Places {
    const int32_t* positions;
    uint64_t shift;

    uint64_t operator[](int64_t row) const { return uint64_t(positions ? positions[row] : row) + shift; }
  };
  Places places(int64_t stream) const { return {positions, coarse ? uint64_t(shift[owner_of(stream)]) : 0}; }
};

}  // namespace kvpress
