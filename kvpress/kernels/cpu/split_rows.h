// SPDX-License-Identifier: Apache-2.0
// Rows in one of several segments of pairs that were chosen by their rank over all segments.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace kvpress {

struct SplitRows {
  const int32_t* ranks;    // [N, stride], ascending ranks of the chosen pairs of a stream
  const int64_t* counts;   // [N], chosen pairs
  const int64_t* starts;   // [N], first row of a stream in the segment
  const int64_t* lengths;  // [N], rows of a stream in the segment
  int64_t* taken;          // [N], chosen pairs in earlier segments; those of this segment are added
  int64_t* passed;         // [N], pairs in earlier segments; those of this segment are added
  int32_t* rows;           // [N, width], 0 past the listed rows
  int64_t* listed;         // [N], rows listed
  int64_t streams;
  int64_t stride;
  int64_t width;

  int split() const {
    for (int64_t n = 0; n < streams; ++n)
      if (starts[n] < 0 || lengths[n] < 0 || starts[n] + lengths[n] > std::numeric_limits<int32_t>::max()) return int(n);
    for (int64_t n = 0; n < streams; ++n) {
      const int32_t* const rank = ranks + n * stride;
      int32_t* const out = rows + n * width;
      const int64_t end = passed[n] + lengths[n];
      int64_t count = 0;
      for (; taken[n] < counts[n] && rank[taken[n]] < end && count < width; ++taken[n])
        out[count++] = int32_t(rank[taken[n]] - passed[n] + starts[n]);
      std::fill(out + count, out + width, 0);
      listed[n] = count;
      passed[n] = end;
    }
    return -1;
  }
};

}  // namespace kvpress
