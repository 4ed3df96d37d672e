// SPDX-License-Identifier: Apache-2.0
// Low-rank terms and outliers of one side, added to logits and outputs directly: no corrected row is ever built.
#pragma once

#include "buffer.h"
#include "dense.h"

namespace kvpress {

class Corrector {
 public:
  Corrector(const Rows& side, int64_t queries)
      : terms_(side.correction),
        channels_(int(side.channels)),
        queries_(int(queries)),
        rank_(int(terms_.rank)),
        factors_(rank_ * kChunk),
        products_(rank_ ? queries * kScoreStride : 0),
        owner_(terms_.first ? kTile * (channels_ + 1) : 0),
        entry_(terms_.first ? kTile * (channels_ + 1) : 0) {}

  // Queries float32 [M, stride], zero padded; needed by score() only.
  void begin(const float* q, int stride) {
    q_ = q;
    stride_ = stride;
    projected_ = -1;
  }

  // Whether all bases, outliers and channels that the rows refer to exist.
  bool stores(const Chunk& chunk) const {
    if (terms_.factor)
      for (int t = 0; t < chunk.count; ++t)
        if (uint32_t(terms_.chunk[chunk.rows[t]]) >= terms_.bases) return false;
    if (!terms_.first) return true;
    for (int t = 0; t < chunk.count; ++t) {
      const int64_t begin = first(chunk, t), end = last(chunk, t);
      if (begin < 0 || end < begin || end > terms_.outliers || end - begin > channels_) return false;
    }
    uint8_t largest = 0;
    for (int t = 0, step = chunk.contiguous ? chunk.count : 1; t < chunk.count; t += step)
      for (int32_t i = first(chunk, t); i < last(chunk, t + step - 1); ++i)
        largest = std::max(largest, terms_.channel[i]);
    return largest < channels_;
  }

  // scores[m, t] += q_m . (terms of row t)
  void score(const Chunk& chunk, float* scores) {
    if (terms_.factor)
      typed(terms_.basis, terms_.factor_dtype, [&](auto* basis) { score_low_rank(basis, chunk, scores); });
    if (terms_.first)
      typed(terms_.delta, terms_.delta_dtype, [&](auto* delta) { score_outliers(delta, chunk, scores); });
  }

  // acc[m, :] += sum over t of weights[m, t] * (terms of row t)
  void mix(const Chunk& chunk, const float* weights, float* acc, int acc_stride) {
    if (terms_.factor)
      typed(terms_.basis, terms_.factor_dtype,
            [&](auto* basis) { mix_low_rank(basis, chunk, weights, acc, acc_stride); });
    if (terms_.first)
      typed(terms_.delta, terms_.delta_dtype,
            [&](auto* delta) { mix_outliers(delta, chunk, weights, acc, acc_stride); });
  }

 private:
  template <class Step>
  static void typed(const void* data, int64_t dtype, Step&& step) {
    dtype == kFloat16 ? step(static_cast<const f16*>(data)) : step(static_cast<const float*>(data));
  }

  // q . (factor basis) = factor . (q basis): the product with the basis is made once for all rows that share it.
  template <class T>
  void score_low_rank(const T* basis, const Chunk& chunk, float* scores) {
    for_runs(basis, chunk, [&](int32_t id, auto row, int first, int count) {
      if (id != projected_)
        score_rows<FloatDot<T>>(row, rank_, q_, stride_, queries_, channels_, products_, [](int) {});
      projected_ = id;
      for (int m = 0; m < queries_; ++m)
        for (int t = 0; t < count; t += kLanes) {
          float* out = scores + m * kScoreStride + first + t;
          F sum = load(out);
          for (int k = 0; k < rank_; ++k)
            sum = fma(set1(products_[m * kScoreStride + k]), load(factors_ + k * kChunk + t), sum);
          store(out, sum);
        }
    });
  }

  template <class T>
  void mix_low_rank(const T* basis, const Chunk& chunk, const float* weights, float* acc, int acc_stride) {
    for_runs(basis, chunk, [&](int32_t, auto row, int first, int count) {
      for (int m = 0; m < queries_; ++m) {
        const float* weight = weights + m * kScoreStride + first;
        for (int k = 0; k < rank_; ++k) {
          F total = set1(0.f);
          for (int t = 0; t < count; t += kLanes) {
            const F w = count - t < kLanes ? load_part(weight + t, count - t) : load(weight + t);
            total = fma(w, load(factors_ + k * kChunk + t), total);
          }
          products_[m * kScoreStride + k] = sum(total);
        }
      }
      mix_rows<T>(row, rank_, products_, queries_, channels_, acc, acc_stride, [](int) {});
    });
  }

