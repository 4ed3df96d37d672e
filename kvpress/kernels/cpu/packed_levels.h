// SPDX-License-Identifier: Apache-2.0
// Quantised keys and values, read in float32 without a decoded copy: codes of levels, and codes of numbers with float32 scales,
// which integer products would round.
#pragma once

#include "level_keys.h"
#include "level_values.h"
#include "row_scales.h"
#include "tile.h"

namespace kvpress {

// True if every channel has a scale of its own, shared by a group of rows.
inline bool by_channel(const Rows& side) { return side.group_channels == 1 && side.channels > 1; }

template <class Levels>
inline bool levels_fit(const Rows& side) {
  constexpr bool kNumbers = std::is_same_v<Levels, Numbers>;
  if (kNumbers != !side.levels || (!kNumbers && side.zero)) return false;
  return LevelKeys<Levels>::fits(side.bits, side.channels) && side.group_channels % 4 == 0;
}

template <class Levels>
inline void set_levels(const Rows& side, Levels& tables) {
  float levels[kLevels];
  for (int i = 0; i < 1 << side.bits; ++i) levels[i] = to_float(static_cast<const f16*>(side.levels)[i]);
  tables.set(0, levels, 1 << side.bits);
}
inline void set_levels(const Rows&, Numbers&) {}

// logit = sum_g scale_g (q_g . code_g) + zero_g sum(q_g) over the groups of channels. Scales per channel are folded into the
// queries instead, once for all rows that share them; there is one group then, with a scale of one.
template <class Levels>
class PackedLevelKeys {
 public:
  static constexpr int kRows = LevelKeys<Levels>::kRows;

  static bool fits(const Rows& side) {
    if (!side.zero || !by_channel(side)) return levels_fit<Levels>(side);
    Rows whole = side;
    whole.group_channels = side.channels;
    return levels_fit<Levels>(whole);
  }

  PackedLevelKeys(const PackedRows& rows, int64_t queries)
      : rows_(rows),
        queries_(int(queries)),
        channels_(int(rows.side().channels)),
        by_channel_(by_channel(rows.side())),
        width_(by_channel_ ? channels_ : int(rows.side().group_channels)),
        groups_(channels_ / width_),
        keys_(int(rows.side().bits), channels_, 1, tiles()),
        scales_(rows),
        zeros_(rows, true),
        scale_(groups_ * kRows),
        zero_(groups_ * kRows),
        of_channel_(by_channel_ ? 2 * channels_ : 0),
        quads_(tiles() * channels_),
        scaled_(by_channel_ ? tiles() * channels_ : 0),
        sums_(tiles() * groups_) {
    set_levels(rows.side(), keys_.levels());
    if (!by_channel_) return;
    std::fill_n(static_cast<float*>(scale_), kRows, 1.f);
    std::fill_n(static_cast<float*>(zero_), kRows, 1.f);
  }

  // Set queries [M, stride].
  void begin(const float* q, int stride) {
    for (int m = 0; m < queries_; ++m)
      for (int c = 0; c < channels_; ++c) quads_[m / 4 * channels_ + c][m % 4] = q[m * stride + c];
    group_ = -1;
    if (by_channel_) return;
    keys_.take(quads_, tiles());
    if (!has_zeros(rows_.side())) return;
    for (int i = 0; i < tiles() * groups_; ++i) {
      const Quad* const q = quads_ + i * width_;
      sums_[i] = sum([&](int c) { return q[c]; }, width_);
    }
  }

  // Return the number of rows that are scored at once; 0 if too few rows share a group to pay for folding its scales.
  int run(const int64_t* rows, int count, bool contiguous) const {
    count = std::min(count, kRows);
    const int run = by_channel_ ? rows_.run(rows, count, contiguous) : count;
    return run < 4 && by_channel_ ? 0 : run;
  }

  // Products with `count` rows; kRows are written per query.
  void score(const int64_t* rows, int count, float* scores, Ahead& ahead) {
    ahead.spread_lines(channels_ / 4);
    const uint8_t* codes[kRows];
    rows_.locate(rows, count, kRows, codes);
    keys_.load(codes, count);
    if (by_channel_) {
      fold(rows_.group(rows[0]));
    } else {
      scales_.read(rows, count, scale_, kRows);
      if (has_zeros(rows_.side())) zeros_.read(rows, count, zero_, kRows);
    }
    for_query_tiles(queries_, [&](auto tile, int m) {
      float* out = scores + m * kScoreStride;
      for (int i = 0; i < tile; ++i) add_zeros(sums_ + m / 4 * groups_, i, out + i * kScoreStride);
      for (int g = 0; g < groups_; ++g)
        keys_.template multiply<tile>(m / 4, g * width_, (g + 1) * width_, scale_ + g * kRows, out, kScoreStride, ahead);
    });
  }

 private:
  int tiles() const { return (queries_ + 3) / 4; }

