// SPDX-License-Identifier: Apache-2.0
// Reads quantised keys and values: directly from codes if a kernel fits their format, else through a small float32 tile.
#pragma once

#include "ahead.h"
#include "corrector.h"
#include "dense_reader.h"
#include "integer_keys.h"
#include "integer_values.h"
#include "packed_float8.h"
#include "packed_levels.h"
#include "variants.h"

namespace kvpress {

// A key kernel has begin(queries, stride); run(rows, count, contiguous), the number of leading rows that it scores at once; and
// score(rows, count, scores, ahead). A value kernel has mix(chunk, weights, acc, acc_stride, ahead). Both advance the prefetch
// range `ahead` as they go.
using KeyKernel = std::variant<std::monostate,
#if defined(KVPRESS_INTEGERS)
                               IntegerKeys,
#endif
#if defined(KVPRESS_WHOLE_LEVELS)
                               PackedLevelKeys<WholeLevels>,
#endif
                               PackedLevelKeys<Tables>, PackedLevelKeys<Numbers>, Float8Rows>;
using ValueKernel = std::variant<std::monostate,
#if defined(KVPRESS_INTEGERS)
                                 IntegerValues,
#endif
#if defined(KVPRESS_WHOLE_LEVELS)
                                 PackedLevelValues<WholeLevels>,
#endif
                                 PackedLevelValues<Tables>, PackedLevelValues<Numbers>, Float8Rows>;

// True for kernels that round values which others read exactly.
template <class Kernel>
constexpr bool kRounds = false;
#if defined(KVPRESS_WHOLE_LEVELS)
template <>
constexpr bool kRounds<PackedLevelKeys<WholeLevels>> = true;
template <>
constexpr bool kRounds<PackedLevelValues<WholeLevels>> = true;
#endif

// Set `kernel` to the first kernel that fits the rows, if there is one. `exact` excludes kernels that round.
template <class... Kernels>
void choose(std::variant<std::monostate, Kernels...>& kernel, const PackedRows& rows, int64_t queries, bool exact) {
  const auto put = [&](auto* none) {
    using Kernel = std::remove_pointer_t<decltype(none)>;
    if (kernel.index() != 0 || (exact && kRounds<Kernel>)) return;
    if (Kernel::fits(rows.side())) kernel.template emplace<Kernel>(rows, queries);
  };
  (put(static_cast<Kernels*>(nullptr)), ...);
}

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
    choose(key_kernel_, keys_, p.queries, p.exact);
    choose(value_kernel_, values_, p.queries, p.exact);
  }

  void begin(const float* q) {
    pad_queries<FloatDot<float>>(q, p_.queries, p_.keys.channels, queries_, stride_);
    with(key_kernel_, [&](auto& kernel) { kernel.begin(queries_, stride_); });
    key_terms_.begin(queries_, stride_);
    asked_ = false;
  }

  bool stores(const Chunk& chunk) const {
    return keys_.stores(chunk.rows, chunk.count) && values_.stores(chunk.rows, chunk.count) &&
           key_terms_.stores(chunk) && value_terms_.stores(chunk);
  }

  // Keys are scored while their values are prefetched; mix() prefetches the keys of the next chunk.
  void score(const Chunk& chunk, float* scores) {
    const int64_t* rows = chunk.rows;
    const int count = chunk.count;
    for (int t = 0; t < count;) {
      int run = 0, end = t;
      while (end < count && end - t < kTile && (run = codes_run(chunk, end)) == 0) ++end;
      const int size = end + run - t;
      const int64_t* const later = rows + t + kAheadCoded;
      const int more = std::min(size, chunk.known - t - kAheadCoded);
      if (!asked_) keys_.prefetch_codes(later, more, chunk.contiguous);
      keys_.prefetch_scales(later, more);
      values_.prefetch_scales(rows + t, size);
      if (!chunk.contiguous) values_.prefetch_codes(rows + t, size, false);
      ahead_ = stretch(values_, rows[t], chunk.contiguous ? size : 0);
      if (end > t) score_tile(rows + t, end - t, scores + t);
      if (run > 0) score_codes(rows + end, run, scores + end);
      ahead_.rest();
      t = end + run;
    }
    scale_rows(chunk, scores);
    key_terms_.score(chunk, scores);
  }

  void mix(const Chunk& chunk, const float* weights, float* acc, int acc_stride) {
    value_terms_.mix(chunk, weights, acc, acc_stride);
    asked_ = chunk.contiguous && chunk.next > 0;
    const int64_t last = chunk.rows[chunk.count - 1];
    ahead_ = asked_ ? stretch(keys_, last + 1, chunk.next) : stretch(keys_, last, 0);
    if (!with(value_kernel_, [&](auto& kernel) { kernel.mix(chunk, weights, acc, acc_stride, ahead_); }))
      mix_tiles(chunk, weights, acc, acc_stride);
    ahead_.rest();
  }

 private:
  // Prefetch range of the codes of consecutive rows.
  static Ahead stretch(const PackedRows& rows, int64_t first, int count) {
    return Ahead(rows.codes(first), count * rows.side().stride);
  }

  void mix_tiles(const Chunk& chunk, const float* weights, float* acc, int acc_stride) {
    ahead_.spread_lines(chunk.count);
    for (int t = 0; t < chunk.count; t += kTile) {
      const int size = std::min(kTile, chunk.count - t);
      for (int i = 0; i < size; ++i) values_.decode(chunk.rows[t + i], tile_ + i * tile_stride_);
      mix_rows<float>([&](int i) { return tile_ + i * tile_stride_; }, size, weights + t, int(p_.queries),
                      int(p_.values.channels), acc, acc_stride, [&](int) { ahead_.next_lines(); });
    }
  }

  // Multiply the products of each key by its row scale.
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

  // Return the number of rows from row t on that are scored directly from codes.
  int codes_run(const Chunk& chunk, int t) {
    int run = 0;
    with(key_kernel_, [&](auto& kernel) { run = kernel.run(chunk.rows + t, chunk.count - t, chunk.contiguous); });
    return run;
  }

  void score_codes(const int64_t* rows, int count, float* scores) {
    with(key_kernel_, [&](auto& kernel) { kernel.score(rows, count, scores, ahead_); });
  }

  void score_tile(const int64_t* rows, int count, float* scores) {
    ahead_.spread_lines(count);
    for (int i = 0; i < count; ++i) keys_.decode(rows[i], tile_ + i * tile_stride_);
    score_rows<FloatDot<float>>([&](int i) { return tile_ + i * tile_stride_; }, count, queries_, stride_,
                                int(p_.queries), int(p_.keys.channels), scores, [&](int) { ahead_.next_lines(); });
  }

  const Problem& p_;
  const PackedRows keys_, values_;
  Corrector key_terms_, value_terms_;
  const int stride_, tile_stride_;
  Buffer<float> queries_, tile_;
  KeyKernel key_kernel_;
  ValueKernel value_kernel_;
  Ahead ahead_;
  bool asked_ = false;  // the keys of the chunk are already prefetched
};

}  // namespace kvpress
