// SPDX-License-Identifier: Apache-2.0
// Products of queries with keys that are rotated on the fly, in 16-bit integers.
#pragma once

#include "rotary_dot.h"
#include "whole_book.h"
#include "words.h"

#if defined(KVPRESS_WHOLE_BOOKS)
namespace kvpress {

// As `RotaryDot`, for keys whose channels are all rotated. Both channels of a pair have one unit, which is folded into the
// queries; cosines and sines are 16-bit fractions.
class WholeRotaryDot {
  static constexpr float kOne = 32767;
  static constexpr int kRows = kLanes / 4;  // rows whose products with four queries fill a vector
  static constexpr int kShift = kLanes == 16 ? 4 : 3;  // log2(kLanes): lanes are divided by their number before they are summed

 public:
  explicit WholeRotaryDot(const CodedProblem& p)
      : p_(p),
        half_(int(p.rotary / 2)),
        vectors_(half_ / kWide),
        book_(p.keys),
        queries_(8 * half_),
        turned_(2 * half_),
        whole_(8 * half_),
        fine_(2 * half_ * kStep) {
    for (int i = 0; i < 2 * half_ * kStep; i += kLanes) {
      const F within = min(max(load(p.fine + i), set1(-1.f)), set1(1.f));
      store_low_halves(fine_ + i, fma(within, set1(kOne), set1(kMagic)));
    }
  }

  // With eight lanes, centroids of eight channels fill a float vector, which is as fast.
  static bool fits(const CodedProblem& p) {
    const bool faster = kLanes > 8 || p.keys.coupled == 4;
    return faster && p.coarse && p.rotary == p.keys.channels() && p.rotary % (2 * kWide) == 0 && p.rotary <= 256 &&
           WholeBook::fits(p.keys);
  }

  // Set queries, by channel.
  void begin(const Quad* queries, int64_t book) {
    book_.begin(book);
    for (int i = 0; i < 4; ++i)
      for (int c = 0; c < 2 * half_; ++c) queries_[i * 2 * half_ + c] = queries[c][i] * book_.unit(c);
    block_ = ~uint64_t(0);
  }

  // out[i] = products with key i.
  void multiply(IndexBlock<uint8_t> rows, Positions positions, int count, Quad* out) {
    positions.for_blocks(count, [&](uint64_t block, int first, int end) {
      turn_queries(block);
      switch (p_.keys.coupled) {
        case 4:
          return multiply_rows<4>(rows, positions, first, end, out);
        case 8:
          return multiply_rows<8>(rows, positions, first, end, out);
        default:
          multiply_rows<16>(rows, positions, first, end, out);
      }
    });
  }

 private:
  // Largest length of a query pair for which no lane sum reaches 2^31: a lane sums the products of 2 * vectors_ pairs, and keys
  // have lengths up to 2^15.
  float most() const { return std::min(32700.f, 65532.f / float(2 * vectors_) - 2); }

  void turn_queries(uint64_t block) {
    if (block == block_) return;
    block_ = block;
    const float *cosine = p_.coarse + block * 2 * half_, *sine = cosine + half_;
    for (int i = 0; i < 4; ++i) {
      const float *low = queries_ + i * 2 * half_, *high = low + half_;
      F longest = set1(0.f);
      for (int c = 0; c < half_; c += kLanes) {
        const F x = load(low + c), y = load(high + c), cos = load(cosine + c), sin = load(sine + c);
        const F a = fma(x, cos, mul(y, sin)), b = sub(mul(y, cos), mul(x, sin));
        store(turned_ + c, a), store(turned_ + half_ + c, b);
        longest = max(longest, fma(a, a, mul(b, b)));
      }
      const float length = std::sqrt(max_lane(longest)), unit = length / most();
      const F inverse = set1(length == 0 ? 0.f : 1 / unit);
      for (int row = 0; row < kRows; ++row) unit_[row][i] = unit * (32768 / kOne) * (1 << kShift);
      for (int part = 0; part < 2; ++part)
        for (int c = 0; c < half_; c += kLanes)
          store_low_halves(whole_ + (c / kWide * 8 + part * 4 + i) * kWide + c % kWide,
                           fma(load(turned_ + part * half_ + c), inverse, set1(kMagic)));
    }
  }

  template <int kCoupled>
  void multiply_rows(IndexBlock<uint8_t> rows, Positions positions, int first, int end, Quad* out) const {
    switch (vectors_) {
      case 1:
        return multiply_rows<kCoupled, 1>(rows, positions, first, end, out);
      case 2:
        return multiply_rows<kCoupled, 2>(rows, positions, first, end, out);
      case 4:
        return multiply_rows<kCoupled, 4>(rows, positions, first, end, out);
      default:
        multiply_rows<kCoupled, 0>(rows, positions, first, end, out);
    }
  }

