// SPDX-License-Identifier: Apache-2.0
// Rows of packed codes, and the tables that they index: one Quad per entry.
#pragma once

#include <algorithm>
#include <type_traits>

#include "buffer.h"
#include "coded_problem.h"
#include "simd.h"

namespace kvpress {

constexpr int kCodedRows = 1024;  // rows whose logits are kept at once

// For loops whose counters a larger function would spill to memory, and for code to compile once, not per caller.
#define KVPRESS_APART __attribute__((noinline))

// Entries of a table. Constant if possible, which saves the loops over rows an addition per entry.
template <class Index>
inline int table_size(int bits) {
  return sizeof(Index) == 1 ? 256 : 1 << bits;
}

// Call step(entry, k) for the entries that kColumns indices select from neighbouring tables, with k the number of the index.
template <int kColumns, class Index, class Entry, class Step>
KVPRESS_INLINE void for_entries(const Index* indices, Entry* tables, int bits, Step&& step) {
  const int size = table_size<Index>(bits);
  unrolled<kColumns>([&](auto k) KVPRESS_INLINE_LAMBDA { step(tables[k * size + indices[k]], k); });
}

// Call step(number of columns, first column, whether it is column 0) for 4 columns at a time, or for one.
template <class Step>
inline void for_column_tiles(int columns, Step&& step) {
  using std::integral_constant;
  int at = 0;
  if (columns >= 4) step(integral_constant<int, 4>{}, at, std::true_type{}), at = 4;
  for (; at + 4 <= columns; at += 4) step(integral_constant<int, 4>{}, at, std::false_type{});
  if (at == 0) step(integral_constant<int, 1>{}, at++, std::true_type{});
  for (; at < columns; ++at) step(integral_constant<int, 1>{}, at, std::false_type{});
}

// Indices of type `Index` from `first` on, with rows `stride` apart.
template <class Index>
struct IndexBlock {
  const Index* first;
  int64_t stride;

  const Index* row(int t) const { return first + t * stride; }

  // Prefetch the same indices of the next block of rows; past the last block this is harmless.
  void prefetch_next() const { prefetch_line(reinterpret_cast<const char*>(first + kCodedRows * stride)); }
};

// Rows of codes as table indices. A byte of several codes is one index for all of them, three-bit codes are paired, and codes
// wider than a byte are one index each. With P codes per index, index j of a row has the codes p * (groups / P) + j at bit bits
// * p. Every table has an entry for every possible index.
template <class Index>
class IndexRows {
 public:
  IndexRows(const Coded& side, bool listed)
      : side_(side),
        groups_(int(side.groups)),
        bits_(int(side.bits)),
        parts_(bits_ == 3 ? 2 : bits_ < 8 ? 8 / bits_ : 1),
        planes_(bits_ == 3 || bits_ > 8),
        low_(bits_ == 3 ? groups_ : 0),
        high_(planes_ ? groups_ : 0),
        indices_(planes_ || listed ? int64_t(kCodedRows) * columns() : 0),
        codes_(groups_) {}

  int parts() const { return parts_; }
  // Return whether the indices of a row are its codes, and all of them index a centroid.
  bool names_groups() const { return parts_ == 1 && side_.entries == int64_t(1) << bits_; }
  int columns() const { return groups_ / parts_; }
  int size() const { return table_size<Index>(bits_); }

  // Return whether tables for `rows` rows cost less than assembling the rows, counted in vectors of four.
  bool tables_pay(int64_t rows) const {
    const int64_t entries = int64_t(columns()) << bits_ * parts_;
    const int64_t fill = (side_.channels() << bits_) + 2 * entries;
    return rows * (side_.channels() + 2 * (groups_ - columns())) >= 2 * fill;
  }

  // Return the indices of at most kCodedRows rows; valid until the next call.
  IndexBlock<Index> read(Stretch rows, int count) {
    const auto stored = [&](int64_t row) { return side_.codes + row * side_.stride; };
    if constexpr (sizeof(Index) == 1)
      if (!planes_ && !rows.listed) return {stored(rows.first), side_.stride};
    for (int t = 0; t < count; ++t) unpack(stored(rows[t]), indices_ + int64_t(t) * columns());
    return {indices_, columns()};
  }

  // Return the codes of one row, by group.
  const Index* split(const Index* row) {
    const Index last = Index(side_.entries - 1);
    const Index* codes = row;
    if constexpr (sizeof(Index) == 1)
      if (parts_ > 1) {
        unpack_plane(row, columns(), bits_, parts_, codes_);
        codes = codes_;
      }
    if (side_.entries == int64_t(1) << bits_) return codes;
    for (int g = 0; g < groups_; ++g) codes_[g] = std::min(codes[g], last);
    return codes_;
  }

 private:
  void unpack(const uint8_t* row, Index* out) {
    const int width = columns();
    if constexpr (sizeof(Index) == 2) {
      unpack_plane(row + groups_, groups_ * (bits_ - 8) / 8, bits_ - 8, 8 / (bits_ - 8), high_);
      for (int j = 0; j < width; ++j) out[j] = Index(row[j] | high_[j] << 8);
    } else if (bits_ == 3) {
      unpack_plane(row, groups_ / 4, 2, 4, low_);
      unpack_plane(row + groups_ / 4, groups_ / 8, 1, 8, high_);
      const uint8_t *low = low_, *high = high_;
      for (int j = 0; j < width; ++j)
        out[j] = Index(low[j] | high[j] << 2 | low[j + width] << 3 | high[j + width] << 5);
    } else {
      std::memcpy(out, row, width);
    }
  }

  // out[part * width + j] = code at bit bits * part of byte j.
  static void unpack_plane(const uint8_t* bytes, int width, int bits, int parts, uint8_t* out) {
    const uint32_t mask = 0x01010101u * ((1u << bits) - 1);
    for (int part = 0; part < parts; ++part, out += width) {
      const int shift = bits * part;
      int j = 0;
      for (; j + 4 <= width; j += 4) {
        uint32_t four;
        std::memcpy(&four, bytes + j, sizeof four);
        four = four >> shift & mask;
        std::memcpy(out + j, &four, sizeof four);
      }
      for (; j < width; ++j) out[j] = uint8_t(bytes[j] >> shift & mask);
    }
  }

  const Coded& side_;
  const int groups_, bits_, parts_;
  const bool planes_;
  Buffer<uint8_t> low_, high_;
  Buffer<Index> indices_, codes_;
};

}  // namespace kvpress
