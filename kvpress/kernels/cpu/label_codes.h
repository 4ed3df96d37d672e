// SPDX-License-Identifier: Apache-2.0
// Products of queries with quantised labels, directly from packed codes. Each label has one scale, and a zero of its own or the
// common zero point.
#pragma once

#include "products.h"
#include "scores_problem.h"
#include "tile.h"

namespace kvpress {

// sum += products of the signed 16-bit halves of each word with those of the pair.
KVPRESS_INLINE void add_halves(Words& sum, Words x, int32_t pair) {
#if defined(__AVX2__)
  add_pairs(sum, x, Words{} + pair);
#else
  sum += (x << 16 >> 16) * int32_t(int16_t(pair)) + (x >> 16) * (pair >> 16);
#endif
}

// Queries are rounded to 16-bit integers. A register has the same four bytes of neighbouring rows; a mask and a shift extract
// two codes of each row at a time.
class CodedLabels {
 public:
  static constexpr int kRows = 64;  // rows at once, several tiles: they share the setup of loads and products
  static_assert(kRows % kTileRows == 0);

  explicit CodedLabels(const Scores& p)
      : p_(p),
        bits_(int(p.bits)),
        depth_(int(p.stride + 3) / 4),
        pairs_(depth_ * 16 / bits_),
        words_(depth_ * kRows),
        scale_(kRows),
        zero_(kRows),
        query_(p.queries * p.channels),
        totals_(p.queries),
        integers_(p.queries * pairs_ * 2) {}

  void begin(int64_t stream) {
    const int64_t count = p_.queries * p_.channels;
    Elements(p_.q, p_.query_dtype).read(stream * count, count, query_);
    float largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(query_[i]));
    // No sum of products may exceed 32 bits.
    const float range = float(std::min<int64_t>(INT16_MAX, INT32_MAX / (p_.channels << bits_)));
    unit_ = largest / range;
    for (int64_t m = 0; m < p_.queries; ++m) convert(query_ + m * p_.channels, largest > 0 ? range / largest : 0, m);
  }

  // Load rows; those past `size` are undefined.
  void load(int64_t row, int size) {
    const uint8_t* codes = static_cast<const uint8_t*>(p_.high) + row * p_.stride;
    switch (p_.stride) {
      case 4:
        transpose<1>(codes, size);
        break;
      case 8:
        transpose<2>(codes, size);
        break;
      case 16:
        transpose<4>(codes, size);
        break;
      default:
        transpose(codes, size);
    }
    prefetch_row(codes + kAheadLabels * p_.stride, size * p_.stride);
    read(p_.scale, row, size, scale_);
    if (p_.zero) return read(p_.zero, row, size, zero_);
    for (int t = 0; t < size; ++t) zero_[t] = scale_[t] * -float(p_.zero_point);
  }

