// SPDX-License-Identifier: Apache-2.0
// Outliers: single channels of single rows, which are added to what the row decodes to.
#pragma once

#include "buffer.h"
#include "dense.h"

namespace kvpress {

// Calls step(terms of a correction) with the type that they have.
template <class Step>
void typed(const void* terms, int64_t dtype, Step&& step) {
  dtype == kFloat16 ? step(static_cast<const f16*>(terms)) : step(static_cast<const float*>(terms));
}

// One thread's state. `rows` names rows by number: rows[t] is the t-th one.
class Outliers {
 public:
  Outliers(const Correction& terms, int64_t channels)
      : terms_(terms),
        channels_(channels),
        owner_(none() ? 0 : kTile * (channels + kAtOnce)),
        entry_(none() ? 0 : kTile * (channels + kAtOnce)) {}

  bool none() const { return !terms_.first; }

  // Whether all outliers and channels that the rows refer to exist. `running`: each row follows the one before it.
  template <class Rows>
  bool stores(const Rows& rows, int count, bool running) const {
    if (none() || count == 0) return true;
    bool good = true;
    for (int t = 0; t < count; ++t) {
      const int32_t begin = first(rows[t]), end = first(rows[t] + 1);
      good &= (begin >= 0) & (end >= begin) & (end <= terms_.outliers) & (end - begin <= channels_);
    }
    if (!good) return false;
    uint8_t largest = 0;
    for (int t = 0, step = running ? count : 1; t < count; t += step)
      for (int32_t i = first(rows[t]); i < first(rows[t + step - 1] + 1); ++i) largest = std::max(largest, terms_.channel[i]);
    return largest < channels_;
  }

  // Calls step(t, channel, value) for every outlier of the rows.
  template <class Rows, class Step>
  void for_each(const Rows& rows, int count, Step&& step) const {
    if (!none()) typed(terms_.delta, terms_.delta_dtype, [&](auto* delta) { for_each(delta, rows, count, step); });
  }

  // Where the outliers of a row begin, and those of the row before it end.
  int32_t first(int64_t row) const { return terms_.first[row]; }

 private:
  static constexpr int kAtOnce = 8;  // written at once, for speed, even if fewer are needed
  using Some = int32_t __attribute__((vector_size(4 * kAtOnce)));

  template <class T, class Rows, class Step>
  void for_each(const T* delta, const Rows& rows, int count, Step&& step) const {
    for (int t = 0; t < count; t += kTile) {
      const int found = list(rows, t, std::min(t + kTile, count));
      for (int i = 0; i < found; ++i) step(owner_[i], int(terms_.channel[entry_[i]]), to_float(delta[entry_[i]]));
    }
  }

  // Rows and places of the outliers of the rows from `begin` to `end`; returns how many there are. They are listed before they
  // are worked on, because a loop over the few of each row would be mispredicted at its end every time.
  template <class Rows>
  int list(const Rows& rows, int begin, int end) const {
    const Some numbers = {0, 1, 2, 3, 4, 5, 6, 7};
    int32_t *const owner = owner_, *const entry = entry_;
    int count = 0;
    for (int t = begin; t < end; ++t) {
      const int32_t from = first(rows[t]), size = first(rows[t] + 1) - from;
      const Some owners = Some{} + t;
      int i = 0;
      do {
        const Some entries = numbers + (from + i);
        std::memcpy(owner + count + i, &owners, sizeof owners);
        std::memcpy(entry + count + i, &entries, sizeof entries);
      } while ((i += kAtOnce) < size);
      count += size;
    }
    return count;
  }

  const Correction& terms_;
  const int64_t channels_;
  Buffer<int32_t> owner_, entry_;
};

}  // namespace kvpress