  // For keys of kVectors vectors of pairs; 0 for all other keys.
  template <int kCoupled, int kVectors>
  KVPRESS_APART void multiply_rows(IndexBlock<uint8_t> rows, Positions positions, int first, int end, Quad* out) const {
    const F unit = load(reinterpret_cast<const float*>(unit_));
    constexpr int kHeld = 8 * kVectors <= kRegisters / 2 ? 8 * kVectors : 0;  // vectors of queries that stay in registers
    Words held[std::max(kHeld, 1)];
    unrolled<kHeld>([&](auto i) KVPRESS_INLINE_LAMBDA { held[i] = load_wide(whole_ + i * kWide); });
    const auto query = [&](int i) KVPRESS_INLINE_LAMBDA { return kHeld ? held[i] : load_wide(whole_ + i * kWide); };
    for (int r = first; r < end; r += kRows) {
      Words products[kRows];
      unrolled<kRows>([&](auto i) KVPRESS_INLINE_LAMBDA {
        const int row = std::min(r + i, end - 1);
        products[i] = multiply_row<kCoupled, kVectors>(rows.row(row), positions[row] % kStep, query);
        IndexBlock<uint8_t>{rows.row(row), rows.stride}.prefetch_next();
      });
      const F all = mul((F)__builtin_convertvector(sum_of_rows(products), Floats), unit);
      if (r + kRows <= end) {
        store(reinterpret_cast<float*>(out + r), all);
      } else {
        float lanes[kLanes];
        store(lanes, all);
        std::memcpy(static_cast<void*>(out + r), lanes, (end - r) * sizeof(Quad));
      }
    }
  }

  // The sum of lanes 4 l + i over l is the product with query i.
  template <int kCoupled, int kVectors, class Query>
  KVPRESS_INLINE Words multiply_row(const uint8_t* codes, uint64_t position, Query query) const {
    const int vectors = kVectors ? kVectors : vectors_, half = vectors * kWide, groups = half / kCoupled;
    const int16_t *low_book = book_.numbers(), *high_book = low_book + int64_t(groups) * kWholeEntries * kCoupled;
    const int16_t *cosines = fine_ + position * 2 * half, *sines = cosines + half;
    Words sums[4] = {};
    const auto add = [&](int v) KVPRESS_INLINE_LAMBDA {
      const int group = v * (kWide / kCoupled);
      const int64_t entry = int64_t(group) * kWholeEntries * kCoupled;
      const Words low = load_centroids<kCoupled>(low_book + entry, codes + group);
      const Words high = load_centroids<kCoupled>(high_book + entry, codes + groups + group);
      Words first, second;
      rotate(low, high, load_wide(cosines + v * kWide), load_wide(sines + v * kWide), first, second);
      unrolled<4>([&](auto i) KVPRESS_INLINE_LAMBDA {
        add_pairs(sums[i], first, query(v * 8 + i));
        add_pairs(sums[i], second, query(v * 8 + 4 + i));
      });
    };
    if constexpr (kVectors > 0)
      unrolled<kVectors>([&](auto v) KVPRESS_INLINE_LAMBDA { add(v); });
    else
      for (int v = 0; v < vectors; ++v) add(v);
    unrolled<4>([&](auto i) KVPRESS_INLINE_LAMBDA { sums[i] = sums[i] >> kShift; });
    return sum_of_queries(sums);
  }

  static KVPRESS_INLINE void rotate(Words low, Words high, Words cos, Words sin, Words& first, Words& second) {
    first = (Words)((Shorts)multiply_fractions(low, cos) - (Shorts)multiply_fractions(high, sin));
    second = (Words)((Shorts)multiply_fractions(high, cos) + (Shorts)multiply_fractions(low, sin));
  }

  // Word i of each 128 bits is the sum of the words there in x[i].
  static KVPRESS_INLINE Words sum_of_queries(const Words (&x)[4]) {
    const Words ab = zip_low(x[0], x[1]) + zip_high(x[0], x[1]), cd = zip_low(x[2], x[3]) + zip_high(x[2], x[3]);
    return zip_low_pairs(ab, cd) + zip_high_pairs(ab, cd);
  }

  // 128-bit part r is the sum of the 128-bit parts of x[r].
  static KVPRESS_INLINE Words sum_of_rows(const Words (&x)[kRows]) {
#if defined(__AVX512F__)
    const auto even = [](Words a, Words b) { return (Words)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0x88); };
    const auto odd = [](Words a, Words b) { return (Words)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0xdd); };
    const Words ab = even(x[0], x[1]) + odd(x[0], x[1]), cd = even(x[2], x[3]) + odd(x[2], x[3]);
    return even(ab, cd) + odd(ab, cd);
#else
    return (Words)_mm256_permute2x128_si256((__m256i)x[0], (__m256i)x[1], 0x20) +
           (Words)_mm256_permute2x128_si256((__m256i)x[0], (__m256i)x[1], 0x31);
#endif
  }

  const CodedProblem& p_;
  const int half_, vectors_;  // pairs of a key; vectors of pairs
  WholeBook book_;
  uint64_t block_ = 0;  // block of positions that whole_ is rotated for
  Quad unit_[kRows];    // unit of the products with each query
  Buffer<float> queries_, turned_;  // queries by channel, one after the other; one rotated query
  Buffer<int16_t> whole_, fine_;    // by vector of pairs: first channels for each query, then second ones; cosines and sines
};

}  // namespace kvpress
#endif
