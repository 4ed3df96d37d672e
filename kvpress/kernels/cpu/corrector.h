// SPDX-License-Identifier: Apache-2.0
// Low-rank terms and outliers of one side, added to logits and outputs directly: no corrected row is built.
//
// An outlier is one channel of one row. It is applied to four queries at once, so the numbers of four queries are stored side
// by side.
#pragma once

#include "buffer.h"
#include "dense.h"
#include "outliers.h"

namespace kvpress {

class Corrector {
 public:
  Corrector(const Rows& side, int64_t queries)
      : terms_(side.correction),
        channels_(int(side.channels)),
        queries_(int(queries)),
        rank_(int(terms_.rank)),
        factors_(rank_ * kChunk),
        loaded_(rank_ * kChunk),
        products_(rank_ ? queries * kScoreStride : 0),
        outliers_(terms_, channels_),
        channel_fours_(outliers_.none() ? 0 : fours() * channels_),
        row_fours_(outliers_.none() ? 0 : kChunk) {}

  // Set queries float32 [M, stride], zero-padded; needed by score() only.
  void begin(const float* q, int stride) {
    q_ = q;
    stride_ = stride;
    projected_ = -1;
    for (int b = 0; !outliers_.none() && b < fours(); ++b) beside(q, stride, 4 * b, channels_, channel_fours_ + b * channels_);
  }

  // Return whether all bases, outliers and channels of the rows exist.
  bool stores(const Chunk& chunk) const {
    if (terms_.factor) {
      uint32_t basis = 0;
      for_rows(chunk, 0, chunk.count, [&](int, int64_t row) { basis = std::max(basis, uint32_t(terms_.chunk[row])); });
      if (basis >= terms_.bases) return false;
    }
    return outliers_.stores(chunk.rows, chunk.count, chunk.contiguous);
  }

  // scores[m, t] += q_m . (terms of row t)
  void score(const Chunk& chunk, float* scores) {
    prefetch(chunk);
    if (terms_.factor)
      typed(terms_.basis, terms_.factor_dtype, [&](auto* basis) { score_low_rank(basis, chunk, scores); });
    if (!outliers_.none()) score_outliers(chunk, scores);
  }

  // acc[m, :] += sum over t of weights[m, t] * (terms of row t)
  void mix(const Chunk& chunk, const float* weights, float* acc, int acc_stride) {
    prefetch(chunk);
    if (terms_.factor)
      typed(terms_.basis, terms_.factor_dtype,
            [&](auto* basis) { mix_low_rank(basis, chunk, weights, acc, acc_stride); });
    if (!outliers_.none()) mix_outliers(chunk, weights, acc, acc_stride);
  }

 private:
  // Prefetch the terms of as many rows after the chunk; a prefetch past the last row is harmless.
  void prefetch(const Chunk& chunk) const {
    if (!chunk.contiguous) return;
    const int64_t next = chunk.rows[0] + chunk.count, count = chunk.count;
    const auto ahead = [](const void* data, int64_t from, int64_t size, int64_t width) {
      prefetch_row(static_cast<const char*>(data) + from * width, size * width);
    };
    if (terms_.factor) {
      ahead(terms_.factor, next, count, rank_ * width(terms_.factor_dtype));
      ahead(terms_.chunk, next, count, sizeof(int32_t));
    }
    if (!outliers_.none()) {
      const int64_t begin = outliers_.first(chunk.rows[0]), end = outliers_.first(next);
      ahead(terms_.first, next, count, sizeof(int32_t));
      ahead(terms_.channel, end, end - begin, 1);
      ahead(terms_.delta, end, end - begin, width(terms_.delta_dtype));
    }
  }

  static int64_t width(int64_t dtype) { return dtype == kFloat16 ? 2 : 4; }

  // q . (factor basis) = factor . (q basis): the product with the basis is computed once for all rows that share it.
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

  // Call step(basis id, basis rows by index, first row, number of rows) for each run of rows with one basis. Their factors are
  // then in factors_ [rank, kChunk], zero-padded to a full vector.
  template <class T, class Step>
  void for_runs(const T* basis, const Chunk& chunk, Step&& step) {
    for (int t = 0, end; t < chunk.count; t = end) {
      const int32_t id = terms_.chunk[chunk.rows[t]];
      end = run(chunk, t, id);
      const int count = end - t;
      read_factors<T>(chunk, t, count);
      const T* first = basis + int64_t(id) * rank_ * channels_;
      step(id, [=](int k) { return first + k * channels_; }, t, count);
    }
  }

