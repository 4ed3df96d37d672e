// SPDX-License-Identifier: Apache-2.0
// Keys of attention on codes: logits of four queries, as sums of table entries or from assembled rows.
#pragma once

#include <optional>

#include "centroids.h"
#include "coded_levels.h"
#include "outliers.h"
#include "rotary_dot.h"
#include "whole_rotary_dot.h"

namespace kvpress {

template <class Index>
class CodedKeys {
 public:
  // No piece has more than `longest` rows.
  CodedKeys(const CodedProblem& p, int64_t longest)
      : p_(p),
        indices_(p.keys, p.listed),
        assembler_(p.keys),
        outliers_(p.keys.correction, p.keys.channels()),
        stride_(assembler_.stride()),
        table_(tabled(longest) ? int64_t(indices_.columns()) * indices_.size() : 0),
        products_(int64_t(1) << p.keys.bits),
        queries_(stride_),
        crossed_(outliers_.none() ? 0 : p.rotary),
        book_(p.keys.entries * p.keys.coupled),
        rotary_(p) {
    if (keys_are_levels(p)) choose_levels<CodedLevelKeys>(levels_, p, p.keys, p.coarse, p);
#if defined(KVPRESS_WHOLE_BOOKS)
    if (sizeof(Index) == 1 && !p.exact && longest >= kWholeRows && WholeRotaryDot::fits(p)) whole_.emplace(p);
#endif
  }

  // Set the first `live` of four queries, times the factor of the logits, for a piece of `length` rows of a stream.
  void begin(const float* q, int live, float factor, int64_t stream, int64_t length) {
    const int channels = int(p_.keys.channels());
    for (int i = 0; i < 4; ++i)
      for (int c = 0; c < channels; ++c) queries_[c][i] = i < live ? q[i * channels + c] * factor : 0.f;
    if (!outliers_.none()) cross_queries(int(p_.rotary / 2));
    stream_ = stream;
    use_table_ = tabled(length);
    if (use_table_) return fill_table(p_.book_of(stream));
    if (with(levels_, [&](auto& kernel) { kernel.begin(queries_, stream); })) return;
#if defined(KVPRESS_WHOLE_BOOKS)
    use_whole_ = whole_ && length >= kWholeRows;
    if (use_whole_) return whole_->begin(queries_, p_.book_of(stream));
#endif
    assembler_.begin(p_.book_of(stream));
    rotary_.begin(queries_);
  }

  KVPRESS_APART void score(Stretch rows, int count, Quad* scores) {
    if (!use_table_ && with(levels_, [&](auto& kernel) { kernel.score(rows, count, scores); })) return;
    const auto block = indices_.read(rows, count);
    if (use_table_)
      look_up(block, count, scores);
    else
      put_together(block, rows, count, scores);
  }

  bool stores(Stretch rows, int count) const { return outliers_.stores(rows, count, !rows.listed); }

  // scores[t] += products of the queries with the outliers of row t, which are rotated like its key.
  KVPRESS_APART void correct(Stretch rows, int count, Quad* scores) const {
    const int half = int(p_.rotary / 2);
    const CodedProblem::Places places = p_.places(stream_);
    const Quad *queries = queries_, *crossed = crossed_;
    const float *coarse_angles = p_.coarse, *fine_angles = p_.fine;
    outliers_.for_each(rows, count, [=](int t, int channel, float value) {
      Quad product = queries[channel];
      if (channel < 2 * half) {
        const int pair = channel - (half & -int(channel >= half));  // a branch would be mispredicted every second time
        const uint64_t position = places[rows[t]];
        const float* const coarse = coarse_angles + position / kStep * 2 * half + pair;
        const float* const fine = fine_angles + position % kStep * 2 * half + pair;
        const float cosine = coarse[0] * fine[0] - coarse[half] * fine[half];
        const float sine = coarse[0] * fine[half] + coarse[half] * fine[0];
        product = product * cosine + crossed[channel] * sine;
      }
      scores[t] += product * value;
    });
  }

 private:
  // Return whether a table is used. Rotated keys depend on the position, so no table fits them. Table entries belong to bytes,
  // which pays off for levels if a byte has four codes or more.
  bool tabled(int64_t rows) const {
    const bool looked_up = keys_are_levels(p_) && p_.keys.bits > 2;
    return !p_.coarse && !looked_up && indices_.tables_pay(rows);
  }

  // Set crossed_: the product with a rotated key is its product with the queries times the cosine, plus its product with
  // crossed_ times the sine.
  void cross_queries(int half) {
    for (int pair = 0; pair < half; ++pair) crossed_[pair] = queries_[half + pair], crossed_[half + pair] = -queries_[pair];
  }

