// SPDX-License-Identifier: Apache-2.0
// Values of attention on codes: weights of four queries are summed per table entry, or assembled rows are added.
#pragma once

#include "centroids.h"
#include "coded_levels.h"
#include "outliers.h"

namespace kvpress {

template <class Index>
class CodedValues {
  // Channels that are mixed at once for centroids of four channels: as many as registers hold sums of; 0 if tables are faster.
  static constexpr int kMixed = kConvertsHalves && kLanes > 4 ? kRegisters / 8 * kLanes : 0;
  using Centroids = CentroidRows<4, f16, Index>;

 public:
  // No piece has more than `longest` rows.
  CodedValues(const CodedProblem& p, int64_t longest)
      : side_(p.values),
        indices_(p.values, p.listed),
        assembler_(p.values),
        outliers_(p.values.correction, p.values.channels()),
        stride_(assembler_.stride()),
        mixes_(mixable()),
        table_(tabled(longest) ? int64_t(indices_.columns()) * indices_.size() : 0),
        weights_(indices_.parts() > 1 ? indices_.size() : 0),
        book_(p.values.entries * p.values.coupled),
        sums_(4 * stride_),
        added_(outliers_.none() ? 0 : side_.channels()) {
    if (values_are_levels(side_)) choose_levels<CodedLevelValues>(levels_, p, side_, false, side_);
  }

  void begin(int64_t book, int64_t length) {
    number_ = book;
    use_table_ = tabled(length);
    if (!use_table_ && !with(levels_, [&](auto& kernel) { kernel.begin(book); })) assembler_.begin(book);
    if (use_table_)
      std::memset(static_cast<void*>(table_), 0, sizeof(Quad) * indices_.columns() * indices_.size());
    else
      std::fill_n(static_cast<float*>(sums_), 4 * stride_, 0.f);
    for (int c = 0; c < added(); ++c) added_[c] = Quad{};
  }

  bool stores(Stretch rows, int count) const { return outliers_.stores(rows, count, !rows.listed); }

  // Add the outliers of some rows; row scales do not apply to them.
  KVPRESS_APART void correct(Stretch rows, int count, const Quad* weights) {
    outliers_.for_each(rows, count, [&](int t, int channel, float value) { added_[channel] += weights[t] * value; });
  }

  // Multiply all sums so far.
  void scale(Quad factor) {
    if (use_table_)
      for (int i = 0; i < indices_.columns() * indices_.size(); ++i) table_[i] *= factor;
    else
      for (int i = 0; i < 4 * stride_; ++i) sums_[i] *= factor[i / stride_];
    for (int c = 0; c < added(); ++c) added_[c] *= factor;
  }

  KVPRESS_APART void collect(Stretch rows, int count, const Quad* weights) {
    if (!use_table_ && with(levels_, [&](auto& kernel) { kernel.add(rows, count, weights, sums_, stride_); })) return;
    const auto block = indices_.read(rows, count);
    if (use_table_)
      add_to_table(block, count, weights);
    else if (mixes_)
      mix_centroids({static_cast<const f16*>(assembler_.centroids()), side_.entries, block}, count, weights);
    else
      add_to_sums(block, count, weights);
  }

  // out[i, channel] = weighted sum of the values times factor[i], for the first `live` queries.
  void finish(int live, Quad factor, float* out) {
    const int channels = int(side_.channels());
    if (use_table_)
      mix_table(live, factor, out);
    else
      for (int i = 0; i < live; ++i)
        for (int c = 0; c < channels; ++c) out[i * channels + c] = sums_[i * stride_ + c] * factor[i];
    for (int i = 0; i < live; ++i)
      for (int c = 0; c < added(); ++c) out[i * channels + c] += added_[c][i] * factor[i];
  }

 private:
  bool mixable() const {
    if constexpr (kMixed == 0) return false;
    return assembler_.holds_halves() && Centroids::fits(side_, indices_) && side_.channels() % std::max(kMixed, 1) == 0;
  }

  bool tabled(int64_t rows) const {
    const bool looked_up = values_are_levels(side_) && side_.bits > 2;  // as for keys
    return !looked_up && !mixes_ && indices_.tables_pay(rows);
  }

  int added() const { return outliers_.none() ? 0 : int(side_.channels()); }

  // table[column, index] += weights[t] for every row t.
  void add_to_table(IndexBlock<Index> rows, int count, const Quad* weights) {
    for_column_tiles(indices_.columns(), [&](auto tile, int column, auto first) {
      Quad* tables = table_ + int64_t(column) * indices_.size();
      add_to_columns<tile, first>({rows.first + column, rows.stride}, count, weights, tables, int(side_.bits));
    });
  }

  template <int kColumns, bool kFirst>
  static KVPRESS_APART void add_to_columns(IndexBlock<Index> rows, int count, const Quad* weights, Quad* tables,
                                           int bits) {
    for (int t = 0; t < count; ++t, rows.first += rows.stride) {
      if (kFirst) rows.prefetch_next();
      for_entries<kColumns>(
          rows.first, tables, bits,
          [weight = weights[t]](Quad& entry, int) KVPRESS_INLINE_LAMBDA { entry += weight; });
    }
  }

