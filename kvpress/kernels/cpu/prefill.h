// SPDX-License-Identifier: Apache-2.0
// Causal attention of a prompt that reads only selected keys: tiles of keys, listed for each block of queries of each head, and
// single columns of each head.
//
// The keys of a KV head are transposed once, for all query blocks and all heads of its GQA group. The weights of a query block
// with few tiles stay in the L2 cache between the two matrix products, which keep their sums in registers.
#pragma once

#include <vector>

#include "logits.h"
#include "split.h"
#include "tile.h"

namespace kvpress {

struct Prefill {
  const void* q;                  // [B, Hq, Q, D]
  const void* keys;               // [B, H, T, D]
  const void* values;             // [B, H, T, Dv]
  const int64_t* ends;            // [B * Hq * query blocks]: end of each list in `tiles`, where the next list begins
  const int32_t* tiles;           // key block numbers, ascending within each list
  const int64_t* column_ends;     // [B * Hq]: end of each list in `columns`, or null
  const int32_t* columns;         // token indices of single keys, ascending for each head
  const uint8_t* real;            // [B, T]: 0 for padding; null without padding
  float* out;                     // [B, Hq, Q, Dv]
  float* lse;                     // [B, Hq, Q]
  int64_t batch;
  int64_t heads;                  // Hq
  int64_t kv_heads;               // H
  int64_t queries;                // Q: the queries are the last Q of T tokens
  int64_t total;                  // T
  int64_t channels;               // D
  int64_t value_channels;         // Dv
  int64_t block;
  int64_t key_strides[3];         // elements between batch rows, heads and tokens
  int64_t value_strides[3];
  int64_t dtype;                  // of q, keys and values
  int64_t threads;
  double scale;
  double softcap;                 // 0 when absent

  int64_t blocks() const { return (total + block - 1) / block; }
  int64_t query_blocks() const { return (queries + block - 1) / block; }
};

constexpr int kSpanColumns = 256;  // keys between two updates of the running maximum
constexpr int kChunkRows = 64;     // maximum queries of one task

// Keys and values of one KV head, packed in the order in which the products read them.
template <class Product>
class PackedHead {
  using Unit = typename Product::Unit;

 public:
  explicit PackedHead(const Prefill& p)
      : p_(p),
        width_(round_up(p.block, kTileRows)),
        key_stride_(width_ / kTileRows * tile_size<Product>(p.channels)),
        value_stride_(round_up(p.value_channels, kLanes)),
        borrows_(p.dtype == kFloat32 && p.value_channels % kLanes == 0 && !p.real),
        keys_(p.blocks() * key_stride_),
        values_(borrows_ ? 0 : p.total * value_stride_),
        live_(p.blocks()) {}

  void choose(int64_t row, int64_t head) {
    row_ = row;
    key_ = row * p_.key_strides[0] + head * p_.key_strides[1];
    value_ = row * p_.value_strides[0] + head * p_.value_strides[1];
  }

  // Pack one block. Threads may pack different blocks at the same time.
  void pack(Transpose<Product>& transpose, int64_t block) {
    const int64_t first = block * p_.block, count = size(block);
    live_[block] = !p_.real || std::any_of(real() + first, real() + first + count, [](uint8_t x) { return x != 0; });
    if (!live_[block]) return;
    pack_keys(transpose, first, count, keys_ + block * key_stride_);
    for (int64_t t = first; !borrows_ && t < first + count; ++t) {
      if (p_.real && !real()[t])  // padding has weight zero, but its value may be NaN, and 0 * NaN is NaN
        std::fill_n(values_ + t * value_stride_, value_stride_, 0.f);
      else
        read_value(t, values_ + t * value_stride_);
    }
  }

  void pack_keys(Transpose<Product>& transpose, int64_t first, int64_t count, Unit* to) const {
    const Elements from(p_.keys, p_.dtype);
    for (int64_t at = 0; at < count; at += kTileRows, to += tile_size<Product>(p_.channels))
      transpose.load(from, key_ + (first + at) * p_.key_strides[2], p_.key_strides[2],
                     int(std::min<int64_t>(kTileRows, count - at)), to);
  }

