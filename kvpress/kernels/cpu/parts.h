// SPDX-License-Identifier: Apache-2.0
// Attention of the same queries to several sets of rows, each in its own storage format.
#pragma once

#include "split.h"

namespace kvpress {

// Followed in memory by `others` pieces, the results over other rows (their streams and ranges are unused), and by `count`
// parts. A part is an entry point, a number of bytes, and these bytes: the fields after `Asked` of the entry point's struct.
struct Parts {
  Asked asked;  // out [parts, N, M, Dv] and lse [parts, N, M] receive the results of each part
  float* out;   // [N, M, Dv], merged
  float* lse;   // [N, M], merged
  int64_t channels, others, count;

  // Return -1, or part * N + stream of a stream that refers to rows that are not stored. The last part has the new tokens.
  int attend() const {
    struct Part {
      int (*attend)(const void*);
      int64_t bytes;
    } part;
    const int64_t queries = asked.streams * asked.queries;
    const Piece* const other = reinterpret_cast<const Piece*>(this + 1);
    const char* told = reinterpret_cast<const char*>(other + others);
    std::vector<Piece> pieces(other, other + others);
    std::vector<int64_t> problem;
    for (int64_t i = 0; i < count; ++i, told += part.bytes) {
      std::memcpy(&part, told, sizeof part), told += sizeof part;
      Asked one = asked;
      one.out += i * queries * channels, one.lse += i * queries;
      if (i + 1 < count) one.causal = 0;
      problem.resize((sizeof one + part.bytes) / sizeof(int64_t));
      std::memcpy(problem.data(), &one, sizeof one);
      std::memcpy(problem.data() + sizeof one / sizeof(int64_t), told, part.bytes);
      const int stream = part.attend(problem.data());
      if (stream >= 0) return int(i * asked.streams) + stream;
      pieces.push_back({0, 0, 0, one.out, one.lse});
    }
    merge_all(queries, channels, asked.threads, pieces.data(), others + count, out, lse);
    return -1;
  }
};

}  // namespace kvpress