  // table[column, index] = sum over the codes of the index of the products of their centroids with the queries.
  void fill_table(int64_t book) {
    const int codes = 1 << p_.keys.bits;
    for (int column = 0; column < indices_.columns(); ++column) {
      Quad* table = table_ + int64_t(column) * indices_.size();
      multiply(book, column, table);
      for (int part = 1, filled = codes; part < indices_.parts(); ++part, filled *= codes) {
        multiply(book, part * indices_.columns() + column, products_);
        for (int code = codes - 1; code >= 0; --code)
          for (int i = 0; i < filled; ++i) table[code * filled + i] = table[i] + products_[code];
      }
    }
  }

  // out[code] = product of the code's centroid with the queries.
  void multiply(int64_t book, int group, Quad* out) {
    const int coupled = int(p_.keys.coupled), entries = int(p_.keys.entries);
    const float* centroids = read_book(p_.keys, book, group, book_);
    const Quad* q = queries_ + group * coupled;
    for (int e = 0; e < entries; ++e, centroids += coupled) {
      Quad sum = q[0] * centroids[0];
      for (int j = 1; j < coupled; ++j) sum += q[j] * centroids[j];
      out[e] = sum;
    }
    for (int e = entries; e < 1 << p_.keys.bits; ++e) out[e] = out[entries - 1];
  }

  // scores[t] = sum over columns of table[column, index].
  void look_up(IndexBlock<Index> rows, int count, Quad* scores) {
    const int bits = int(p_.keys.bits);
    for_column_tiles(indices_.columns(), [&](auto tile, int column, auto first) {
      const Quad* tables = table_ + int64_t(column) * indices_.size();
      sum_columns<tile, first>({rows.first + column, rows.stride}, count, tables, bits, scores);
    });
  }

  template <int kColumns, bool kFirst>
  static KVPRESS_APART void sum_columns(IndexBlock<Index> rows, int count, const Quad* tables, int bits, Quad* scores) {
    for (int t = 0; t < count; ++t, rows.first += rows.stride) {
      if (kFirst) rows.prefetch_next();
      Quad found[4] = {};
      for_entries<kColumns>(
          rows.first, tables, bits, [&](const Quad& entry, int k) KVPRESS_INLINE_LAMBDA { found[k] = entry; });
      const Quad sum = kColumns == 4 ? (found[0] + found[1]) + (found[2] + found[3]) : found[0];
      scores[t] = kFirst ? sum : scores[t] + sum;
    }
  }

  // scores[t] = products of the queries with key t, rotated if the stream has angles.
  void put_together(IndexBlock<Index> block, Stretch rows, int count, Quad* scores) {
#if defined(KVPRESS_WHOLE_BOOKS)
    if constexpr (sizeof(Index) == 1)
      if (use_whole_) {
        uint64_t scattered[kCodedRows];
        return whole_->multiply(block, positions(rows, 0, count, scattered), count, scores);
      }
#endif
    if (pick<4>(block, rows, count, scores) || pick<8>(block, rows, count, scores) || pick<16>(block, rows, count, scores))
      return;
    assembler_.for_tiles(indices_, block, count, [&](const float* keys, int t, int size) {
      multiply(FloatRows{keys, stride_}, rows, t, size, scores);
    });
  }

  // The same without assembly, if centroids are full vectors or whole parts of one; else return false.
  template <int kCoupled>
  bool pick(IndexBlock<Index> block, Stretch rows, int count, Quad* scores) {
    using Book = std::conditional_t<kConvertsHalves, f16, float>;
    using Keys = CentroidRows<kCoupled, Book, Index>;
    if (!Keys::fits(p_.keys, indices_) || !rotary_.aligned(std::max(kCoupled, kLanes))) return false;
    if (assembler_.holds_halves() != kConvertsHalves) return false;
    const Keys keys{static_cast<const Book*>(assembler_.centroids()), p_.keys.entries, block};
    multiply(keys, rows, 0, count, scores);
    return true;
  }

  template <class Keys>
  void multiply(const Keys& keys, Stretch rows, int first, int count, Quad* scores) {
    uint64_t scattered[kCodedRows];
    rotary_.multiply(keys, positions(rows, first, count, scattered), count, scores + first);
  }

  // Return the positions of the rows; `scattered` must have room for all of them.
  Positions positions(Stretch rows, int first, int count, uint64_t* scattered) const {
    const CodedProblem::Places places = p_.places(stream_);
    if (!rows.listed && !p_.positions) return {nullptr, places[rows[first]]};
    for (int i = 0; i < count; ++i) scattered[i] = p_.coarse ? places[rows[first + i]] : 0;
    return {scattered, 0};
  }

  const CodedProblem& p_;
  IndexRows<Index> indices_;
  Assembler<Index> assembler_;
  const Outliers outliers_;
  const int stride_;
  int64_t stream_ = 0;
  bool use_table_ = false;
  Buffer<Quad> table_, products_, queries_, crossed_;  // the table by column and index; queries by channel
  Buffer<float> book_;
  RotaryDot rotary_;
  OfLevels<CodedLevelKeys> levels_;
#if defined(KVPRESS_WHOLE_BOOKS)
  std::optional<WholeRotaryDot> whole_;
  bool use_whole_ = false;
#endif
};

}  // namespace kvpress