  // Gather single keys and values, at token indices in any order, in the layout of pack_keys().
  void gather(Transpose<Product>& transpose, const int32_t* positions, int count, Unit* keys, float* values) const {
    const Elements from(p_.keys, p_.dtype);
    transpose.load(from, [&](int t) { return key_ + positions[t] * p_.key_strides[2]; }, count, keys);
    for (int t = 0; t < count; ++t) read_value(positions[t], values + t * value_stride_);
  }

  bool live(int64_t block) const { return live_[block]; }
  int size(int64_t block) const { return int(std::min(p_.block, p_.total - block * p_.block)); }
  int width() const { return width_; }
  const uint8_t* real() const { return p_.real + row_ * p_.total; }
  const Unit* keys(int64_t block) const { return keys_ + block * key_stride_; }
  // First value of a block; value_step() is the number of elements between two values.
  const float* values(int64_t block) const {
    const int64_t first = block * p_.block;
    return borrows_ ? static_cast<const float*>(p_.values) + value_ + first * p_.value_strides[2]
                    : values_ + first * value_stride_;
  }
  int64_t value_step() const { return borrows_ ? p_.value_strides[2] : value_stride_; }
  int value_width() const { return int(value_stride_); }

 private:
  void read_value(int64_t t, float* to) const {
    Elements(p_.values, p_.dtype).read(value_ + t * p_.value_strides[2], p_.value_channels, to);
  }

  const Prefill& p_;
  const int width_;
  const int64_t key_stride_, value_stride_;
  const bool borrows_;
  Buffer<Unit> keys_;
  Buffer<float> values_;
  std::vector<char> live_;
  int64_t row_ = 0, key_ = 0, value_ = 0;
};

// State of one thread.
template <class Product>
class PrefillWorker {
  using Unit = typename Product::Unit;

 public:
  PrefillWorker(const Prefill& p, const PackedHead<Product>& head)
      : p_(p),
        head_(head),
        base_two_(p.scale, p.softcap),
        depth_(tile_depth<Product>(p.channels)),
        stride_(std::max(kSpanColumns, head.width())),
        transpose_(p.channels),
        queries_(int64_t(kChunkRows) * depth_),
        weights_(int64_t(kChunkRows) * stride_),
        out_(int64_t(kChunkRows) * head.value_width()),
        max_(kChunkRows),
        sum_(kChunkRows),
        keep_(kChunkRows),
        gathered_keys_(p.column_ends ? tile_size<Product>(p.channels) : 0),
        gathered_values_(p.column_ends ? kTileRows * head.value_width() : 0) {}

  // Attend with up to kChunkRows queries of one query head, from query `first` of query block `block` on.
  void attend(int64_t row, int64_t query_head, int64_t block, int64_t first) {
    const int64_t head = row * p_.heads + query_head, list = head * p_.query_blocks() + block;
    const int64_t start = block * p_.block + first;
    rows_ = int(std::min<int64_t>({kChunkRows, p_.block - first, p_.queries - start}));
    position_ = p_.total - p_.queries + start;
    for (int m = 0; m < rows_; ++m)
      Product::pack(Elements(p_.q, p_.dtype), (head * p_.queries + start + m) * p_.channels, p_.channels,
                    queries_ + m * depth_);
    std::fill_n(static_cast<float*>(max_), rows_, -INFINITY);
    std::fill_n(static_cast<float*>(sum_), rows_, 0.f);
    std::fill_n(static_cast<float*>(out_), rows_ * head_.value_width(), 0.f);
    const int32_t *tile = p_.tiles + (list ? p_.ends[list - 1] : 0), *const last = p_.tiles + p_.ends[list];
    if (p_.column_ends) read_columns(head, tile, last);
    for (; tile < last; ++tile) {
      if (*tile * p_.block >= position_ + rows_ || !head_.live(*tile)) continue;
      if (used_ + head_.width() > stride_) flush();
      put({head_.keys(*tile), head_.values(*tile), head_.value_step(), *tile * p_.block, head_.size(*tile), head_.width()});
      hide(parts_.back());
    }
    flush();
    for (int m = 0; m < rows_; ++m) {
      const int64_t at = head * p_.queries + start + m;
      const float factor = sum_[m] == 0 ? 0.f : 1 / sum_[m];
      for (int c = 0; c < p_.value_channels; ++c)
        p_.out[at * p_.value_channels + c] = out_[m * head_.value_width() + c] * factor;
      p_.lse[at] = sum_[m] == 0 ? -INFINITY : (max_[m] + std::log2(sum_[m])) * kLn2;
    }
  }

