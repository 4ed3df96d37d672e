// SPDX-License-Identifier: Apache-2.0
// Attention of the same queries to several sets of rows, each in its own storage format and basis.
#pragma once

#include "basis.h"

namespace kvpress {

// Followed in memory by `others` pieces, the results over other rows (their streams and ranges are unused), and by `count`
// parts. A part is a `Part`, and the fields after `Asked` of its entry point's struct.
struct Parts {
  struct Part {
    int (*attend)(const void*);
    int64_t bytes;  // of the fields that follow
    Added added;
    Bases bases;
  };

  Asked asked;  // out [N, M, Dv] and lse [N, M] receive the merged results
  int64_t channels, others, count;

  // Return -1, or part * N + stream of a stream that refers to rows that are not stored. The last part has the new tokens.
  int attend() const {
    const int64_t queries = asked.streams * asked.queries, results = count == 1 && others == 0 ? 0 : count;
    const Piece* const other = reinterpret_cast<const Piece*>(this + 1);
    const char* next = reinterpret_cast<const char*>(other + others);
    std::vector<Piece> pieces(other, other + others);
    std::vector<int64_t> problem;
    Buffer<float> scratch(results * queries * (channels + 1));
    for (int64_t i = 0; i < count; ++i) {
      Part part;
      std::memcpy(&part, next, sizeof part), next += sizeof part;
      Asked one = asked;
      one.added = part.added;
      if (results) one.out = scratch + i * queries * (channels + 1), one.lse = one.out + queries * channels;
      if (i + 1 < count) one.causal = 0;
      problem.resize((sizeof one + part.bytes) / sizeof(int64_t));
      std::memcpy(problem.data() + sizeof one / sizeof(int64_t), next, part.bytes), next += part.bytes;
      Piece piece{0, 0, 0, one.out, one.lse};
      const auto& rows = *reinterpret_cast<const Attention*>(problem.data());
      const int stream = part.bases.around(one, rows, [&](const Asked& entered) {
        std::memcpy(problem.data(), &entered, sizeof entered);
        return part.attend(problem.data());
      });
      if (stream >= 0) return int(i * asked.streams) + stream;
      pieces.push_back(piece);
    }
    if (results || others)
      merge_all(queries, channels, asked.threads, pieces.data(), int64_t(pieces.size()), asked.out, asked.lse);
    return -1;
  }
};

}  // namespace kvpress
