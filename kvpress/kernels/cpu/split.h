// SPDX-License-Identifier: Apache-2.0
// Splits streams into pieces, shares the pieces among threads and merges their results by log-sum-exp.
//
// The pieces depend on the lengths only, so results do not depend on the number of threads. The first pieces are the longest:
// writing and reading the partial results of a piece costs as much as some 50 rows. The last ones are short, so that threads
// finish together.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "buffer.h"
#include "problem.h"

namespace kvpress {

// A range of rows of one stream.
struct Piece {
  int64_t stream, begin, end;
  float *out, *lse;  // final results, or scratch that merge() reads
};

// Limits of the number of rows of a piece.
struct PieceRows {
  int64_t least, most;

  // Return the rows of the next piece if `left` rows of all streams remain: one of kShares shares, about as many as threads
  // that the memory bandwidth can feed.
  int64_t next(int64_t left) const {
    constexpr int64_t kShares = 64;
    return std::clamp(left / kShares / least * least, least, most);
  }
};

// Merge pieces for queries [first, end): out = sum_i w_i out_i with w_i = exp(lse_i - lse).
inline void merge(int64_t first, int64_t end, int64_t channels, const Piece* pieces, int64_t count, float* out,
                  float* lse) {
  for (int64_t m = first; m < end; ++m) {
    float best = -INFINITY, total = 0;
    for (int64_t i = 0; i < count; ++i) best = std::max(best, pieces[i].lse[m]);
    std::fill_n(out + m * channels, channels, 0.f);
    lse[m] = -INFINITY;
    if (best == -INFINITY) {
      const bool numbers = std::none_of(pieces, pieces + count, [&](const Piece& piece) { return std::isnan(piece.lse[m]); });
      if (!numbers) std::fill_n(out + m * channels, channels, NAN), lse[m] = NAN;
      continue;
    }
    for (int64_t i = 0; i < count; ++i) total += std::exp(pieces[i].lse[m] - best);
    for (int64_t i = 0; i < count; ++i) {
      const float weight = std::exp(pieces[i].lse[m] - best) / total;
      for (int64_t c = 0; c < channels; ++c) out[m * channels + c] += weight * pieces[i].out[m * channels + c];
    }
    lse[m] = best + std::log(total);
  }
}

// Run work(i) for i in [0, count) on up to `threads` threads; make() returns the `work` of a thread.
template <class Make>
void parallel(int64_t count, int64_t threads, Make make) {
  std::atomic<int64_t> next{0};
  const auto loop = [&] {
    auto work = make();
    for (int64_t i; (i = next.fetch_add(1)) < count;) work(i);
  };
#if defined(_OPENMP)
#pragma omp parallel num_threads(int(std::min(threads, count)))
  loop();
#else
  loop();
#endif
}

// Merge pieces for all queries, in parallel.
inline void merge_all(int64_t queries, int64_t channels, int64_t threads, const Piece* pieces, int64_t count, float* out,
                      float* lse) {
  constexpr int64_t kQueries = 512;
  parallel((queries + kQueries - 1) / kQueries, threads, [&] {
    return [&](int64_t i) {
      merge(i * kQueries, std::min(queries, (i + 1) * kQueries), channels, pieces, count, out, lse);
    };
  });
}

// Return the first stream that refers to rows that are not stored, or -1.
inline int first_invalid(const Attention& p) {
  for (int64_t n = 0; n < p.streams; ++n) {
    const int64_t start = p.listed ? 0 : p.starts[n], length = p.lengths[n];
    if (start < 0 || length < 0 || start + length > (p.listed ? p.listed_stride : p.rows)) return int(n);
    uint32_t row = 0;
    for (int64_t t = 0; p.listed && t < length; ++t) row = std::max(row, uint32_t(p.listed[n * p.listed_stride + t]));
    if (length && row >= p.rows) return int(n);
  }
  return -1;
}

// Set the results of queries that contain NaN or infinity to NaN: vector `max` drops a NaN logit. With `together`, all queries
// of the stream become NaN, because they were rounded with one scale.
inline void mark_not_numbers(const Attention& p, int64_t query_channels, int64_t channels, bool together) {
  const int64_t count = together ? p.queries : 1;
  for (int64_t m = 0; m < p.streams * p.queries; m += count) {
    float zero = 0;
    for (int64_t i = 0; i < count * query_channels; ++i) zero += p.q[m * query_channels + i] * 0.f;
    if (zero == 0) continue;
    std::fill_n(p.out + m * channels, count * channels, NAN);
    std::fill_n(p.lse + m, count, NAN);
  }
}

// Attend in pieces. make(longest) returns the worker of a thread for pieces of at most `longest` rows; worker->attend(piece)
// returns false if rows refer to data that is not stored. Return -1, or the number of such a stream.
template <class Make>
int attend_pieces(const Attention& p, int64_t channels, PieceRows rows, Make make) {
  const int64_t out_size = p.queries * channels, slot_size = out_size + p.queries;
  std::vector<Piece> pieces;
  std::vector<int64_t> first(p.streams + 1, 0);
  int64_t left = std::accumulate(p.lengths, p.lengths + p.streams, int64_t(0)), longest = 0;
  for (int64_t n = 0; n < p.streams; ++n) {
    int64_t at = 0;
    do {
      const int64_t count = std::min(rows.next(left), p.lengths[n] - at);
      pieces.push_back({n, at, at + count, nullptr, nullptr});
      longest = std::max(longest, count);
      at += count, left -= count;
    } while (at < p.lengths[n]);
    first[n + 1] = int64_t(pieces.size());
  }
  const auto parts = [&](int64_t n) { return first[n + 1] - first[n]; };
  Buffer<float> scratch(int64_t(pieces.size()) > p.streams ? int64_t(pieces.size()) * slot_size : 0);
  for (size_t i = 0; i < pieces.size(); ++i) {
    Piece& piece = pieces[i];
    const bool whole = parts(piece.stream) == 1;
    piece.out = whole ? p.out + piece.stream * out_size : scratch + int64_t(i) * slot_size;
    piece.lse = whole ? p.lse + piece.stream * p.queries : piece.out + out_size;
  }
  std::vector<char> valid(pieces.size());
  parallel(int64_t(pieces.size()), p.threads, [&] {
    return [&, worker = make(longest)](int64_t i) { valid[i] = worker->attend(pieces[i]); };
  });
  for (size_t i = 0; i < pieces.size(); ++i)
    if (!valid[i]) return int(pieces[i].stream);
  for (int64_t n = 0; n < p.streams; ++n)
    if (parts(n) > 1)
      merge(0, p.queries, channels, &pieces[first[n]], parts(n), p.out + n * out_size, p.lse + n * p.queries);
  return -1;
}

}  // namespace kvpress
