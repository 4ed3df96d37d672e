// SPDX-License-Identifier: Apache-2.0
// Reads keys and values stored as float32, bfloat16 or float16 rows.
#pragma once

#include "attend.h"

namespace kvpress {

template <class Dot>
class DenseReader {
  using T = typename Dot::Key;

 public:
  explicit DenseReader(const Problem& p)
      : p_(p),
        stride_(round_up(p.keys.channels, kQueryPad)),
        ahead_(rows_ahead(p.keys.channels * sizeof(T))),
        burst_(burst_of_listed((p.keys.channels + p.values.channels) * sizeof(T))),
        queries_(p.queries * stride_) {}

  void begin(const float* q) {
    pad_queries<Dot>(q, p_.queries, p_.keys.channels, queries_, stride_);
  }

  static bool stores(const Chunk&) { return true; }  // attend_all has checked the rows

  void score(const Chunk& chunk, float* scores) {
    score_rows<Dot>([&](int t) { return row(p_.keys, chunk.rows[t]); }, chunk.count, queries_, stride_, int(p_.queries),
                    int(p_.keys.channels), scores, [&](int t) {
                      if (chunk.contiguous)
                        prefetch(p_.keys, chunk, t + ahead_);
                      else if (t % burst_.rows == 0)
                        burst_.ahead ? prefetch_pairs<false>(chunk, t + burst_.ahead) : prefetch_pairs<true>(chunk, t);
                    });
  }

  void mix(const Chunk& chunk, const float* weights, float* acc, int acc_stride) {
    mix_rows<T>([&](int t) { return row(p_.values, chunk.rows[t]); }, chunk.count, weights, int(p_.queries),
                int(p_.values.channels), acc, acc_stride, [&](int t) {
                  if (chunk.contiguous) prefetch(p_.values, chunk, t + ahead_);
                });
  }

 private:
  static const T* row(const Rows& rows, int64_t r) { return static_cast<const T*>(rows.data) + r * rows.stride; }

  template <bool kNear = false>
  static void prefetch(const Rows& rows, const Chunk& chunk, int t) {
    if (t < chunk.known) prefetch_row<kNear>(row(rows, chunk.rows[t]), rows.channels * sizeof(T));
  }

  // Listed rows are far apart, so their values are prefetched while the keys are still being read.
  template <bool kNear>
  void prefetch_pairs(const Chunk& chunk, int first) const {
    for (int t = first; t < first + burst_.rows; ++t) {
      prefetch<kNear>(p_.keys, chunk, t);
      prefetch<kNear>(p_.values, chunk, t);
    }
  }

  const Problem& p_;
  const int stride_, ahead_;
  const Burst burst_;
  Buffer<typename Dot::Query> queries_;
};

}  // namespace kvpress
