// SPDX-License-Identifier: Apache-2.0
// Softmax weight that each stored row receives from all queries, without a matrix of queries times rows.
//
// A tile of rows is transposed once, so that a register has the logits of neighbouring rows for one query. The logits go
// through the exponential and into the statistic of their row without leaving registers.
#pragma once

#include "logits.h"
#include "split.h"
#include "tile.h"

namespace kvpress {

enum Statistic : int64_t { kSum = 0, kSquares = 1, kMaximum = 2 };

struct Mass {
  const void* q;          // [N, M, D]
  const void* keys;       // [R, D]
  const int64_t* starts;   // [N]
  const int64_t* lengths;  // [N]
  const float* weights;    // [N, M]: factor of the softmax weights of each query, or null
  const float* sinks;     // [N, M]: logits that only take part in the softmax, or null
  const void* log_weight;  // [R], added to the logits, or null
  float* lse;             // [N, M]
  float* out;             // [R], zero on entry
  int64_t rows;
  int64_t streams;
  int64_t queries;
  int64_t channels;
  int64_t stride;         // elements between two rows of keys
  int64_t query_dtype;
  int64_t key_dtype;
  int64_t weight_dtype;
  int64_t causal;
  int64_t needs_lse;      // lse is an output, else an input
  int64_t statistic;
  int64_t threads;
  double scale;
  double softcap;         // 0 when absent
};

constexpr int kSpanTiles = 256 / kTileRows;         // tiles of one task: the queries are read once for all of them
constexpr int kQueryBlock = 32 * kTileQueries;      // queries of one task: enough to pay for the transposition

// State of one thread.
template <class Product>
class MassWorker {
  using Unit = typename Product::Unit;

 public:
  explicit MassWorker(const Mass& p)
      : p_(p),
        base_two_(p.scale, p.softcap),
        depth_(tile_depth<Product>(p.channels)),
        transpose_(p.channels),
        tile_size_(tile_size<Product>(p.channels)),
        tiles_(int64_t(kSpanTiles) * tile_size_),
        queries_(int64_t(kQueryBlock) * depth_),
        top_(int64_t(kQueryBlock) * kLanes),
        sum_(int64_t(kQueryBlock) * kLanes),
        received_(kSpanTiles * kTileRows),
        log_weights_(kSpanTiles * kTileRows) {
    for (int t = 0; t < kTileRows; ++t) edge_[t] = 0, edge_[kTileRows + t] = -INFINITY;
  }

  // Compute the log-sum-exp of up to kQueryBlock queries.
  void sum_up(int64_t stream, int64_t first) {
    const int count = int(std::min<int64_t>(kQueryBlock, p_.queries - first));
    const int64_t length = p_.lengths[stream];
    std::fill_n(static_cast<float*>(top_), count * kLanes, kLowest);
    std::fill_n(static_cast<float*>(sum_), count * kLanes, 0.f);
    load_queries(stream, first, count);
    const int64_t end = last_visible(stream, first, count);
    for (int64_t at = 0; at < end; at += kTileRows) {
      const int size = int(std::min<int64_t>(kTileRows, length - at));
      load_tile(p_.starts[stream] + at, size, tiles_, log_weights_);
      for_queries(stream, first, count, at, [&](auto tile, int m) {
        multiply<tile>(tiles_, log_weights_, queries_ + m * depth_, [&](int i, F(&x)[kTileVectors]) KVPRESS_INLINE_LAMBDA {
          mask(stream, first + m + i, at, size, x);
          float *top = top_ + (m + i) * kLanes, *sum = sum_ + (m + i) * kLanes;
          F best = load(top);
          const F before = best;
          for (F& logit : x) best = max(best, logit);
          F total = mul(load(sum), exp2(sub(before, best)));
          for (F& logit : x) total = add(total, exp2(sub(logit, best)));
          store(top, best);
          store(sum, total);
        });
      });
    }
    for (int m = 0; m < count; ++m) p_.lse[stream * p_.queries + first + m] = total(stream, first + m, m);
  }

