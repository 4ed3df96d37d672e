// SPDX-License-Identifier: Apache-2.0
// Quantised keys and values with the levels of e4m3 and one scale per row, read as dense rows of e4m3.
#pragma once

#include "ahead.h"
#include "row_scales.h"

namespace kvpress {

class Float8Rows {
  using Dot = FloatDot<e4m3>;

 public:
  static bool fits(const Rows& side) {
    if (!side.levels || side.zero || side.bits != 8 || side.group_channels != side.channels) return false;
    const f16* levels = static_cast<const f16*>(side.levels);
    for (int code = 0; code < 256; ++code)
      if (to_float(levels[code]) != to_float(e4m3{uint8_t(code)})) return false;
    return true;
  }

  Float8Rows(const PackedRows& rows, int64_t queries)
      : rows_(rows),
        queries_(int(queries)),
        stride_(round_up(rows.side().channels, kQueryPad)),
        scales_(rows),
        q_(queries * stride_),
        scale_(kChunk),
        weights_(queries * kScoreStride) {}

  // Set queries [M, stride].
  void begin(const float* q, int stride) {
    for (int m = 0; m < queries_; ++m) Dot::put_query(q + m * stride, int(rows_.side().channels), q_ + m * stride_);
  }

  int run(const int64_t*, int count, bool) const { return std::min(count, kTile); }

  void score(const int64_t* rows, int count, float* scores, Ahead& ahead) {
    ahead.spread_lines(count);
    score_rows<Dot>([&](int t) { return row(rows[t]); }, count, q_, stride_, queries_, int(rows_.side().channels), scores,
                    [&](int) { ahead.next_lines(); });
    rescale(rows, count, scores, scores);
  }

  // acc[m, :] += sum_t weights[m, t] value_t
  void mix(const Chunk& chunk, const float* weights, float* acc, int acc_stride, Ahead& ahead) {
    ahead.spread_lines(chunk.count);
    rescale(chunk.rows, chunk.count, weights, weights_);
    mix_rows<e4m3>([&](int t) { return row(chunk.rows[t]); }, chunk.count, weights_, queries_, int(rows_.side().channels),
                   acc, acc_stride, [&](int) { ahead.next_lines(); });
  }

 private:
  // to[m, t] = from[m, t] times the scale of row t, and times kE4m3Unit, by which loading divides.
  void rescale(const int64_t* rows, int count, const float* from, float* to) {
    scales_.read(rows, count, scale_, kChunk);
    for (int t = 0; t < count; t += kLanes) {
      const F unit = mul(load(scale_ + t), set1(kE4m3Unit));
      for (int at = t, m = 0; m < queries_; ++m, at += kScoreStride) store(to + at, mul(load(from + at), unit));
    }
  }

  const e4m3* row(int64_t number) const { return reinterpret_cast<const e4m3*>(rows_.codes(number)); }

  const PackedRows& rows_;
  const int queries_, stride_;
  const RowScales scales_;
  Buffer<float> q_, scale_, weights_;  // [M, stride], [kChunk] and [M, kScoreStride]
};

}  // namespace kvpress
