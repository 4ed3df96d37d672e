// SPDX-License-Identifier: Apache-2.0
// Quantised keys and values whose codes stand for levels, with scales per row and group of channels.
#pragma once

#include "level_keys.h"
#include "level_values.h"
#include "row_scales.h"

namespace kvpress {

inline bool levels_fit(const Rows& side) {
  return side.levels && !side.zero && side.group_channels % 4 == 0 && CodeColumns::fits(side.bits, side.channels);
}

inline void set_levels(const Rows& side, LevelTables& tables) {
  float levels[kLevels];
  for (int i = 0; i < 1 << side.bits; ++i) levels[i] = to_float(static_cast<const f16*>(side.levels)[i]);
  tables.set(0, levels, 1 << side.bits, int(side.bits));
}

class PackedLevelKeys {
 public:
  static constexpr int kRows = LevelKeys::kRows;

  PackedLevelKeys(const PackedRows& rows, int64_t queries)
      : rows_(rows),
        queries_(int(queries)),
        channels_(int(rows.side().channels)),
        keys_(int(rows.side().bits), channels_, 1),
        scales_(rows),
        scale_(rows.scales_per_row() * kRows),
        by_channel_(round_up(queries, 4) * channels_) {
    set_levels(rows.side(), keys_.tables());
  }

  // Queries [M, stride].
  void begin(const float* q, int stride) {
    for (int m = 0; m < queries_; ++m)
      for (int c = 0; c < channels_; ++c) by_channel_[(m / 4 * channels_ + c) * 4 + m % 4] = q[m * stride + c];
  }

  // Products with up to kRows rows; kRows are written per query.
  void score(const int64_t* rows, int count, float* scores) {
    const uint8_t* codes[kRows];
    rows_.locate(rows, count, kRows, codes);
    keys_.load(codes, count);
    scales_.read(rows, count, scale_, kRows);
    const int width = int(rows_.side().group_channels);
    for_query_tiles(queries_, [&](auto tile, int m) {
      float* out = scores + m * kScoreStride;
      for (int i = 0; i < tile; ++i) std::fill_n(out + i * kScoreStride, kRows, 0.f);
      for (int c = 0; c < channels_; c += width)
        keys_.multiply<tile>(by_channel_ + m * channels_, c, c + width, scale_ + c / width * kRows, out, kScoreStride);
    });
  }

 private:
  const PackedRows& rows_;
  const int queries_, channels_;
  LevelKeys keys_;
  const RowScales scales_;
  Buffer<float> scale_, by_channel_;  // [groups, kRows] and [M / 4, channels, 4]
};

class PackedLevelValues {
 public:
  PackedLevelValues(const PackedRows& rows, int64_t queries)
      : rows_(rows),
        queries_(int(queries)),
        values_(int(rows.side().bits), int(rows.side().channels), 1),
        scales_(rows),
        scale_(rows.scales_per_row() * kChunk),
        weights_(4 * kScoreStride) {
    set_levels(rows.side(), values_.tables());
  }

  // acc[m, :] += sum_t weights[m, t] value_t; weights are zero from `count` to the next multiple of 32.
  void mix(const Chunk& chunk, const float* weights, float* acc, int acc_stride) {
    const uint8_t* codes[kChunk];
    const int count = chunk.count, channels = int(rows_.side().channels), width = int(rows_.side().group_channels);
    rows_.locate(chunk.rows, count, round_up(count, kLanes), codes);
    values_.load(codes, count);
    scales_.read(chunk.rows, count, scale_, kChunk);
    for_query_tiles(queries_, [&](auto tile, int m) {
      for (int c = 0; c < channels; c += width) {
        const float* scale = scale_ + c / width * kChunk;
        for (int i = 0; i < tile; ++i)
          for (int t = 0; t < count; t += kLanes)
            store(weights_ + i * kScoreStride + t, mul(load(weights + (m + i) * kScoreStride + t), load(scale + t)));
        values_.mix<tile>(weights_, count, c, c + width, acc + m * acc_stride, acc_stride);
      }
    });
  }

 private:
  const PackedRows& rows_;
  const int queries_;
  LevelValues values_;
  const RowScales scales_;
  Buffer<float> scale_, weights_;  // [groups, kChunk] and [4, kScoreStride]
};

}  // namespace kvpress