  // Compute the statistic of the rows from `first` on, at most kSpanTiles tiles of them.
  template <int kStatistic>
  void receive(int64_t stream, int64_t first) {
    const int span = int(std::min<int64_t>(kSpanTiles * kTileRows, p_.lengths[stream] - first));
    const int64_t start = p_.starts[stream] + first;
    for (int at = 0; at < span; at += kTileRows)
      load_tile(start + at, std::min(kTileRows, span - at), tiles_ + at / kTileRows * tile_size_, log_weights_ + at);
    std::fill_n(static_cast<float*>(received_), kSpanTiles * kTileRows, 0.f);
    for (int64_t block = 0; block < p_.queries; block += kTileQueries) {
      const int count = int(std::min<int64_t>(kTileQueries, p_.queries - block));
      if (last_visible(stream, block, count) <= first) continue;
      load_queries(stream, block, count);
      for (int at = 0; at < span; at += kTileRows) {
        const int size = std::min(kTileRows, span - at);
        for_queries(stream, block, count, first + at, [&](auto tile, int m) {
          multiply<tile>(tiles_ + at / kTileRows * tile_size_, log_weights_ + at, queries_ + m * depth_,
                         [&](int i, F(&x)[kTileVectors]) KVPRESS_INLINE_LAMBDA {
                           mask(stream, block + m + i, first + at, size, x);
                           const F lse = set1(base_two_lse(stream, block + m + i));
                           for (int v = 0; v < kTileVectors; ++v) {
                             float* out = received_ + at + v * kLanes;
                             const F weight = exp2(sub(x[v], lse));
                             store(out, kStatistic == kSum       ? add(load(out), weight)
                                        : kStatistic == kSquares ? fma(weight, weight, load(out))
                                                                 : max(load(out), weight));
                           }
                         });
        });
      }
    }
    std::copy_n(static_cast<float*>(received_), span, p_.out + start);
  }

 private:
  static constexpr float kLowest = -1e30f;  // below every logit, yet finite, so that differences with it are finite

  // Number of rows of the stream that query m attends to.
  int64_t seen(int64_t stream, int64_t m) const {
    const int64_t length = p_.lengths[stream];
    return p_.causal ? std::clamp<int64_t>(length - p_.causal + m % p_.causal + 1, 0, length) : length;
  }

  int64_t last_visible(int64_t stream, int64_t first, int count) const {
    int64_t last = 0;
    for (int64_t m = first; m < first + count; ++m) last = std::max(last, seen(stream, m));
    return last;
  }

  // Call step(number of queries, first query) for the queries that attend to a row from `at` on.
  template <class Step>
  void for_queries(int64_t stream, int64_t first, int count, int64_t at, Step&& step) const {
    int m = 0;
    for (; m + kTileQueries <= count; m += kTileQueries)
      if (last_visible(stream, first + m, kTileQueries) > at)
        step(std::integral_constant<int, kTileQueries>{}, m);
    for (; m < count; ++m)
      if (seen(stream, first + m) > at) step(std::integral_constant<int, 1>{}, m);
  }

  void load_queries(int64_t stream, int64_t first, int count) {
    const Elements from(p_.q, p_.query_dtype);
    for (int m = 0; m < count; ++m)
      Product::pack(from, (stream * p_.queries + first + m) * p_.channels, p_.channels, queries_ + m * depth_);
  }

  void load_tile(int64_t row, int size, Unit* tile, float* log_weights) {
    if (p_.log_weight) {
      Elements(p_.log_weight, p_.weight_dtype).read(row, size, log_weights);
      for (int t = 0; t < size; ++t) log_weights[t] *= kLog2e;
    }
    transpose_.load(Elements(p_.keys, p_.key_dtype), row * p_.stride, p_.stride, size, tile);
  }

  // Call use(i, logits) for each of kQueries queries; logits are in base two, capped and not masked.
  template <int kQueries, class Use>
  KVPRESS_INLINE void multiply(const Unit* tile, const float* log_weights, const Unit* queries, Use&& use) const {
    F sums[kQueries][kTileVectors];
    tile_product<Product, kQueries>(tile, queries, depth_, sums);
    for (int i = 0; i < kQueries; ++i) {
      for (F& x : sums[i]) x = base_two_.finish(mul(x, set1(base_two_.factor())));
      if (p_.log_weight)
        for (int v = 0; v < kTileVectors; ++v) sums[i][v] = add(sums[i][v], load(log_weights + v * kLanes));
      use(i, sums[i]);
    }
  }