  // sums[i, channel] += weights[t, i] * value of row t
  void add_to_sums(IndexBlock<Index> block, int count, const Quad* all_weights) {
    assembler_.for_tiles(indices_, block, count, [&](const float* values, int t, int size) {
      const float* weights = reinterpret_cast<const float*>(all_weights + t);
      for (int c = 0; c < side_.channels(); c += kLanes) {
        F sums[4];
        unrolled<4>([&](auto i) KVPRESS_INLINE_LAMBDA { sums[i] = load(sums_ + i * stride_ + c); });
        for (int r = 0; r < size; ++r) {
          const F x = load(values + r * stride_ + c);
          unrolled<4>(
              [&](auto i) KVPRESS_INLINE_LAMBDA { sums[i] = fma(set1(weights[4 * r + i]), x, sums[i]); });
        }
        unrolled<4>([&](auto i) KVPRESS_INLINE_LAMBDA { store(sums_ + i * stride_ + c, sums[i]); });
      }
    });
  }

  // The same for centroids that fill vectors, without assembly.
  void mix_centroids(const Centroids& values, int count, const Quad* weights) {
    for (int c = 0; c < side_.channels(); c += std::max(kMixed, 1))
      mix_channels_of(values, c, count, reinterpret_cast<const float*>(weights));
  }

  KVPRESS_APART void mix_channels_of(const Centroids values, int channel, int count, const float* weights) {
    constexpr int kVectors = kMixed / kLanes;
    F sums[std::max(4 * kVectors, 1)];
    const auto at = [&](int i, int v) { return sums_ + i * stride_ + channel + v * kLanes; };
    unrolled<4 * kVectors>([&](auto i) KVPRESS_INLINE_LAMBDA { sums[i] = load(at(i % 4, i / 4)); });
    for (int t = 0; t < count; ++t, weights += 4) {
      if (channel == 0) IndexBlock<Index>{values.codes.row(t), values.codes.stride}.prefetch_next();
      auto value = values.cursor(t, channel);
      unrolled<kVectors>([&](auto v) KVPRESS_INLINE_LAMBDA {
        const F x = value.template read<0>();
        unrolled<4>([&](auto i) KVPRESS_INLINE_LAMBDA { sums[4 * v + i] = fma(set1(weights[i]), x, sums[4 * v + i]); });
        value.advance();
      });
    }
    unrolled<4 * kVectors>([&](auto i) KVPRESS_INLINE_LAMBDA { store(at(i % 4, i / 4), sums[i]); });
  }

  // out[i, channel] = sum over the codes of weight times centroid, times factor[i].
  void mix_table(int live, Quad factor, float* out) {
    const int codes = 1 << side_.bits, entries = int(side_.entries);
    for (int column = 0; column < indices_.columns(); ++column) {
      Quad* table = table_ + int64_t(column) * indices_.size();
      int left = 1 << side_.bits * indices_.parts();
      for (int part = 0; part < indices_.parts(); ++part) {
        left /= codes;
        Quad* weights = left > 1 ? fold(table, codes, left) : table;
        for (int e = entries; e < codes; ++e) weights[entries - 1] += weights[e];
        mix_group(part * indices_.columns() + column, weights, live, factor, out);
      }
    }
  }

  // Return the weights of the lowest code of an index; the table keeps the weights of the higher codes, by index.
  Quad* fold(Quad* table, int codes, int left) {
    std::memset(static_cast<void*>(weights_), 0, sizeof(Quad) * (codes + left));
    Quad* above = weights_ + codes;
    for (int high = 0; high < left; ++high)
      for (int code = 0; code < codes; ++code) weights_[code] += table[high * codes + code];
    for (int code = 0; code < codes; ++code)  // in this order, neighbouring sums do not wait for each other
      for (int high = 0; high < left; ++high) above[high] += table[high * codes + code];
    std::copy_n(above, left, table);
    return weights_;
  }

  void mix_group(int group, const Quad* weights, int live, Quad factor, float* out) {
    const int coupled = int(side_.coupled);
    const float* centroids = read_book(side_, number_, group, book_);
    int j = 0;
    out += group * coupled;
    for (; j + 8 <= coupled; j += 8) mix_channels<8>(weights, centroids + j, live, factor, out + j);
    for (; j + 4 <= coupled; j += 4) mix_channels<4>(weights, centroids + j, live, factor, out + j);
    for (; j < coupled; ++j) mix_channels<1>(weights, centroids + j, live, factor, out + j);
  }

  template <int kWidth>
  void mix_channels(const Quad* weights, const float* centroids, int live, Quad factor, float* out) const {
    const int64_t coupled = side_.coupled, channels = side_.channels();
    Quad sums[kWidth] = {};
    for (int e = 0; e < side_.entries; ++e, centroids += coupled)
      for (int k = 0; k < kWidth; ++k) sums[k] += weights[e] * centroids[k];
    for (int k = 0; k < kWidth; ++k)
      for (int i = 0; i < live; ++i) out[i * channels + k] = (sums[k] * factor)[i];
  }

  const Coded& side_;
  IndexRows<Index> indices_;
  Assembler<Index> assembler_;
  const Outliers outliers_;
  const int stride_;
  const bool mixes_;
  int64_t number_ = 0;  // of the codebook
  bool use_table_ = false;
  Buffer<Quad> table_, weights_;  // by column and index; folded weights
  Buffer<float> book_, sums_;
  Buffer<Quad> added_;  // weighted sums of outliers, by channel
  OfLevels<CodedLevelValues> levels_;
};

}  // namespace kvpress