 private:
  // Keys whose logits fill neighbouring columns of weights_, from `column` on.
  struct Part {
    const Unit* keys;
    const float* values;
    int64_t step;      // elements between two values
    int64_t position;  // token index of the first key, -1 for gathered keys
    int size, width;   // number of keys, and of columns that they fill
    int column = 0;
  };

  // Gather the listed columns before the first query that are in no listed tile, and attend to kTileRows of them at a time.
  void read_columns(int64_t head, const int32_t* tile, const int32_t* last) {
    int32_t chosen[kTileRows];
    int count = 0;
    const auto read = [&] {
      if (!count) return;
      head_.gather(transpose_, chosen, count, gathered_keys_, gathered_values_);
      put({gathered_keys_, gathered_values_, head_.value_width(), -1, count, kTileRows});
      cut(parts_.back(), 0, count);
      flush();
      count = 0;
    };
    const int32_t *column = p_.columns + (head ? p_.column_ends[head - 1] : 0);
    for (; column < p_.columns + p_.column_ends[head] && *column < position_; ++column) {
      while (tile < last && *tile < *column / p_.block) ++tile;
      if ((tile < last && *tile == *column / p_.block) || (p_.real && !head_.real()[*column])) continue;
      chosen[count++] = *column;
      if (count == kTileRows) read();
    }
    read();
  }

  // Append the logits of a part to the pending ones.
  void put(Part part) {
    part.column = used_;
    used_ += part.width;
    parts_.push_back(part);
    const int size = tile_size<Product>(p_.channels);
    for (int at = 0; at < part.size; at += kTileRows) {
      const Unit* keys = part.keys + at / kTileRows * size;
      int m = 0;
      for (; m + kTileQueries <= rows_; m += kTileQueries) multiply<kTileQueries>(keys, m, part.column + at);
      for (; m + 4 <= rows_; m += 4) multiply<4>(keys, m, part.column + at);
      for (; m < rows_; ++m) multiply<1>(keys, m, part.column + at);
    }
  }

  template <int kQueries>
  KVPRESS_INLINE void multiply(const Unit* keys, int m, int column) {
    F sums[kQueries][kTileVectors];
    tile_product<Product, kQueries>(keys, queries_ + m * depth_, depth_, sums);
    for (int i = 0; i < kQueries; ++i)
      for (int v = 0; v < kTileVectors; ++v)
        store(weights_ + (m + i) * stride_ + column + v * kLanes,
              base_two_.finish(mul(sums[i][v], set1(base_two_.factor()))));
  }

  // Set the logits of future keys, of padding and of columns past the last key to -inf.
  void hide(const Part& part) {
    if (part.position + part.size > position_ || part.size < part.width)
      for (int m = 0; m < rows_; ++m)
        cut_row(part, m, int(std::clamp<int64_t>(position_ + m + 1 - part.position, 0, part.size)));
    if (!p_.real) return;
    for (int t = 0; t < part.size; ++t)
      for (int m = 0; !head_.real()[part.position + t] && m < rows_; ++m)
        weights_[m * stride_ + part.column + t] = -INFINITY;
  }

  void cut(const Part& part, int first, int visible) {
    for (int m = first; m < rows_; ++m) cut_row(part, m, visible);
  }

  void cut_row(const Part& part, int m, int visible) {
    float* row = weights_ + m * stride_ + part.column;
    std::fill(row + visible, row + part.width, -INFINITY);
  }