  // Set logits to -inf where query m does not attend to a row of the tile at `at`, or the tile has no such row.
  KVPRESS_INLINE void mask(int64_t stream, int64_t m, int64_t at, int size, F (&x)[kTileVectors]) const {
    const int visible = int(std::clamp<int64_t>(seen(stream, m) - at, 0, size));
    if (visible == kTileRows) return;
    for (int v = 0; v < kTileVectors; ++v) x[v] = add(x[v], load(edge_ + kTileRows - visible + v * kLanes));
  }

  // Infinite for queries of weight zero or without rows, so that their softmax weights are zero.
  float base_two_lse(int64_t stream, int64_t m) const {
    const int64_t at = stream * p_.queries + m;
    const float weight = p_.weights ? p_.weights[at] : 1.f;
    if (weight == 0.f || p_.lse[at] == -INFINITY) return INFINITY;
    return p_.lse[at] * kLog2e - std::log2(weight);  // w * 2^(x - lse) = 2^(x - (lse - log2 w))
  }

  // Log-sum-exp of the lanes of query m of the block, and of its sink.
  float total(int64_t stream, int64_t query, int m) const {
    const float *top = top_ + m * kLanes, *sum = sum_ + m * kLanes;
    const float sink = p_.sinks ? p_.sinks[stream * p_.queries + query] * kLog2e : -INFINITY;
    const float best = std::max(sink, *std::max_element(top, top + kLanes));
    if (best == kLowest) return -INFINITY;
    float all = std::exp2(sink - best);
    for (int l = 0; l < kLanes; ++l) all += sum[l] * std::exp2(top[l] - best);
    return (best + std::log2(all)) * kLn2;
  }

  const Mass& p_;
  const BaseTwo base_two_;
  const int depth_, tile_size_;
  Transpose<Product> transpose_;
  Buffer<Unit> tiles_, queries_;
  Buffer<float> top_, sum_, received_, log_weights_;
  float edge_[2 * kTileRows];
};

// Tasks of equal size over all streams: (stream, first) with `first` a multiple of `step` below size(stream).
template <class Size>
std::vector<std::pair<int64_t, int64_t>> tasks(int64_t streams, int64_t step, Size size) {
  std::vector<std::pair<int64_t, int64_t>> all;
  for (int64_t n = 0; n < streams; ++n)
    for (int64_t at = 0; at < size(n); at += step) all.emplace_back(n, at);
  return all;
}

// Return -1, or the number of an invalid stream.
template <class Product>
int receive_all(const Mass& p) {
  for (int64_t n = 0; n < p.streams; ++n)
    if (p.starts[n] < 0 || p.lengths[n] < 0 || p.starts[n] + p.lengths[n] > p.rows) return int(n);
  const auto run = [&](const std::vector<std::pair<int64_t, int64_t>>& all, auto work) {
    parallel(int64_t(all.size()), p.threads, [&] {
      return [&, worker = std::make_shared<MassWorker<Product>>(p)](int64_t i) {
        work(*worker, all[i].first, all[i].second);
      };
    });
  };
  using Worker = MassWorker<Product>;
  if (p.needs_lse)
    run(tasks(p.streams, kQueryBlock, [&](int64_t) { return p.queries; }),
        [](Worker& worker, int64_t stream, int64_t first) { worker.sum_up(stream, first); });
  run(tasks(p.streams, kSpanTiles * kTileRows, [&](int64_t n) { return p.lengths[n]; }),
      [&](Worker& worker, int64_t stream, int64_t first) {
        switch (p.statistic) {
          case kSum:
            return worker.template receive<kSum>(stream, first);
          case kSquares:
            return worker.template receive<kSquares>(stream, first);
          default:
            return worker.template receive<kMaximum>(stream, first);
        }
      });
  return -1;
}

}  // namespace kvpress
