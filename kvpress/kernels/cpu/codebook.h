// Rows of codes into books of centroids, and tables that codes point into: one Quad per centroid.
#pragma once

#include <algorithm>
#include <type_traits>

#include "problem.h"
#include "simd.h"

namespace kvpress {

// Rows of codes of one side and their books [books, groups, entries, coupled].
struct Coded {
  const void* codes;
  const void* book;
  int64_t stride;  // codes between two rows
  int64_t wide;    // two bytes per code, not one
  int64_t half;    // the book is float16, not float32
  int64_t channels;
  int64_t entries;
  int64_t coupled;

  int groups() const { return int(channels / coupled); }
};

// One number for each of four queries.
typedef float Quad __attribute__((vector_size(16)));

// One group of a book as float32.
inline const float* read_book(const Coded& side, int64_t book, int group, float* scratch) {
  const int64_t count = side.entries * side.coupled, first = (book * side.groups() + group) * count;
  if (!side.half) return static_cast<const float*>(side.book) + first;
  const f16* from = static_cast<const f16*>(side.book) + first;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(scratch + i, load(from + i));
  for (; i < count; ++i) scratch[i] = to_float(from[i]);
  return scratch;
}

// Four codes as one word, and the byte offset of one of them into a table of Quads.
inline uint32_t load_four(const uint8_t* codes) {
  uint32_t four;
  std::memcpy(&four, codes, sizeof four);
  return four;
}

inline uint64_t load_four(const uint16_t* codes) {
  uint64_t four;
  std::memcpy(&four, codes, sizeof four);
  return four;
}

template <int kWhich>
inline uint64_t offset_of(uint32_t four, int) {
  return (kWhich == 0 ? four << 4 : four >> (8 * kWhich - 4)) & 0xff0;
}

template <int kWhich>
inline uint64_t offset_of(uint64_t four, int size) {
  return (four >> 16 * kWhich & uint64_t(size - 1)) << 4;
}

// Rows of codes of one side. A code that is no entry of the book meets a zero: tables are as long as the codes allow.
template <class Code>
class CodeRows {
 public:
  explicit CodeRows(const Coded& side) : side_(side), groups_(side.groups()) {
    while (size_ < (sizeof(Code) == 1 ? 256 : side.entries)) size_ *= 2;
  }

  int groups() const { return groups_; }
  int size() const { return size_; }  // entries of the table of a group
  int64_t stride() const { return side_.stride; }
  const Code* row(int64_t r) const { return static_cast<const Code*>(side_.codes) + r * side_.stride; }
  int64_t entry(Code code) const { return std::min<int64_t>(code & (size_ - 1), side_.entries - 1); }

  // Calls step(table, k) for the tables of kGroups codes, k counting them; tables of a group are size() apart.
  template <int kGroups, class Step>
  static KVPRESS_INLINE void for_entries(const Code* codes, Quad* tables, int size, Step&& step) {
    if constexpr (kGroups == 4) {
      const auto four = load_four(codes);
      step(shifted(tables, offset_of<0>(four, size)), 0);
      step(shifted(tables + size, offset_of<1>(four, size)), 1);
      step(shifted(tables + 2 * size, offset_of<2>(four, size)), 2);
      step(shifted(tables + 3 * size, offset_of<3>(four, size)), 3);
    } else {
      step(tables + (*codes & (size - 1)), 0);
    }
  }

 private:
  static Quad* shifted(Quad* table, uint64_t bytes) {
    return reinterpret_cast<Quad*>(reinterpret_cast<char*>(table) + bytes);
  }

  const Coded& side_;
  const int groups_;
  int size_ = 1;
};

// Calls step(groups at once, first group).
template <class Step>
inline void for_group_tiles(int groups, Step&& step) {
  int g = 0;
  for (; g + 4 <= groups; g += 4) step(std::integral_constant<int, 4>{}, g);
  for (; g < groups; ++g) step(std::integral_constant<int, 1>{}, g);
}

}  // namespace kvpress
