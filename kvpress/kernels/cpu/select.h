// The largest scores of each stream, exactly: most scores are ruled out by a bound, a radix search ranks the others.
#pragma once

#include <numeric>

#include "split.h"

namespace kvpress {

struct Select {
  const float* scores;     // [N, stride]
  const int64_t* starts;   // [N]
  const int64_t* lengths;  // [N]
  const int64_t* most;     // [N] rows to choose of each stream, at most width; null: width
  int32_t* rows;           // [N, width]
  int64_t* counts;         // [N]
  int64_t streams;
  int64_t stride;
  int64_t capacity;        // scores of a stream
  int64_t width;
  int64_t first;           // rows at the start of a stream that are always chosen
  int64_t last;            // the same at its end
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

// One bit per lane: whether x is not below the limit. NaN is below nothing, and nothing is below NaN.
inline uint32_t not_below(F x, F limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ);
#elif defined(__AVX2__)
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= uint32_t(!(x[i] < limit[i])) << i;
  return bits;
#endif
}

// One thread's state.
class Selector {
  static constexpr int kDigits = 2048;

 public:
  explicit Selector(const Select& p)
      : p_(p),
        best_(scratch<float>()),
        values_(scratch<float>()),
        keys_(scratch<uint32_t>()),
        places_(scratch<int32_t>()) {}

  void choose(int64_t stream) {
    const int64_t length = p_.lengths[stream];
    const int64_t count = std::min(length, p_.most ? p_.most[stream] : p_.width);
    const int32_t start = int32_t(p_.starts[stream]);
    int32_t* rows = p_.rows + stream * p_.width;
    p_.counts[stream] = count;
    std::fill(rows + count, rows + p_.width, 0);
    if (length == count) return std::iota(rows, rows + count, start);
    const int64_t free = count - p_.first - p_.last;
    std::iota(rows, rows + p_.first, start);
    choose_best(p_.scores + stream * p_.stride + p_.first, length - p_.first - p_.last, free, start + int32_t(p_.first),
                rows + p_.first);
    std::iota(rows + count - p_.last, rows + count, start + int32_t(length - p_.last));
  }

 private:
  struct Rank {
    uint32_t key;
    int64_t ties;  // how many of the scores with this key are to be chosen
  };

  template <class T>
  std::unique_ptr<T[]> scratch() const {
    return std::unique_ptr<T[]>(new T[p_.capacity]);
  }

  // Numbers of the `count` best of `size` scores, counted from `start`, in ascending order.
  void choose_best(const float* scores, int64_t size, int64_t count, int32_t start, int32_t* out) {
    if (count == 0) return;
    const int64_t found = collect(scores, size, bound(scores, size, count));
    Rank rank = find(values_.get(), found, count);
    for (int64_t i = 0, n = 0; n < count; ++i) {
      const uint32_t key = to_key(values_[i]);
      const bool tie = key == rank.key && rank.ties > 0;
      out[n] = start + places_[i];
      n += key > rank.key || tie;
      rank.ties -= tie;
    }
  }

  // A limit that at least `count` scores reach: of that many groups of scores, one each does.
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
    return from_key(find(best_.get(), blocks * kLanes, count).key);
  }

  // Places and values of the scores that are not below the limit.
  int64_t collect(const float* scores, int64_t size, float limit) {
    int64_t found = 0;
    const auto take = [&](int64_t at) {
      places_[found] = int32_t(at);
      values_[found++] = scores[at];
    };
    int64_t at = 0;
    for (; at + 64 <= size; at += 64) {
      uint64_t bits = 0;
      for (int i = 0; i < 64; i += kLanes) bits |= uint64_t(not_below(load(scores + at + i), set1(limit))) << i;
      for (; bits; bits &= bits - 1) take(at + __builtin_ctzll(bits));
    }
    for (; at < size; ++at)
      if (!(scores[at] < limit)) take(at);
    return found;
  }

  // The `count`-th largest value, digit by digit.
  Rank find(const float* values, int64_t size, int64_t count) {
    uint32_t* const keys = keys_.get();
    for (int64_t i = 0; i < size; ++i) keys[i] = to_key(values[i]);
    uint32_t key = 0;
    for (const int shift : {21, 10, 0}) {
      uint32_t histogram[kDigits] = {};
      for (int64_t i = 0; i < size; ++i) ++histogram[keys[i] >> shift & (kDigits - 1)];
      uint32_t digit = kDigits - 1;
      for (; histogram[digit] < count; --digit) count -= histogram[digit];
      int64_t kept = 0;
      for (int64_t i = 0; i < size; ++i) {
        const uint32_t candidate = keys[i];
        keys[kept] = candidate;
        kept += (candidate >> shift & (kDigits - 1)) == digit;
      }
      size = kept;
      key |= digit << shift;
    }
    return {key, count};
  }

  const Select& p_;
  std::unique_ptr<float[]> best_, values_;
  std::unique_ptr<uint32_t[]> keys_;
  std::unique_ptr<int32_t[]> places_;
};

// Returns -1, or the number of a stream that makes the problem invalid.
inline int select_all(const Select& p) {
  for (int64_t n = 0; n < p.streams; ++n)
    if (p.starts[n] < 0 || p.lengths[n] < 0 || p.lengths[n] > p.capacity || p.starts[n] + p.lengths[n] > INT32_MAX ||
        (p.most && (p.most[n] < std::min(p.first + p.last, p.lengths[n]) || std::min(p.most[n], p.lengths[n]) > p.width)))
      return int(n);
  parallel(p.streams, p.threads, [&] {
    return [&, selector = std::make_shared<Selector>(p)](int64_t n) { selector->choose(n); };
  });
  return -1;
}

}  // namespace kvpress