  // Return the end of the run of rows with basis `id` that begins at t; usually it has all rows.
  int run(const Chunk& chunk, int t, int32_t id) const {
    int32_t other = 0;
    for_rows(chunk, t, chunk.count, [&](int, int64_t row) { other |= terms_.chunk[row] ^ id; });
    if (!other) return chunk.count;
    while (++t < chunk.count && terms_.chunk[chunk.rows[t]] == id) {}
    return t;
  }

  template <class T>
  void read_factors(const Chunk& chunk, int t, int count) {
    const T* from = static_cast<const T*>(terms_.factor);
    if (chunk.contiguous) {
      const T* first = from + chunk.rows[t] * rank_;
      const int size = count * rank_;
      int i = 0;
      for (; i + kLanes <= size; i += kLanes) store(loaded_ + i, load(first + i));
      for (; i < size; ++i) loaded_[i] = to_float(first[i]);
    } else {
      for (int i = 0; i < count; ++i)
        for (int k = 0; k < rank_; ++k) loaded_[i * rank_ + k] = to_float(from[chunk.rows[t + i] * rank_ + k]);
    }
    // With a constant rank, compilers turn the loops into shuffles.
    if (rank_ == 2) return transpose<2>(count);
    if (rank_ == 4) return transpose<4>(count);
    if (rank_ == 8) return transpose<8>(count);
    transpose<0>(count);
  }

  template <int kRank>
  void transpose(int count) {
    const int rank = kRank ? kRank : rank_;
    const float* const from = loaded_;
    for (int k = 0; k < rank; ++k) {
      float* const out = factors_ + k * kChunk;
      for (int i = 0; i < count; ++i) out[i] = from[i * rank + k];
      std::fill(out + count, out + round_up(count, kLanes), 0.f);
    }
  }

  // Call step(t, row) for rows [begin, end); compilers vectorise consecutive rows.
  template <class Step>
  static KVPRESS_INLINE void for_rows(const Chunk& chunk, int begin, int end, Step&& step) {
    if (chunk.contiguous)
      for (int t = begin; t < end; ++t) step(t, chunk.rows[0] + t);
    else
      for (int t = begin; t < end; ++t) step(t, chunk.rows[t]);
  }

  using Four = float __attribute__((vector_size(16)));

  int fours() const { return (queries_ + 3) / 4; }

  // out[i] = element i of four rows of `from`, from row m on; rows past the last query are zero.
  void beside(const float* from, int stride, int m, int count, Four* out) const {
    if (m + 4 <= queries_) {
      const float *a = from + m * stride, *b = a + stride, *c = b + stride, *d = c + stride;
      for (int i = 0; i < count; ++i) out[i] = Four{a[i], b[i], c[i], d[i]};
      return;
    }
    std::fill_n(out, count, Four{});
    for (int k = 0; m + k < queries_; ++k)
      for (int i = 0; i < count; ++i) out[i][k] = from[(m + k) * stride + i];
  }

  // Inverse of beside(), accumulating: element i of four rows of `to` += from[i].
  void add_beside(const Four* from, int count, int m, float* to, int stride) const {
    for (int k = 0; k < std::min(4, queries_ - m); ++k)
      for (int i = 0; i < count; ++i) to[(m + k) * stride + i] += from[i][k];
  }

  void score_outliers(const Chunk& chunk, float* scores) {
    for (int b = 0; b < fours(); ++b) {
      const Four* const queries = channel_fours_ + b * channels_;
      Four* const sums = row_fours_;
      std::fill_n(sums, chunk.count, Four{});
      outliers_.for_each(chunk.rows, chunk.count,
                         [=](int t, int channel, float value) { sums[t] += queries[channel] * value; });
      add_beside(sums, chunk.count, 4 * b, scores, kScoreStride);
    }
  }

  void mix_outliers(const Chunk& chunk, const float* weights, float* acc, int acc_stride) {
    for (int b = 0; b < fours(); ++b) {
      Four *const sums = channel_fours_, *const shares = row_fours_;
      beside(weights, kScoreStride, 4 * b, chunk.count, shares);
      std::fill_n(sums, channels_, Four{});
      outliers_.for_each(chunk.rows, chunk.count,
                         [=](int t, int channel, float value) { sums[channel] += shares[t] * value; });
      add_beside(sums, channels_, 4 * b, acc, acc_stride);
    }
  }

  const Correction& terms_;
  const int channels_, queries_, rank_;
  const float* q_ = nullptr;
  int stride_ = 0;
  int64_t projected_ = -1;  // basis whose products with the queries are in products_
  Buffer<float> factors_, loaded_, products_;
  const Outliers outliers_;
  Buffer<Four> channel_fours_;  // [M / 4, D]: queries, or in mix() the sums of each channel for four of them
  Buffer<Four> row_fours_;      // [kChunk]: logits, or weights
};

}  // namespace kvpress
