// SPDX-License-Identifier: Apache-2.0
// The largest scores of each stream, exactly: a bound excludes most scores, and a search by bins ranks the others.
#pragma once

#include <numeric>

#include "simd.h"
#include "split.h"

namespace kvpress {

struct Select {
  const float* scores;     // [N, stride]
  const int64_t* starts;   // [N]
  const int64_t* lengths;  // [N]
  const int64_t* most;     // [N]: rows to select of each stream, at most width; null: width
  int32_t* rows;           // [N, width]
  int64_t* counts;         // [N]
  int64_t streams;
  int64_t stride;
  int64_t capacity;        // scores of a stream
  int64_t width;
  int64_t first;           // rows at the start of a stream that are always selected
  int64_t last;            // rows at its end that are always selected
  int64_t threads;
};

// Unsigned integers in the order of the scores: equal for both zeros, and 0 for NaN.
inline uint32_t to_key(float score) {
  uint32_t bits;
  const float x = score + 0.f;
  std::memcpy(&bits, &x, sizeof bits);
  return x == x ? bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u) : 0;
}

inline float from_key(uint32_t key) {
  const uint32_t bits = key == 0 ? 0x7fc00000u : key >> 31 ? key ^ 0x80000000u : ~key;
  float score;
  std::memcpy(&score, &bits, sizeof score);
  return score;
}

// Selected scores: values and places. A full vector may be written past the last one.
struct Taken {
  float* values;
  int32_t* places;
};

// Append the scores of a vector that are not below the limit; the first score has place `place`. A NaN score is appended, and
// all scores are if the limit is NaN. Return the number appended.
#if defined(__AVX512F__)
inline int64_t take_reaching(const float* scores, float limit, int32_t place, Taken out) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const F x = load(scores);
  const __mmask16 taken = _mm512_cmp_ps_mask(x, set1(limit), _CMP_NLT_UQ);
  store(out.values, _mm512_maskz_compress_ps(taken, x));
  _mm512_storeu_si512(out.places, _mm512_maskz_compress_epi32(taken, _mm512_add_epi32(lanes, _mm512_set1_epi32(place))));
  return __builtin_popcount(taken);
}
#elif defined(__AVX2__)
// Lane numbers of every set of lanes, ascending, one byte each.
struct LanesOf {
  uint8_t first[256][8] = {};
  constexpr LanesOf() {
    for (int set = 0; set < 256; ++set)
      for (int lane = 0, n = 0; lane < 8; ++lane)
        if (set >> lane & 1) first[set][n++] = uint8_t(lane);
  }
};
inline constexpr LanesOf kLanesOf;

inline int64_t take_reaching(const float* scores, float limit, int32_t place, Taken out) {
  const F x = load(scores);
  const int taken = _mm256_movemask_ps(_mm256_cmp_ps(x, set1(limit), _CMP_NLT_UQ));
  const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)kLanesOf.first[taken]));
  store(out.values, _mm256_permutevar8x32_ps(x, lanes));
  _mm256_storeu_si256((__m256i*)out.places, _mm256_add_epi32(lanes, _mm256_set1_epi32(place)));
  return __builtin_popcount(taken);
}
#else
inline int64_t take_reaching(const float* scores, float limit, int32_t place, Taken out) {
  int64_t taken = 0;
  for (int i = 0; i < kLanes; ++i) {
    out.values[taken] = scores[i];
    out.places[taken] = place + i;
    taken += !(scores[i] < limit);
  }
  return taken;
}
#endif

// State of one thread.
class Selector {
  static constexpr int kBins = 2048;

 public:
  explicit Selector(const Select& p)
      : p_(p),
        best_(scratch<float>()),
        values_(scratch<float>()),
        keys_(scratch<uint32_t>()),
        places_(scratch<int32_t>()) {}

  // Select the rows of a stream by its scores.
  void choose(int64_t stream, const float* scores) {
    const int64_t length = p_.lengths[stream];
    const int64_t count = std::min(length, p_.most ? p_.most[stream] : p_.width);
    const int32_t start = int32_t(p_.starts[stream]);
    int32_t* rows = p_.rows + stream * p_.width;
    p_.counts[stream] = count;
    std::fill(rows + count, rows + p_.width, 0);
    if (length == count) return std::iota(rows, rows + count, start);
    const int64_t free = count - p_.first - p_.last;
    std::iota(rows, rows + p_.first, start);
    choose_best(scores + p_.first, length - p_.first - p_.last, free, start + int32_t(p_.first),
                rows + p_.first);
    std::iota(rows + count - p_.last, rows + count, start + int32_t(length - p_.last));
  }

 private:
  struct Rank {
    uint32_t key;
    int64_t ties;  // scores with this key to select
  };

  // Bin of the key of some rank: keys from `first` on that differ in the last `shift` bits.
  struct Bin {
    uint32_t first;
    int shift;
    int64_t rank;  // among the keys of the bin, from one
  };

