// SPDX-License-Identifier: Apache-2.0
// Flash decoding of one piece of a stream: score a chunk of rows, turn scores into weights, add the weighted values, repeat.
#pragma once

#include <algorithm>
#include <numeric>

#include "softmax.h"
#include "split.h"

namespace kvpress {

// State of one thread. `Reader` reads one storage format: begin(q), stores(chunk), score(chunk, ...), mix(chunk, ...).
template <class Reader>
class Worker {
 public:
  explicit Worker(const Problem& problem)
      : p_(problem),
        reader_(problem),
        softmax_(problem),
        acc_stride_(round_up(problem.values.channels, 16)),
        acc_(problem.queries * acc_stride_),
        scores_(problem.queries * kScoreStride) {}

  // Return false if rows refer to data that is not stored; the results are undefined then.
  bool attend(const Piece& piece) {
    const int64_t queries = p_.queries;
    softmax_.begin();
    std::fill_n(static_cast<float*>(acc_), queries * acc_stride_, 0.f);
    reader_.begin(p_.q + piece.stream * queries * p_.keys.channels);
    for (int64_t at = piece.begin; at < piece.end; at += kChunk) {
      list(piece, at);
      if (!reader_.stores(chunk_)) return false;
      reader_.score(chunk_, scores_);
      if (p_.added.products && !add_offsets(piece.stream)) return false;
      softmax_.load_log_weights(chunk_.rows, chunk_.count);
      for (int64_t m = 0; m < queries; ++m) {
        const int seen = visible(piece.stream, m, at);
        const float keep = softmax_.weigh(m, scores_ + m * kScoreStride, seen, chunk_.count);
        if (keep != 1.f) rescale(m, keep);
      }
      reader_.mix(chunk_, scores_, acc_, acc_stride_);
    }
    for (int64_t m = 0; m < queries; ++m) {
      rescale(m, softmax_.inverse_sum(m));
      std::copy_n(acc_ + m * acc_stride_, p_.values.channels, piece.out + m * p_.values.channels);
      piece.lse[m] = softmax_.lse(m);
    }
    return true;
  }

 private:
  void list(const Piece& piece, int64_t at) {
    const int64_t left = p_.lengths[piece.stream] - at;
    chunk_.count = int(std::min<int64_t>(kChunk, piece.end - at));
    chunk_.known = int(std::min<int64_t>(kChunk + kAheadCoded, left));
    chunk_.next = int(std::min<int64_t>(kChunk, piece.end - at - chunk_.count));
    chunk_.contiguous = !p_.listed;
    if (p_.listed)
      std::copy_n(p_.listed + piece.stream * p_.listed_stride + at, chunk_.known, chunk_.rows);
    else
      std::iota(chunk_.rows, chunk_.rows + chunk_.known, p_.starts[piece.stream] + at);
  }

  // Add the offsets at the places of the chunk's rows to their products. Return false if a place is out of range.
  bool add_offsets(int64_t stream) {
    const Added& added = p_.added;
    const bool straight = chunk_.contiguous && !added.positions;
    int64_t places[kChunk];
    for (int t = 0; t < chunk_.count; ++t) {
      if (!added.holds(stream, chunk_.rows[t])) return false;
      places[t] = added.place(stream, chunk_.rows[t]);
    }
    for (int64_t m = 0; m < p_.queries; ++m) {
      const float* products = added.of(stream * p_.queries + m);
      float* scores = scores_ + m * kScoreStride;
      if (straight) {
        const float* from = products + places[0];
        for (int t = 0; t < chunk_.count; ++t) scores[t] += from[t];
      } else {
        for (int t = 0; t < chunk_.count; ++t) scores[t] += products[places[t]];
      }
    }
    return true;
  }

  // Number of rows of the chunk that query m may attend to.
  int visible(int64_t stream, int64_t m, int64_t at) const {
    if (!p_.causal) return chunk_.count;
    const int64_t limit = p_.lengths[stream] - p_.causal + m % p_.causal + 1;
    return int(std::clamp<int64_t>(limit - at, 0, chunk_.count));
  }

  void rescale(int64_t m, float factor) {
    float* acc = acc_ + m * acc_stride_;
    for (int c = 0; c < acc_stride_; c += kLanes) store(acc + c, mul(load(acc + c), set1(factor)));
  }

  const Problem& p_;
  Reader reader_;
  Softmax softmax_;
  const int acc_stride_;
  Buffer<float> acc_, scores_;
  Chunk chunk_;
};

// Attend for all streams. Return -1, or the number of an invalid stream.
template <class Reader>
int attend_all(const Problem& p) {
  if (const int bad = first_invalid(p); bad >= 0) return bad;
  // Long enough that the partial result of a piece is small compared to the rows that it reads.
  const int64_t least = std::max<int64_t>(1024, 64 * p.queries), most = std::max<int64_t>(16384, least);
  const int bad = attend_pieces(p, p.values.channels, {least, most},
                                [&](int64_t) { return std::make_shared<Worker<Reader>>(p); });
  mark_not_numbers(p, p.keys.channels, p.values.channels, p.keys.bits > 0);
  return bad;
}

}  // namespace kvpress