  // Turn the pending logits into weights, and add the weighted values.
  void flush() {
    if (!used_) return;
    for (int m = 0; m < rows_; ++m) keep_[m] = weigh(m);
    const int width = head_.value_width();
    int c = 0;
    for (; c + kTileVectors * kLanes <= width; c += kTileVectors * kLanes) accumulate<kTileVectors>(c);
    for (; c < width; c += kLanes) accumulate<1>(c);
    parts_.clear();
    used_ = 0;
  }

  float weigh(int m) {
    float* row = weights_ + m * stride_;
    F best = set1(-INFINITY);
    for (int t = 0; t < used_; t += kLanes) best = max(best, load(row + t));
    const float next = std::max(max_[m], max_lane(best));
    if (next == -INFINITY) {
      std::fill_n(row, used_, 0.f);
      return 1;
    }
    F total = set1(0.f);
    for (int t = 0; t < used_; t += kLanes) {
      const F weight = exp2(sub(load(row + t), set1(next)));
      store(row + t, weight);
      total = add(total, weight);
    }
    const float keep = std::exp2(max_[m] - next);
    max_[m] = next;
    sum_[m] = sum_[m] * keep + sum(total);
    return keep;
  }

  template <int kVectors>
  void accumulate(int channel) {
    int m = 0;
    for (; m + kTileQueries <= rows_; m += kTileQueries) accumulate<kVectors, kTileQueries>(channel, m);
    for (; m + 4 <= rows_; m += 4) accumulate<kVectors, 4>(channel, m);
    for (; m < rows_; ++m) accumulate<kVectors, 1>(channel, m);
  }

  template <int kVectors, int kQueries>
  KVPRESS_INLINE void accumulate(int channel, int m) {
    const int width = head_.value_width();
    F sums[kQueries][kVectors];
    for (int i = 0; i < kQueries; ++i)
      for (int v = 0; v < kVectors; ++v)
        sums[i][v] = mul(load(out_ + (m + i) * width + channel + v * kLanes), set1(keep_[m + i]));
    for (const Part& part : parts_) {
      const float *values = part.values + channel, *weights = weights_ + m * stride_ + part.column;
      for (int t = 0; t < part.size; ++t, values += part.step)
        for (int i = 0; i < kQueries; ++i)
          for (int v = 0; v < kVectors; ++v)
            sums[i][v] = fma(load(values + v * kLanes), set1(weights[i * stride_ + t]), sums[i][v]);
    }
    for (int i = 0; i < kQueries; ++i)
      for (int v = 0; v < kVectors; ++v) store(out_ + (m + i) * width + channel + v * kLanes, sums[i][v]);
  }

  const Prefill& p_;
  const PackedHead<Product>& head_;
  const BaseTwo base_two_;
  const int depth_, stride_;
  Transpose<Product> transpose_;
  Buffer<Unit> queries_;
  Buffer<float> weights_, out_, max_, sum_, keep_;
  Buffer<Unit> gathered_keys_;
  Buffer<float> gathered_values_;
  std::vector<Part> parts_;
  int rows_ = 0, used_ = 0;
  int64_t position_ = 0;
};

// Attend with all queries. The newest query blocks read the most keys, so their tasks start first.
template <class Product>
int prefill_all(const Prefill& p) {
  PackedHead<Product> head(p);
  const int64_t group = p.heads / p.kv_heads, chunks = (p.block + kChunkRows - 1) / kChunkRows;
  const int64_t per_block = group * chunks;
  for (int64_t row = 0; row < p.batch; ++row)
    for (int64_t kv = 0; kv < p.kv_heads; ++kv) {
      head.choose(row, kv);
      parallel(p.blocks(), p.threads, [&] {
        return [&, transpose = std::make_shared<Transpose<Product>>(p.channels)](int64_t i) { head.pack(*transpose, i); };
      });
      parallel(p.query_blocks() * per_block, p.threads, [&] {
        return [&, worker = std::make_shared<PrefillWorker<Product>>(p, head)](int64_t i) {
          const int64_t block = p.query_blocks() - 1 - i / per_block, first = i % chunks * kChunkRows;
          if (block * p.block + first < p.queries)
            worker->attend(row, kv * group + i % per_block / chunks, block, first);
        };
      });
    }
  return -1;
}

}  // namespace kvpress
