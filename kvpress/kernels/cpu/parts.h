// SPDX-License-Identifier: Apache-2.0
// Attention of the same queries to several sets of rows, each in a format of its own.
#pragma once

#include "split.h"

namespace kvpress {

// Behind this stand results over other rows, pieces whose streams and ranges say nothing, and then the parts, one after the other:
// an entry point, how many bytes tell its rows, and these, which are what its structure ends with behind `Asked`.
struct Parts {
  Asked asked;  // whose out [parts, N, M, Dv] and lse [parts, N, M] take the results of each part
  float* out;   // [N, M, Dv], of all together
  float* lse;   // [N, M]
  int64_t channels, others, count;

  // Returns -1, or part * N + stream of one that refers to rows which are not stored. The last part holds the new tokens.
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