  template <class T>
  std::unique_ptr<T[]> scratch() const {
    return std::unique_ptr<T[]>(new T[p_.capacity + kLanes]);
  }

  // Write the numbers of the `count` largest of `size` scores, counted from `start`, in ascending order.
  void choose_best(const float* scores, int64_t size, int64_t count, int32_t start, int32_t* out) {
    if (count == 0) return;
    const int64_t found = collect(scores, size, bound(scores, size, count));
    Rank rank = find(found, count);
    for (int64_t i = 0, n = 0; n < count; ++i) {
      const uint32_t key = to_key(values_[i]);
      const bool tie = key == rank.key && rank.ties > 0;
      out[n] = start + places_[i];
      n += key > rank.key || tie;
      rank.ties -= tie;
    }
  }

  // Return a limit that at least `count` scores reach: one score in each of `count` groups reaches it.
  float bound(const float* scores, int64_t size, int64_t count) {
    const int64_t group = size / (2 * std::max<int64_t>(count, kLanes));
    if (group < 2) return NAN;
    const int64_t blocks = size / (group * kLanes);
    for (int64_t b = 0; b < blocks; ++b) {
      const float* block = scores + b * group * kLanes;
      F best = load(block);
      for (int64_t g = 1; g < group; ++g) best = max(best, load(block + g * kLanes));
      store(best_.get() + b * kLanes, best);
    }
    load_keys(best_.get(), blocks * kLanes);
    return from_key(bin_of(blocks * kLanes, count).first);
  }

  // Store values and places of the scores that are not below the limit; return their number.
  int64_t collect(const float* scores, int64_t size, float limit) {
    int64_t found = 0, at = 0;
    float* const values = values_.get();
    int32_t* const places = places_.get();
    for (; at + kLanes <= size; at += kLanes)
      found += take_reaching(scores + at, limit, int32_t(at), {values + found, places + found});
    for (; at < size; ++at) {
      values[found] = scores[at];
      places[found] = int32_t(at);
      found += !(scores[at] < limit);
    }
    return found;
  }

  // Set the first keys to those of the values.
  void load_keys(const float* values, int64_t size) {
    for (int64_t i = 0; i < size; ++i) keys_[i] = to_key(values[i]);
  }

  // Return the `count`-th largest of the collected values.
  Rank find(int64_t size, int64_t count) {
    load_keys(values_.get(), size);
    uint32_t* const keys = keys_.get();
    for (;;) {
      const Bin bin = bin_of(size, count);
      if (bin.shift == 0) return {bin.first, bin.rank};
      int64_t kept = 0;
      for (int64_t i = 0; i < size; ++i) {
        const uint32_t key = keys[i];
        keys[kept] = key;
        kept += (key - bin.first) >> bin.shift == 0;
      }
      size = kept;
      count = bin.rank;
    }
  }

  // Return the bin of the `count`-th largest of the first keys. Bins divide the range that the keys span, so that few keys
  // share one; with bins of fixed digits, almost all keys would be in the first.
  Bin bin_of(int64_t size, int64_t count) const {
    const uint32_t* const keys = keys_.get();
    uint32_t low = UINT32_MAX, high = 0;
    for (int64_t i = 0; i < size; ++i) low = std::min(low, keys[i]), high = std::max(high, keys[i]);
    int shift = 0;
    while ((high - low) >> shift >= kBins) ++shift;
    uint32_t histogram[kBins] = {};
    for (int64_t i = 0; i < size; ++i) ++histogram[(keys[i] - low) >> shift];
    uint32_t bin = (high - low) >> shift;
    for (; histogram[bin] < count; --bin) count -= histogram[bin];
    return {low + (bin << shift), shift, count};
  }

  const Select& p_;
  std::unique_ptr<float[]> best_, values_;
  std::unique_ptr<uint32_t[]> keys_;
  std::unique_ptr<int32_t[]> places_;
};

// Return the first stream whose rows cannot be selected, or -1.
inline int first_impossible(const Select& p) {
  for (int64_t n = 0; n < p.streams; ++n)
    if (p.starts[n] < 0 || p.lengths[n] < 0 || p.lengths[n] > p.capacity || p.starts[n] + p.lengths[n] > INT32_MAX ||
        (p.most && (p.most[n] < std::min(p.first + p.last, p.lengths[n]) || std::min(p.most[n], p.lengths[n]) > p.width)))
      return int(n);
  return -1;
}

// Return -1, or the number of an invalid stream.
inline int select_all(const Select& p) {
  if (const int bad = first_impossible(p); bad >= 0) return bad;
  parallel(p.streams, p.threads, [&] {
    return [&, selector = std::make_shared<Selector>(p)](int64_t n) { selector->choose(n, p.scores + n * p.stride); };
  });
  return -1;
}

}  // namespace kvpress
