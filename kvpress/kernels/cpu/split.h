// Streams are cut into pieces, pieces shared between threads, and their results merged by log-sum-exp.
//
// The pieces depend on the lengths only, so the result does not depend on the number of threads.
#pragma once

#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "attend.h"

namespace kvpress {

// Combine the pieces of one stream: out = sum_i w_i out_i with w_i = exp(lse_i - lse).
inline void merge(const Problem& p, const Piece* pieces, int64_t count, float* out, float* lse) {
  const int64_t channels = p.values.channels;
  for (int64_t m = 0; m < p.queries; ++m) {
    float best = -INFINITY, total = 0;
    for (int64_t i = 0; i < count; ++i) best = std::max(best, pieces[i].lse[m]);
    std::fill_n(out + m * channels, channels, 0.f);
    lse[m] = -INFINITY;
    if (best == -INFINITY) continue;
    for (int64_t i = 0; i < count; ++i) total += std::exp(pieces[i].lse[m] - best);
    for (int64_t i = 0; i < count; ++i) {
      const float weight = std::exp(pieces[i].lse[m] - best) / total;
      for (int64_t c = 0; c < channels; ++c) out[m * channels + c] += weight * pieces[i].out[m * channels + c];
    }
    lse[m] = best + std::log(total);
  }
}

// Run `work(i)` for i in [0, count) on the given number of threads, each with its own `make()`.
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

// The first stream that refers to rows that are not stored, or -1.
inline int first_invalid(const Problem& p) {
  for (int64_t n = 0; n < p.streams; ++n) {
    const int64_t start = p.listed ? 0 : p.starts[n], length = p.lengths[n];
    if (start < 0 || length < 0 || start + length > (p.listed ? p.listed_stride : p.rows)) return int(n);
    uint32_t row = 0;
    for (int64_t t = 0; p.listed && t < length; ++t) row = std::max(row, uint32_t(p.listed[n * p.listed_stride + t]));
    if (length && row >= p.rows) return int(n);
  }
  return -1;
}

// Returns -1, or the number of a stream that makes the problem invalid.
template <class Reader>
int attend_all(const Problem& p) {
  if (const int bad = first_invalid(p); bad >= 0) return bad;
  // Long enough that a piece's partial result is small next to the rows it read.
  const int64_t piece_rows = std::max<int64_t>(1024, 64 * p.queries);
  const int64_t per_piece = p.queries * (p.values.channels + 1);
  std::vector<Piece> pieces;
  std::vector<int64_t> first(p.streams + 1, 0);
  for (int64_t n = 0; n < p.streams; ++n) {
    for (int64_t at = 0; at == 0 || at < p.lengths[n]; at += piece_rows)
      pieces.push_back({n, at, std::min(at + piece_rows, p.lengths[n]), nullptr, nullptr});
    first[n + 1] = int64_t(pieces.size());
  }
  const bool split = int64_t(pieces.size()) > p.streams;
  Buffer<float> scratch(split ? int64_t(pieces.size()) * per_piece : 0);
  for (size_t i = 0; i < pieces.size(); ++i) {
    Piece& piece = pieces[i];
    const bool whole = first[piece.stream + 1] - first[piece.stream] == 1;
    float* slot = scratch + int64_t(i) * per_piece;
    piece.out = whole ? p.out + piece.stream * p.queries * p.values.channels : slot;
    piece.lse = whole ? p.lse + piece.stream * p.queries : slot + p.queries * p.values.channels;
  }
  std::vector<char> valid(pieces.size());
  parallel(int64_t(pieces.size()), p.threads, [&] {
    return [&, worker = std::make_shared<Worker<Reader>>(p)](int64_t i) { valid[i] = worker->attend(pieces[i]); };
  });
  for (size_t i = 0; i < pieces.size(); ++i)
    if (!valid[i]) return int(pieces[i].stream);
  for (int64_t n = 0; n < p.streams; ++n)
    if (first[n + 1] - first[n] > 1)
      merge(p, &pieces[first[n]], first[n + 1] - first[n], p.out + n * p.queries * p.values.channels,
            p.lse + n * p.queries);
  return -1;
}

}  // namespace kvpress
