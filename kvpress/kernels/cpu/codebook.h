// Rows of packed codes, and the tables that they point into: one Quad per entry.
#pragma once

#include <algorithm>
#include <type_traits>

#include "buffer.h"
#include "lookup_problem.h"
#include "simd.h"

namespace kvpress {

constexpr int kLookupRows = 1024;  // rows whose logits are held at once

// One number for each of four queries.
typedef float Quad __attribute__((vector_size(16)));

// For loops whose counters a larger function would keep in memory, and for code worth compiling once, not per caller.
#define KVPRESS_APART __attribute__((noinline))

// Four indices as one word, and the byte offset of one of them into a table of Quads.
inline uint32_t load_four(const uint8_t* indices) {
  uint32_t four;
  std::memcpy(&four, indices, sizeof four);
  return four;
}

inline uint64_t load_four(const uint16_t* indices) {
  uint64_t four;
  std::memcpy(&four, indices, sizeof four);
  return four;
}

template <int kWhich>
inline uint64_t offset_of(uint32_t four) {
  return (kWhich == 0 ? four << 4 : four >> (8 * kWhich - 4)) & 0xff0;
}

template <int kWhich>
inline uint64_t offset_of(uint64_t four) {
  return (four >> 16 * kWhich & 0xffff) << 4;
}

// Entries from one table to the next. Constant where it can be, which spares the loops over rows an addition per entry.
template <class Index>
inline int table_size(int bits) {
  return sizeof(Index) == 1 ? 256 : 1 << bits;
}

// Calls step(entry, k) for the entries of kColumns indices, k counting them, in neighbouring tables.
template <int kColumns, class Index, class Entry, class Step>
KVPRESS_INLINE void for_entries(const Index* indices, Entry* tables, int bits, Step&& step) {
  if constexpr (kColumns == 4) {
    using Byte = std::conditional_t<std::is_const_v<Entry>, const char, char>;
    const int size = table_size<Index>(bits);
    const auto four = load_four(indices);
    const auto entry = [](Entry* table, uint64_t bytes) KVPRESS_INLINE_LAMBDA -> Entry& {
      return *reinterpret_cast<Entry*>(reinterpret_cast<Byte*>(table) + bytes);
    };
    step(entry(tables, offset_of<0>(four)), 0);
    step(entry(tables + size, offset_of<1>(four)), 1);
    step(entry(tables + 2 * size, offset_of<2>(four)), 2);
    step(entry(tables + 3 * size, offset_of<3>(four)), 3);
  } else {
    step(tables[*indices], 0);
  }
}

// Calls step(columns at once, first column).
template <class Step>
inline void for_column_tiles(int columns, Step&& step) {
  int at = 0;
  for (; at + 4 <= columns; at += 4) step(std::integral_constant<int, 4>{}, at);
  for (; at < columns; ++at) step(std::integral_constant<int, 1>{}, at);
}

// Indices of `Index` type at `first`, rows `stride` apart.
template <class Index>
struct IndexBlock {
  const Index* first;
  int64_t stride;

  const Index* row(int t) const { return first + t * stride; }
};

// Rows of codes as indices of tables. A byte that holds several codes is one index for all of them, codes of three bits
// go in pairs, and wider ones than a byte alone: with P codes per index, index j of a row stands for the codes
// p * (groups / P) + j at bit bits * p. All tables have an entry for every index there is.
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
        indices_(planes_ || listed ? int64_t(kLookupRows) * columns() : 0),
        codes_(groups_) {}

  int parts() const { return parts_; }
  int columns() const { return groups_ / parts_; }
  int size() const { return table_size<Index>(bits_); }

  // Whether tables for that many rows cost less than putting the rows together, counted in vectors of four.
  bool tables_pay(int64_t rows) const {
    const int64_t entries = int64_t(columns()) << bits_ * parts_;
    const int64_t fill = (side_.channels() << bits_) + 2 * entries;
    return rows * (side_.channels() + 2 * (groups_ - columns())) >= 2 * fill;
  }

  // At most kLookupRows rows, until the next call.
  IndexBlock<Index> read(Stretch rows, int count) {
    const auto stored = [&](int64_t row) { return side_.codes + row * side_.stride; };
    if constexpr (sizeof(Index) == 1)
      if (!planes_ && !rows.listed) return {stored(rows.first), side_.stride};
    for (int t = 0; t < count; ++t) unpack(stored(rows[t]), indices_ + int64_t(t) * columns());
    return {indices_, columns()};
  }

  // The codes of one row, by group.
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
        const uint32_t four = load_four(bytes + j) >> shift & mask;
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