  // Calls step(basis id, its rows by number, first row, rows) for each run of rows with one basis. Their factors are in
  // factors_ [rank, kChunk] then, zero padded to a whole vector.
  template <class T, class Step>
  void for_runs(const T* basis, const Chunk& chunk, Step&& step) {
    const T* factor = static_cast<const T*>(terms_.factor);
    for (int t = 0, end; t < chunk.count; t = end) {
      const int32_t id = terms_.chunk[chunk.rows[t]];
      for (end = t + 1; end < chunk.count && terms_.chunk[chunk.rows[end]] == id;) ++end;
      const int count = end - t;
      for (int k = 0; k < rank_; ++k) {
        float* out = factors_ + k * kChunk;
        for (int i = 0; i < count; ++i) out[i] = to_float(factor[chunk.rows[t + i] * rank_ + k]);
        std::fill(out + count, out + round_up(count, kLanes), 0.f);
      }
      const T* first = basis + int64_t(id) * rank_ * channels_;
      step(id, [=](int k) { return first + k * channels_; }, t, count);
    }
  }

  template <class T>
  void score_outliers(const T* delta, const Chunk& chunk, float* scores) {
    const int stride = stride_;
    for_outliers(delta, chunk, [&](auto tile, int m, int t, int channel, float value) KVPRESS_INLINE_LAMBDA {
      const float* q = q_ + m * stride + channel;
      float* out = scores + m * kScoreStride + t;
      unrolled<tile>([&](auto i) KVPRESS_INLINE_LAMBDA { out[i * kScoreStride] += q[i * stride] * value; });
    });
  }

  template <class T>
  void mix_outliers(const T* delta, const Chunk& chunk, const float* weights, float* acc, int acc_stride) {
    for_outliers(delta, chunk, [&](auto tile, int m, int t, int channel, float value) KVPRESS_INLINE_LAMBDA {
      const float* weight = weights + m * kScoreStride + t;
      float* out = acc + m * acc_stride + channel;
      unrolled<tile>([&](auto i) KVPRESS_INLINE_LAMBDA { out[i * acc_stride] += weight[i * kScoreStride] * value; });
    });
  }

  // Calls step(queries at once, first query, row, channel, value) for every outlier. Those of a few rows are listed
  // first: a loop over the two or three of each row would be mispredicted at its end every time.
  template <class T, class Step>
  void for_outliers(const T* delta, const Chunk& chunk, Step&& step) {
    for (int begin = 0; begin < chunk.count; begin += kTile) {
      const int count = list_outliers(chunk, begin, std::min(begin + kTile, chunk.count));
      for_query_tiles(queries_, [&](auto tile, int m) {
        for (int i = 0; i < count; ++i)
          step(tile, m, owner_[i], terms_.channel[entry_[i]], to_float(delta[entry_[i]]));
      });
    }
  }

  // Rows and places of the outliers of the rows from `begin` to `end`; returns how many there are.
  int list_outliers(const Chunk& chunk, int begin, int end) {
    constexpr int kStep = 8;  // entries written at once, for speed, even if fewer are needed
    int32_t *owner = owner_, *entry = entry_;
    int count = 0;
    for (int t = begin; t < end; ++t) {
      const int32_t at = first(chunk, t), size = last(chunk, t) - at;
      int i = 0;
      do {
        std::fill_n(owner + count + i, kStep, t);
        for (int j = 0; j < kStep; ++j) entry[count + i + j] = at + i + j;
      } while ((i += kStep) < size);
      count += size;
    }
    return count;
  }

  int32_t first(const Chunk& chunk, int t) const { return terms_.first[chunk.rows[t]]; }
  int32_t last(const Chunk& chunk, int t) const { return terms_.first[chunk.rows[t] + 1]; }

  const Correction& terms_;
  const int channels_, queries_, rank_;
  const float* q_ = nullptr;
  int stride_ = 0;
  int64_t projected_ = -1;  // the basis whose product with the queries is in products_
  Buffer<float> factors_, products_;
  Buffer<int32_t> owner_, entry_;
};

}  // namespace kvpress