  // Return term(0) + ... + term(count - 1), added in four independent sums; `count` is a multiple of four.
  template <class Term>
  static Quad sum(Term&& term, int count) {
    Quad sums[4] = {};
    for (int c = 0; c < count; c += 4)
      unrolled<4>([&](auto i) KVPRESS_INLINE_LAMBDA { sums[i] += term(c + i); });
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  void fold(int64_t group) {
    if (group == group_) return;
    group_ = group;
    const float* const scale = of_channels(rows_.side().scale, of_channel_);
    const float* const zero = of_channels(rows_.side().zero, of_channel_ + channels_);
    for (int tile = 0; tile < tiles(); ++tile) {
      const Quad* const q = quads_ + tile * channels_;
      Quad* const scaled = scaled_ + tile * channels_;
      sums_[tile] = sum(
          [&](int c) KVPRESS_INLINE_LAMBDA {
            scaled[c] = q[c] * scale[c];
            return q[c] * zero[c];
          },
          channels_);
    }
    keys_.take(scaled_, tiles());
  }

  // Return the scales or zeros of the current group of rows as float32, in place if they are stored so.
  const float* of_channels(const void* base, float* out) const {
    const int64_t at = group_ * channels_;
    if (rows_.side().dtype == kFloat32) return static_cast<const float*>(base) + at;
    Elements(base, rows_.side().dtype).read(at, channels_, out);
    return out;
  }

  // out[t] = sum over groups g of sums[g] of query i times the zero of row t.
  void add_zeros(const Quad* sums, int i, float* out) const {
    for (int t = 0; t < kRows; t += kLanes) {
      F total = set1(0.f);
      for (int g = 0; has_zeros(rows_.side()) && g < groups_; ++g)
        total = fma(set1(sums[g][i]), load(zero_ + g * kRows + t), total);
      store(out + t, total);
    }
  }

  const PackedRows& rows_;
  const int queries_, channels_;
  const bool by_channel_;
  const int width_, groups_;
  LevelKeys<Levels> keys_;
  const RowScales scales_, zeros_;
  Buffer<float> scale_, zero_;   // [groups, kRows]
  Buffer<float> of_channel_;     // [{scale, zero}, channels] of a group of rows
  Buffer<Quad> quads_, scaled_;  // [M / 4, channels]: queries, and queries times the scales of a group of rows
  Buffer<Quad> sums_;            // [M / 4, groups]: factors of the zeros
  int64_t group_ = -1;
};

template <class Levels>
class PackedLevelValues {
 public:
  static bool fits(const Rows& side) { return levels_fit<Levels>(side); }

  PackedLevelValues(const PackedRows& rows, int64_t queries)
      : rows_(rows),
        queries_(int(queries)),
        values_(int(rows.side().bits), int(rows.side().channels), 1),
        scales_(rows),
        zeros_(rows, true),
        scale_(rows.scales_per_row() * kChunk),
        zero_(rows.scales_per_row() * kChunk),
        weights_(4 * kScoreStride) {
    set_levels(rows.side(), values_.levels());
  }

  // acc[m, :] += sum_t weights[m, t] value_t; weights are zero from `count` to the next multiple of 32.
  void mix(const Chunk& chunk, const float* weights, float* acc, int acc_stride, Ahead& ahead) {
    const uint8_t* codes[kChunk];
    const int count = chunk.count, channels = int(rows_.side().channels), width = int(rows_.side().group_channels);
    ahead.spread_lines(channels / 4);
    rows_.locate(chunk.rows, count, round_up(count, kLanes), codes);
    values_.load(codes, count);
    scales_.read(chunk.rows, count, scale_, kChunk);
    if (has_zeros(rows_.side())) zeros_.read(chunk.rows, count, zero_, kChunk);
    for_query_tiles(queries_, [&](auto tile, int m) {
      for (int c = 0; c < channels; c += width) {
        for (int i = 0; i < tile; ++i) {
          const float* const weight = weights + (m + i) * kScoreStride;
          float* const out = acc + (m + i) * acc_stride + c;
          scale_weights(weight, scale_ + c / width * kChunk, count, weights_ + i * kScoreStride);
          if (has_zeros(rows_.side())) add_zeros(weight, zero_ + c / width * kChunk, count, out);
        }
        values_.template mix<tile>(weights_, count, c, c + width, acc + m * acc_stride, acc_stride, ahead);
      }
    });
  }

 private:
  static void scale_weights(const float* weights, const float* scale, int count, float* out) {
    for (int t = 0; t < count; t += kLanes) store(out + t, mul(load(weights + t), load(scale + t)));
  }

  // Add the weighted sum of zeros to the channels of their group.
  void add_zeros(const float* weights, const float* zero, int count, float* out) const {
    F zeros = set1(0.f);
    for (int t = 0; t < count; t += kLanes) zeros = fma(load(weights + t), load(zero + t), zeros);
    const float total = sum(zeros);
    for (int c = 0; c < rows_.side().group_channels; ++c) out[c] += total;
  }

  const PackedRows& rows_;
  const int queries_;
  LevelValues<Levels> values_;
  const RowScales scales_, zeros_;
  Buffer<float> scale_, zero_, weights_;  // [groups, kChunk] twice and [4, kScoreStride]
};

}  // namespace kvpress