  // Products with the tile that begins at row t.
  template <int kQueries>
  KVPRESS_INLINE void product(int m, int t, F (&sums)[kQueries][kTileVectors]) const {
    Words dots[kQueries][kTileVectors] = {};
    const Words mask = Words{} + ((1 << bits_) - 1) * 0x10001;
    const Words bits = Words{} + bits_;  // a shift count per lane takes fewer instructions than one count for all lanes
    const int16_t* query = integers_ + m * pairs_ * 2;
    for (int k = 0; k < depth_; ++k) {
      Words word[kTileVectors];
      for_vectors([&](auto v) KVPRESS_INLINE_LAMBDA {
        std::memcpy(&word[v], words_ + k * kRows + t + v * kLanes, sizeof word[v]);
      });
      for (int bit = 0; bit < 16; bit += bits_, query += 2) {
        Words codes[kTileVectors];
        for_vectors([&](auto v) KVPRESS_INLINE_LAMBDA {
          codes[v] = word[v] & mask;
          word[v] >>= bits;
        });
        unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
          int32_t pair;
          std::memcpy(&pair, query + i * pairs_ * 2, sizeof pair);
          for_vectors([&](auto v) KVPRESS_INLINE_LAMBDA { add_halves(dots[i][v], codes[v], pair); });
        });
      }
    }
    for_vectors([&](auto v) KVPRESS_INLINE_LAMBDA {
      const F scale = mul(::kvpress::load(scale_ + t + v * kLanes), set1(unit_));
      const F zero = ::kvpress::load(zero_ + t + v * kLanes);
      unrolled<kQueries>([&](auto i) KVPRESS_INLINE_LAMBDA {
        sums[i][v] = fma((F)__builtin_convertvector(dots[i][v], Floats), scale, mul(zero, set1(totals_[m + i])));
      });
    });
  }

 private:
  // Read one number per label.
  void read(const void* from, int64_t row, int size, float* to) const {
    const Elements numbers(from, p_.dtype);
    numbers.prefetch(row + kAheadLabels, size);
    numbers.read(row, size, to);
  }

  template <class Step>
  static KVPRESS_INLINE void for_vectors(Step&& step) {
    unrolled<kTileVectors>(step);
  }

  // Round a query to integers, in the order in which words yield their codes; padding stays zero.
  void convert(const float* query, float factor, int64_t m) {
    totals_[m] = 0;
    for (int64_t c = 0; c < p_.channels; ++c) totals_[m] += query[c];
    int16_t* out = integers_ + m * pairs_ * 2;
    for (int k = 0; k < depth_; ++k)
      for (int bit = 0; bit < 16; bit += bits_)
        for (int half = 0; half < 2; ++half, ++out) {
          const int64_t byte = 4 * k + 2 * half + bit / 8;
          if (byte < p_.stride) *out = int16_t(std::lrint(query[bit % 8 / bits_ * p_.stride + byte] * factor));
        }
  }

  // For rows of kWords full words.
  template <int kWords>
  void transpose(const uint8_t* codes, int size) {
    int32_t* const out = words_;
    int t = 0;
#if defined(KVPRESS_PAIRS)
    for (; t + kLanes <= size; t += kLanes) {
      F column[kWords];
      split_rows(codes + t * kWords * 4, column);
      for (int k = 0; k < kWords; ++k) store(reinterpret_cast<float*>(out + k * kRows + t), column[k]);
    }
#endif
    for (; t < size; ++t)
      for (int k = 0; k < kWords; ++k) std::memcpy(out + k * kRows + t, codes + (t * kWords + k) * 4, 4);
  }

#if defined(KVPRESS_PAIRS)
  // column[k] = word k of kLanes rows; each step separates even words from odd ones.
  template <int kWords>
  static KVPRESS_INLINE void split_rows(const uint8_t* codes, F (&column)[kWords]) {
    for (int k = 0; k < kWords; ++k) column[k] = ::kvpress::load(reinterpret_cast<const float*>(codes) + k * kLanes);
    for (int step = 1; step < kWords; step *= 2) {
      F from[kWords];
      std::copy_n(column, kWords, from);
      for (int k = 0; k < kWords / 2; ++k) {
        part_pairs(from[2 * k], from[2 * k + 1]);
        column[k] = from[2 * k], column[kWords / 2 + k] = from[2 * k + 1];
      }
    }
  }
#endif

  void transpose(const uint8_t* codes, int size) {
    for (int64_t at = 0; at < p_.stride; at += 4)
      for (int t = 0; t < size; ++t)
        std::memcpy(words_ + at / 4 * kRows + t, codes + t * p_.stride + at, std::min<int64_t>(4, p_.stride - at));
  }

  const Scores& p_;
  const int bits_, depth_;  // bits of a code; words of a row
  const int pairs_;         // pairs of codes in the words of a row
  float unit_ = 0;
  Buffer<int32_t> words_;
  Buffer<float> scale_, zero_, query_, totals_;
  Buffer<int16_t> integers_;
};

}  // namespace kvpress
