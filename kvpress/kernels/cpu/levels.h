// SPDX-License-Identifier: Apache-2.0
// Decodes codes in registers: levels, looked up by shuffles, or the codes' own numbers. A tile of rows is transposed once; each
// register then has the codes, or the decoded values, of one channel of neighbouring rows.
#pragma once

#include "buffer.h"
#include "dense.h"
#include "words.h"

namespace kvpress {

constexpr int kLevels = 16;  // entries of a table; shorter tables are repeated, so higher bits of an index are ignored

// Return table[index & 15] in every lane. kRepeats: the second half of the table repeats the first, so bit 3 is not read.
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

// Codes of up to four bits that index the levels of one table for all channels, or of one table per channel.
class Tables {
 public:
  static constexpr int kBits = 4;  // maximum bits of a code

  Tables(int bits, int tables) : mask_((1 << bits) - 1), step_(tables > 1 ? kLevels : 0), tables_(tables * kLevels) {}

  // Set a table from levels that are `stride` apart. Codes past the last of `entries` decode to the last level.
  void set(int table, const float* levels, int entries, int stride = 1) {
    for (int i = 0; i < kLevels; ++i) tables_[table * kLevels + i] = levels[std::min(i & mask_, entries - 1) * stride];
  }

  // Decode the low bits of each word.
  template <bool kThree>
  KVPRESS_INLINE F level(int channel, Words code) const {
    return look_up<kThree>(tables_ + channel * step_, code);
  }

 private:
  const int mask_, step_;
  Buffer<float> tables_;
};

// Codes that decode to their own number.
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

// Codes of up to `rows` rows, by word and row. Four neighbouring channels share a word: the codes of channels 4 i .. 4 i + 3
// are the low bits of the bytes of word i.
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

  // Load up to `rows` rows; the list of rows must be padded to a full vector.
  void load(const uint8_t* const* rows, int count) {
    const int bytes = 4 * (low_ + high_);
    for (int t = 0; t < count; t += kLanes)
      for (int at = 0; at < bytes; at += 16) {
        Words column[4];
        transpose_rows(rows + t, at, bytes - at, column);
        for (int k = 0; k < 4; ++k) std::memcpy(words_ + (at / 4 + k) * rows_ + t, &column[k], sizeof(Words));
      }
  }

  // Replace the words of the first `count` rows by change(words), a vector at a time.
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

  // Return word i of the rows from `first` on, a multiple of kLanes.
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

  // Call step(std::true_type) for codes of three bits, else step(std::false_type).
  template <class Step>
  KVPRESS_INLINE void with_width(Step&& step) const {
    three_ ? step(std::true_type{}) : step(std::false_type{});
  }

 private:
  // Location of word i of all rows: the words that contain its bits, and the right shifts that extract them.
  struct Place {
    const int32_t *low, *high;
    int shift, high_shift;
  };

  const bool three_;
  const int rows_, low_, high_;  // words of a row: codes or their low bits; high bits
  Buffer<int32_t> words_;
  Buffer<Place> places_;
};

}  // namespace kvpress
