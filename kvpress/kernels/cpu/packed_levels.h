// SPDX-License-Identifier: Apache-2.0
// Quantised keys and values whose codes stand for levels, with scales per row and group of channels.
#pragma once

#include "codes.h"
#include "level_keys.h"
#include "level_values.h"

namespace kvpress {

// Scales of rows as float32 by group: [groups, stride].
class RowScales {
 public:
  explicit RowScales(const PackedRows& rows)
      : rows_(rows), groups_(int(rows.scales_per_row())) {}

  void read(const int64_t* rows, int count, float* out, int stride) const {
    switch (rows_.side().dtype) {
      case kFloat16:
        return read(static_cast<const f16*>(rows_.side().scale), rows, count, out, stride);
      case kFloat8:
        return read(static_cast<const e4m3*>(rows_.side().scale), rows, count, out, stride);
      case kPower:
        return read(static_cast<const e8m0*>(rows_.side().scale), rows, count, out, stride);
      default:
        read(static_cast<const float*>(rows_.side().scale), rows, count, out, stride);
    }
  }

 private:
  template <class S>
  void read(const S* scale, const int64_t* rows, int count, float* out, int stride) const {
    if constexpr (sizeof(S) == 1) return read_bytes(scale, rows, count, out, stride);
    for (int t = 0; t < count; ++t) {
      const S* from = scale + rows_.group(rows[t]) * groups_;
      for (int g = 0; g < groups_; ++g) out[g * stride + t] = to_float(from[g]);
    }
  }

  // Four scales of a row are a word.
  template <class S>
  void read_bytes(const S* scale, const int64_t* rows, int count, float* out, int stride) const {
    const int padded = round_up(count, kLanes);
    const uint8_t *from[kChunk], *base = reinterpret_cast<const uint8_t*>(scale);
    if (rows_.side().group_rows == 1)
      for (int t = 0; t < count; ++t) from[t] = base + rows[t] * groups_;
    else
      for (int t = 0; t < count; ++t) from[t] = base + rows_.group(rows[t]) * groups_;
    for (int t = count; t < padded; ++t) from[t] = from[count - 1];
    for (int t = 0; t < padded; t += kLanes)
      for (int at = 0; at < groups_; at += 16) {
        Words column[4];
        transpose_rows(from + t, at, groups_ - at, column);
        for (int g = at; g < std::min(at + 16, groups_); ++g)
          store(out + g * stride + t, wide(S{}, column[(g - at) / 4] >> 8 * (g % 4) & 255));
      }
  }

  static KVPRESS_INLINE F wide(e8m0, Words bits) { return (F)(bits << 23 | ((bits == 0) & 0x00400000)); }
  static KVPRESS_INLINE F wide(e4m3, Words bits) {
    const Words normal = (bits & 127) + (120 << 3) << 20, small = (Words)(__builtin_convertvector(bits & 7, Floats) * 0x1p-9f);
    const Words subnormal = (bits & 0x78) == 0;
    return (F)((subnormal & small) | (~subnormal & normal) | bits >> 7 << 31);
  }

  const PackedRows& rows_;
  const int groups_;
};

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
