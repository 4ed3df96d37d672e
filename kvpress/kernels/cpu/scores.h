// SPDX-License-Identifier: Apache-2.0
// Scores of rows that represent others: labels of tokens, and bounds of pages.
#pragma once

#include "dense_reader.h"
#include "label_codes.h"

namespace kvpress {

// Scores of the pages of one stream, from their bounds; state of one thread.
template <class Dot>
class BoundWorker {
  using T = typename Dot::Key;
  using Query = typename Dot::Query;

 public:
  static constexpr int kRows = kChunk;  // pages of one task

  explicit BoundWorker(const Scores& p)
      : p_(p),
        stride_(round_up(p.channels, kQueryPad)),
        whole_(p.queries * p.channels),
        part_(p.queries * p.channels),
        positive_(p.queries * stride_),
        negative_(p.queries * stride_),
        highs_(p.queries * kScoreStride),
        lows_(p.queries * kScoreStride) {}

  // out[p] = score of page p of a stream, for up to kRows pages from `first` on.
  void score(int64_t stream, int64_t first, float* out) {
    load_queries(stream);
    const int64_t left = p_.counts[stream] - first, row = p_.starts[stream] + first;
    const int count = int(std::min<int64_t>(kRows, left));
    product(p_.high, row, count, left, positive_, highs_);
    product(p_.low, row, count, left, negative_, lows_);
    for (int t = 0; t < count; t += kLanes) {
      F best = set1(-INFINITY);
      for (int64_t m = 0; m < p_.queries; ++m)
        best = max(best, add(load(highs_ + m * kScoreStride + t), load(lows_ + m * kScoreStride + t)));
      store(highs_ + t, best);
    }
    std::copy_n(static_cast<float*>(highs_), count, out + first);
  }

 private:
  // max(q low, q high) = max(q, 0) high + min(q, 0) low for every channel.
  void load_queries(int64_t stream) {
    const int64_t count = p_.queries * p_.channels;
    Elements(p_.q, p_.query_dtype).read(stream * count, count, whole_);
    for (int64_t i = 0; i < count; ++i) part_[i] = std::max(whole_[i], 0.f);
    pad_queries<Dot>(part_, p_.queries, p_.channels, positive_, stride_);
    for (int64_t i = 0; i < count; ++i) part_[i] = std::min(whole_[i], 0.f);
    pad_queries<Dot>(part_, p_.queries, p_.channels, negative_, stride_);
  }

  void product(const void* data, int64_t first, int count, int64_t left, const Query* queries, float* scores) const {
    const T* base = static_cast<const T*>(data) + first * p_.stride;
    score_rows<Dot>([&](int t) { return base + t * p_.stride; }, count, queries, stride_, int(p_.queries),
                    int(p_.channels), scores, [&](int t) {
                      if (t + kAhead < left) prefetch_row(base + (t + kAhead) * p_.stride, p_.channels * sizeof(T));
                    });
  }

  const Scores& p_;
  const int stride_;
  Buffer<float> whole_, part_;
  Buffer<Query> positive_, negative_;
  Buffer<float> highs_, lows_;
};

// Scores of labels, which are too short for a horizontal sum per product; state of one thread. `Labels` reads one storage
// format: begin(stream), load(row, size) of up to kRows rows, product(m, t, sums) with one tile of these.
template <class Labels>
class LabelWorker {
 public:
  static constexpr int kRows = 4096;  // rows of one task: many, because neighbouring rows are short

  explicit LabelWorker(const Scores& p) : p_(p), labels_(p) {}

  // out[r] = score of row r of a stream, for up to kRows rows from `first` on.
  void score(int64_t stream, int64_t first, float* out) {
    if (stream != stream_) labels_.begin(stream_ = stream);
    const int64_t end = std::min(p_.counts[stream], first + kRows);
    for (int64_t at = first; at < end; at += Labels::kRows)
      score_block(p_.starts[stream] + at, int(std::min<int64_t>(Labels::kRows, end - at)), out + at);
  }

 private:
  void score_block(int64_t row, int size, float* out) {
    labels_.load(row, size);
    float scores[Labels::kRows];  // used if the last tile is partial
    float* const to = size % kTileRows ? scores : out;
    for_query_tiles(int(p_.queries), [&](auto tile, int m) KVPRESS_INLINE_LAMBDA {
      for (int t = 0; t < size; t += kTileRows) {
        F sums[tile][kTileVectors];
        labels_.product(m, t, sums);
        for (int v = 0; v < kTileVectors; ++v) {
          F best = m ? load(to + t + v * kLanes) : set1(-INFINITY);
          for (int i = 0; i < tile; ++i) best = max(best, sums[i][v]);
          store(to + t + v * kLanes, best);
        }
      }
    });
    if (to == scores) std::copy_n(scores, size, out);
  }

  const Scores& p_;
  Labels labels_;
  int64_t stream_ = -1;
};

template <class Product>
class PlainLabels {
  using Unit = typename Product::Unit;

 public:
  static constexpr int kRows = kTileRows;  // rows at once

  explicit PlainLabels(const Scores& p)
      : p_(p),
        depth_(tile_depth<Product>(p.channels)),
        transpose_(p.channels),
        tile_(tile_size<Product>(p.channels)),
        queries_(p.queries * depth_) {}

  void begin(int64_t stream) {
    const Elements from(p_.q, p_.query_dtype);
    for (int64_t m = 0; m < p_.queries; ++m)
      Product::pack(from, (stream * p_.queries + m) * p_.channels, p_.channels, queries_ + m * depth_);
  }

  void load(int64_t row, int size) {
    const Elements labels(p_.high, p_.dtype);
    labels.prefetch((row + kAheadLabels) * p_.stride, size * p_.stride);
    transpose_.load(labels, row * p_.stride, p_.stride, size, tile_);
  }

  template <int kQueries>
  KVPRESS_INLINE void product(int m, int /*t*/, F (&sums)[kQueries][kTileVectors]) const {
    tile_product<Product>(tile_, queries_ + m * depth_, depth_, sums);
  }

 private:
  const Scores& p_;
  const int depth_;
  Transpose<Product> transpose_;
  Buffer<Unit> tile_, queries_;
};

// Return the first stream outside the storage, or -1.
inline int first_outside(const Scores& p) {
  for (int64_t n = 0; n < p.streams; ++n)
    if (p.starts[n] < 0 || p.counts[n] < 0 || p.starts[n] + p.counts[n] > p.rows) return int(n);
  return -1;
}

// Return -1, or the number of an invalid stream.
template <class Worker>
int score_all(const Scores& p) {
  if (const int bad = first_outside(p); bad >= 0) return bad;
  std::vector<std::pair<int64_t, int64_t>> tasks;
  for (int64_t n = 0; n < p.streams; ++n) {
    for (int64_t at = 0; at < p.counts[n]; at += Worker::kRows) tasks.emplace_back(n, at);
    std::fill_n(p.out + n * p.most + p.counts[n], p.most - p.counts[n], -INFINITY);
  }
  parallel(int64_t(tasks.size()), p.threads, [&] {
    return [&, worker = std::make_shared<Worker>(p)](int64_t i) {
      const auto [stream, first] = tasks[i];
      worker->score(stream, first, p.out + stream * p.most);
    };
  });
  return -1;
}

}  // namespace kvpress
