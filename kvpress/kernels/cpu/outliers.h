// SPDX-License-Identifier: Apache-2.0
// Outliers: single channels of single rows, added to the decoded rows.
#pragma once

#include "buffer.h"
#include "dense.h"

namespace kvpress {

// Call step(terms) with `terms` cast to a pointer to their type.
template <class Step>
void typed(const void* terms, int64_t dtype, Step&& step) {
  dtype == kFloat16 ? step(static_cast<const f16*>(terms)) : step(static_cast<const float*>(terms));
}

// State of one thread. rows[t] is the number of the t-th row.
class Outliers {
 public:
  Outliers(const Correction& terms, int64_t channels)
      : terms_(terms),
        channels_(channels),
        owner_(none() ? 0 : kTile * (channels + kAtOnce)),
        entry_(none() ? 0 : kTile * (channels + kAtOnce)) {}

  bool none() const { return !terms_.first; }

  // Return whether all outliers and channels of the rows exist. `running`: row numbers are consecutive.
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

  // Call step(t, channel, value) for every outlier of the rows.
  template <class Rows, class Step>
  void for_each(const Rows& rows, int count, Step&& step) const {
    if (!none()) typed(terms_.delta, terms_.delta_dtype, [&](auto* delta) { for_each(delta, rows, count, step); });
  }

  // Index of the first outlier of a row, where those of the previous row end.
  int32_t first(int64_t row) const { return terms_.first[row]; }

 private:
  static constexpr int kAtOnce = 8;  // written at once, for speed, even if a row has fewer
  using Some = int32_t __attribute__((vector_size(4 * kAtOnce)));

  template <class T, class Rows, class Step>
  void for_each(const T* delta, const Rows& rows, int count, Step&& step) const {
    for (int t = 0; t < count; t += kTile) {
      const int found = list(rows, t, std::min(t + kTile, count));
      for (int i = 0; i < found; ++i) step(owner_[i], int(terms_.channel[entry_[i]]), to_float(delta[entry_[i]]));
    }
  }

  // List row and index of each outlier of the rows [begin, end), and return their number. They are listed first because a loop
  // over the few outliers of each row would mispredict its last branch every time.
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
