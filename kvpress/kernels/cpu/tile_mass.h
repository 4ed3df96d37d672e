// SPDX-License-Identifier: Apache-2.0
// Softmax weight that tiles of keys receive from blocks of queries.
//
// The keys of a KV head are transposed once. A task takes a few blocks of queries of one head, so that their logits stay in the
// L2 cache, from the products through the softmax to the sums.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>

#include "softmax.h"
#include "split.h"
#include "tile.h"

namespace kvpress {

struct TileMass {
  const void* q;        // [H, M, D]
  const void* keys;     // [G, K, D]
  const int64_t* last;  // [M]: last key that a query attends to; negative if there is none
  float* out;           // [H, query blocks, tiles]
  int64_t heads;        // H
  int64_t kv_heads;     // G
  int64_t queries;      // M
  int64_t count;        // K
  int64_t channels;     // D
  int64_t block;        // queries of a block
  int64_t tile;         // keys of a tile
  int64_t key_strides[2];  // elements between KV heads, and between keys
  int64_t dtype;        // of q and keys
  int64_t threads;
  double scale;

  int64_t query_blocks() const { return (queries + block - 1) / block; }
  int64_t tiles() const { return (count + tile - 1) / tile; }
  int64_t panels() const { return (count + kTileRows - 1) / kTileRows; }
  // Query blocks of one task.
  int64_t together() const {
    constexpr int64_t kLogits = 1 << 19, kRows = 8 * kTileQueries;
    const int64_t rows = std::min(kRows, kLogits / std::max<int64_t>(count, 1));
    return std::max<int64_t>(1, rows / block);
  }
};

// State of one thread.
template <class Product>
class TileMassWorker {
  using Unit = typename Product::Unit;

 public:
  explicit TileMassWorker(const TileMass& p)
      : p_(p),
        depth_(tile_depth<Product>(p.channels)),
        stride_(p.panels() * kTileRows),
        queries_(p.together() * p.block * depth_),
        logits_(p.together() * p.block * stride_),
        received_(stride_) {}

  // Compute the weight that all tiles receive from `together` query blocks of a head, from `block` on.
  void sum_up(const Unit* keys, int64_t head, int64_t block) {
    const int64_t first = block * p_.block, end = std::min((block + p_.together()) * p_.block, p_.queries);
    const int count = int(end - first);
    int64_t seen = 0;
    for (int m = 0; m < count; ++m) {
      Product::pack(Elements(p_.q, p_.dtype), (head * p_.queries + first + m) * p_.channels, p_.channels,
                    queries_ + m * depth_);
      seen = std::max(seen, visible(first + m));
    }
    multiply(keys, count, seen);
    for (int64_t at = first; at < end; at += p_.block, ++block) {
      std::fill_n(static_cast<float*>(received_), stride_, 0.f);
      for (int64_t m = at; m < std::min(at + p_.block, end); ++m) weigh(logits_ + (m - first) * stride_, visible(m));
      float* out = p_.out + (head * p_.query_blocks() + block) * p_.tiles();
      for (int64_t t = 0; t < p_.tiles(); ++t) {
        const float* from = received_ + t * p_.tile;
        out[t] = 0;
        for (int64_t i = 0; i < std::min(p_.tile, p_.count - t * p_.tile); ++i) out[t] += from[i];
      }
    }
  }

 private:
  int64_t visible(int64_t m) const { return std::clamp<int64_t>(p_.last[m] + 1, 0, p_.count); }

  // Write the base-two logits of `count` queries and the first `seen` keys; logits past these are undefined.
  void multiply(const Unit* keys, int count, int64_t seen) {
    const int size = tile_size<Product>(p_.channels);
    for (int64_t at = 0; at < seen; at += kTileRows, keys += size) {
      int m = 0;
      for (; m + kTileQueries <= count; m += kTileQueries) multiply<kTileQueries>(keys, m, at);
      for (; m + 2 <= count; m += 2) multiply<2>(keys, m, at);
      for (; m < count; ++m) multiply<1>(keys, m, at);
    }
  }

  template <int kQueries>
  KVPRESS_INLINE void multiply(const Unit* keys, int m, int64_t at) {
    F sums[kQueries][kTileVectors];
    tile_product<Product, kQueries>(keys, queries_ + m * depth_, depth_, sums);
    for (int i = 0; i < kQueries; ++i)
      for (int v = 0; v < kTileVectors; ++v)
        store(logits_ + (m + i) * stride_ + at + v * kLanes, mul(sums[i][v], set1(float(p_.scale * kLog2e))));
  }

  // Add the softmax of a row of logits to received_.
  void weigh(float* row, int64_t seen) {
    if (!seen) return;
    const int64_t end = (seen + kLanes - 1) / kLanes * kLanes;
    std::fill(row + seen, row + end, -INFINITY);
    F best = set1(-INFINITY), total = set1(0.f);
    for (int64_t t = 0; t < end; t += kLanes) best = max(best, load(row + t));
    best = set1(max_lane(best));
    for (int64_t t = 0; t < end; t += kLanes) {
      const F weight = exp2(sub(load(row + t), best));
      store(row + t, weight);
      total = add(total, weight);
    }
    const F share = set1(1 / sum(total));
    for (int64_t t = 0; t < end; t += kLanes) store(received_ + t, fma(load(row + t), share, load(received_ + t)));
  }

  const TileMass& p_;
  const int depth_;
  const int64_t stride_;
  Buffer<Unit> queries_;
  Buffer<float> logits_, received_;
};

// Compute all heads. The newest queries attend to the most keys, so their tasks start first.
template <class Product>
int tile_mass_all(const TileMass& p) {
  using Unit = typename Product::Unit;
  const int64_t group = p.heads / p.kv_heads, size = tile_size<Product>(p.channels), step = p.together();
  const int64_t parts = (p.query_blocks() + step - 1) / step;
  Buffer<Unit> packed(p.panels() * size);
  Unit* const keys = packed;
  for (int64_t kv = 0; kv < p.kv_heads; ++kv) {
    parallel(p.panels(), p.threads, [&] {
      return [&, transpose = std::make_shared<Transpose<Product>>(p.channels)](int64_t i) {
        const int64_t first = i * kTileRows;
        transpose->load(Elements(p.keys, p.dtype), kv * p.key_strides[0] + first * p.key_strides[1], p.key_strides[1],
                        int(std::min<int64_t>(kTileRows, p.count - first)), keys + i * size);
      };
    });
    parallel(parts * group, p.threads, [&] {
      return [&, worker = std::make_shared<TileMassWorker<Product>>(p)](int64_t i) {
        worker->sum_up(keys, kv * group + i % group, (parts - 1 - i / group) * step);
      };
    });
  }
  return -1;
}

}  // namespace kvpress
