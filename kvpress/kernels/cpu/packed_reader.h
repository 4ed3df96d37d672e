// SPDX-License-Identifier: Apache-2.0
// Reads quantised keys and values: on codes where the integer kernels or those for levels fit, through a small float32 tile
// otherwise.
#pragma once

#include <optional>

#include "corrector.h"
#include "dense_reader.h"
#include "int8_keys.h"
#include "int8_values.h"
#include "packed_float8.h"
#include "packed_levels.h"

namespace kvpress {

class PackedReader {
 public:
  explicit PackedReader(const Problem& p)
      : p_(p),
        keys_(p.keys),
        values_(p.values),
        key_terms_(p.keys, p.queries),
        value_terms_(p.values, p.queries),
        stride_(round_up(p.keys.channels, kQueryPad)),
        tile_stride_(round_up(std::max(p.keys.channels, p.values.channels), 16)),
        queries_(p.queries * stride_),
        tile_(kTile * tile_stride_) {
    if (levels_fit(p.keys)) level_keys_.emplace(keys_, p.queries);
    if (levels_fit(p.values)) level_values_.emplace(values_, p.queries);
    if (float8_fits(p.keys)) float8_keys_.emplace(keys_, p.queries);
    if (float8_fits(p.values)) float8_values_.emplace(values_, p.queries);
#if defined(KVPRESS_INT8)
    if (Int8Keys::fits(p.keys)) int8_keys_.emplace(keys_, p.queries, stride_);
    if (Int8Values::fits(p.values)) int8_values_.emplace(values_, p.queries);
#endif
  }

  void begin(const float* q) {
    pad_queries(q, p_.queries, p_.keys.channels, static_cast<float*>(queries_), stride_);
#if defined(KVPRESS_INT8)
    if (int8_keys_) int8_keys_->begin(queries_);
#endif
    if (level_keys_) level_keys_->begin(queries_, stride_);
    key_terms_.begin(queries_, stride_);
  }

  bool stores(const Chunk& chunk) const {
    return keys_.stores(chunk.rows, chunk.count) && values_.stores(chunk.rows, chunk.count) &&
           key_terms_.stores(chunk) && value_terms_.stores(chunk);
  }

  void score(const Chunk& chunk, float* scores) {
    const int64_t* rows = chunk.rows;
    const int count = chunk.count;
    for (int t = 0; t < count;) {
      int run = 0, end = t;
      while (end < count && end - t < kTile && (run = codes_run(chunk, end)) == 0) ++end;
      const int size = end + run - t;
      keys_.prefetch(rows + t + kAheadCoded, std::min(size, chunk.known - t - kAheadCoded), chunk.contiguous);
      values_.prefetch(rows + t, size, chunk.contiguous);
      if (end > t) score_tile(rows + t, end - t, scores + t);
      if (run > 0) score_codes(rows + end, run, scores + end);
      t = end + run;
    }
    scale_rows(chunk, scores);
    key_terms_.score(chunk, scores);
  }

  void mix(const Chunk& chunk, const float* weights, float* acc, int acc_stride) {
    value_terms_.mix(chunk, weights, acc, acc_stride);
    if (level_values_) return level_values_->mix(chunk, weights, acc, acc_stride);
    if (float8_values_) return float8_values_->mix(chunk, weights, acc, acc_stride);
#if defined(KVPRESS_INT8)
    if (int8_values_) return int8_values_->mix(chunk, weights, acc, acc_stride);
#endif
    for (int t = 0; t < chunk.count; t += kTile) {
      const int size = std::min(kTile, chunk.count - t);
      for (int i = 0; i < size; ++i) values_.decode(chunk.rows[t + i], tile_ + i * tile_stride_);
      mix_rows<float>([&](int i) { return tile_ + i * tile_stride_; }, size, weights + t, int(p_.queries),
                      int(p_.values.channels), acc, acc_stride, [](int) {});
    }
  }

 private:
  // Multiply the products with each key by its own factor.
  void scale_rows(const Chunk& chunk, float* scores) const {
    const auto scale = [&](const auto* factors) {
      for (int t = 0; t < chunk.count; ++t) {
        const float factor = to_float(factors[chunk.rows[t]]);
        for (int64_t m = 0; m < p_.queries; ++m) scores[m * kScoreStride + t] *= factor;
      }
    };
    if (!p_.keys.row_scale) return;
    if (p_.keys.row_dtype == kFloat32) return scale(static_cast<const float*>(p_.keys.row_scale));
    if (p_.keys.row_dtype == kFloat16) return scale(static_cast<const f16*>(p_.keys.row_scale));
    scale(static_cast<const bf16*>(p_.keys.row_scale));
  }

  // How many rows from row t on are scored by their codes: those of levels, and runs of one group whose scales pay for being
  // folded into the queries.
  int codes_run(const Chunk& chunk, int t) const {
    if (level_keys_) return std::min(chunk.count - t, PackedLevelKeys::kRows);
    if (float8_keys_) return std::min(chunk.count - t, Float8Rows::kRows);
#if defined(KVPRESS_INT8)
    if (!int8_keys_) return 0;
    if (Int8Keys::by_row(p_.keys)) return std::min(chunk.count - t, kTile);
    const int run = keys_.run(chunk.rows + t, std::min(chunk.count - t, kTile), chunk.contiguous);
    return run < 4 ? 0 : run;
#else
    return 0;
#endif
  }

  void score_codes(const int64_t* rows, int count, float* scores) {
    if (level_keys_) return level_keys_->score(rows, count, scores);
    if (float8_keys_) return float8_keys_->score(rows, count, queries_, stride_, scores);
#if defined(KVPRESS_INT8)
    int8_keys_->score(keys_.group(rows[0]), rows, count, scores);
#endif
  }

  void score_tile(const int64_t* rows, int count, float* scores) {
    for (int i = 0; i < count; ++i) keys_.decode(rows[i], tile_ + i * tile_stride_);
    score_rows<FloatDot<float>>([&](int i) { return tile_ + i * tile_stride_; }, count, queries_, stride_,
                                int(p_.queries), int(p_.keys.channels), scores, [](int) {});
  }

  const Problem& p_;
  const PackedRows keys_, values_;
  Corrector key_terms_, value_terms_;
  const int stride_, tile_stride_;
  Buffer<float> queries_, tile_;
  std::optional<PackedLevelKeys> level_keys_;
  std::optional<PackedLevelValues> level_values_;
  std::optional<Float8Rows> float8_keys_, float8_values_;
#if defined(KVPRESS_INT8)
  std::optional<Int8Keys> int8_keys_;
  std::optional<Int8Values> int8_values_;
#endif
};

}  // namespace kvpress
