// SPDX-License-Identifier: Apache-2.0
// What codes stand for: levels, looked up by shuffles, or their numbers. A tile of rows is transposed once, and each register
// then holds the codes of one channel of neighbouring rows, or what they stand for.
#pragma once

#include "buffer.h"
#include "dense.h"
#include "words.h"

namespace kvpress {

constexpr int kLevels = 16;  // entries of a table; shorter ones are repeated, so that higher bits of an index do not count

// table[index & 15] in every lane; where the second half of the table repeats the first, bit 3 of an index need not be seen.
template <bool kRepeats>
KVPRESS_INLINE F look_up(const float* table, Words index) {
#if defined(__AVX512F__)
  return _mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
  const F low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)index);
  if constexpr (kRepeats) return low;
  const F high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)index);
  return _mm256_blendv_ps(low, high, (F)_mm256_slli_epi32((__m256i)index, 28));
#elif defined(__aarch64__)
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(table);
  const uint8x16x4_t all{{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
  return (F)vqtbl4q_u8(all, (uint8x16_t)((index & 15) * 0x04040404 + 0x03020100));
#else
  return F{table[index[0] & 15], table[index[1] & 15], table[index[2] & 15], table[index[3] & 15]};
#endif
}

// Codes of up to four bits stand for the levels of one table for all channels, or of one for each.
class Tables {
 public:
  static constexpr int kBits = 4;  // at most

  Tables(int bits, int tables) : mask_((1 << bits) - 1), step_(tables > 1 ? kLevels : 0), tables_(tables * kLevels) {}

  // Levels lie `stride` apart; codes past the last of `entries` mean that one.
  void set(int table, const float* levels, int entries, int stride = 1) {
    for (int i = 0; i < kLevels; ++i) tables_[table * kLevels + i] = levels[std::min(i & mask_, entries - 1) * stride];
  }

  // What the low bits of words mean.
  template <bool kThree>
  KVPRESS_INLINE F level(int channel, Words code) const {
    return look_up<kThree>(tables_ + channel * step_, code);
  }

 private:
  const int mask_, step_;
  Buffer<float> tables_;
};

// Codes stand for their own numbers.
class Numbers {
 public:
  static constexpr int kBits = 8;

  Numbers(int bits, int /*tables*/) : mask_(Words{} + ((1 << bits) - 1)) {}

  template <bool kThree>
  KVPRESS_INLINE F level(int /*channel*/, Words code) const {
    return (F)__builtin_convertvector(code & mask_, Floats);
  }

 private:
  const Words mask_;
};

// Codes of up to `rows` rows, by word and row. Neighbouring channels go in fours: the codes of channels 4 i .. 4 i + 3 are
// the low bits of the bytes of word i.
class CodeColumns {
 public:
  static bool fits(int64_t bits, int64_t channels) { return channels % (bits == 3 ? 32 : 32 / bits) == 0; }

  CodeColumns(int bits, int channels, int rows)
      : three_(bits == 3),
        rows_(rows),
        low_(channels * (three_ ? 2 : bits) / 32),
        high_(three_ ? channels / 32 : 0),
        words_(round_up(low_ + high_, 4) * rows),
        places_(channels / 4) {
    const int32_t* words = words_;
    for (int i = 0; i < channels / 4; ++i) {
      places_[i] = {words + i % low_ * rows, words, i / low_ * (three_ ? 2 : bits), 0};
      if (three_) places_[i].high = words + (low_ + i % high_) * rows, places_[i].high_shift = i / high_;
    }
  }

  // Takes up to `rows` rows; the list goes on to the end of a vector.
  void load(const uint8_t* const* rows, int count) {
    const int bytes = 4 * (low_ + high_);
    for (int t = 0; t < count; t += kLanes)
      for (int at = 0; at < bytes; at += 16) {
        Words column[4];
        transpose_rows(rows + t, at, bytes - at, column);
        for (int k = 0; k < 4; ++k) std::memcpy(words_ + (at / 4 + k) * rows_ + t, &column[k], sizeof(Words));
      }
  }

  // Puts change(words) for the words of the first `count` rows, a vector at a time.
  template <class Change>
  void change(int count, Change&& change) {
    for (int i = 0; i < low_ + high_; ++i)
      for (int t = 0; t < count; t += kLanes) {
        int32_t* const at = words_ + i * rows_ + t;
        Words words;
        std::memcpy(&words, at, sizeof words);
        words = change(words);
        std::memcpy(at, &words, sizeof words);
      }
  }

  // Word i of the rows from `first`, a multiple of kLanes.
  template <bool kThree>
  KVPRESS_INLINE Words read(int i, int first) const {
    const Place& place = places_[i];
    Words low, high;
    std::memcpy(&low, place.low + first, sizeof low);
    low >>= place.shift;
    if constexpr (!kThree) return low;
    std::memcpy(&high, place.high + first, sizeof high);
    return (low & 0x03030303) | ((high >> place.high_shift & 0x01010101) << 2);
  }

  // step(whether codes have three bits), as a constant.
  template <class Step>
  KVPRESS_INLINE void with_width(Step&& step) const {
    three_ ? step(std::true_type{}) : step(std::false_type{});
  }

 private:
  // Where the words i of all rows are: in which words of a row, and how far to the right they go.
  struct Place {
    const int32_t *low, *high;
    int shift, high_shift;
  };

  const bool three_;
  const int rows_, low_, high_;  // words of a row: of codes or their low bits, of high bits
  Buffer<int32_t> words_;
  Buffer<Place> places_;
};

}  // namespace kvpress
