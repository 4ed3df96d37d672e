// SPDX-License-Identifier: Apache-2.0
// Outliers of rows of codes: single channels that are added to what a row decodes to.
#pragma once

#include "codebook.h"
#include "dense.h"

namespace kvpress {

class CodedOutliers {
 public:
  explicit CodedOutliers(const Coded& side)
      : terms_(side.correction),
        channels_(side.channels()),
        owner_(none() ? 0 : kTile * (channels_ + 1)),
        entry_(none() ? 0 : kTile * (channels_ + 1)) {}

  bool none() const { return !terms_.first; }

  // Whether all outliers and channels that the rows refer to exist.
  bool stores(Stretch rows, int count) const {
    if (none() || count == 0) return true;
    bool good = true;
    for (int t = 0; t < count; ++t) {
      const int32_t begin = terms_.first[rows[t]], end = terms_.first[rows[t] + 1];
      good &= (begin >= 0) & (end >= begin) & (end <= terms_.outliers) & (end - begin <= channels_);
    }
    if (!good) return false;
    uint8_t largest = 0;
    for (int t = 0, step = rows.listed ? 1 : count; t < count; t += step)
      for (int32_t i = terms_.first[rows[t]]; i < terms_.first[rows[t + step - 1] + 1]; ++i)
        largest = std::max(largest, terms_.channel[i]);
    return largest < channels_;
  }

  // Calls step(row in the stretch, channel, value) for every outlier of the rows.
  template <class Step>
  void for_each(Stretch rows, int count, Step&& step) const {
    if (none()) return;
    if (terms_.delta_dtype == kFloat16)
      for_each(static_cast<const f16*>(terms_.delta), rows, count, step);
    else
      for_each(static_cast<const float*>(terms_.delta), rows, count, step);
  }

 private:
  template <class T, class Step>
  void for_each(const T* delta, Stretch rows, int count, Step&& step) const {
    for (int t = 0; t < count; t += kTile) {
      const int found = list(rows, t, std::min(t + kTile, count));
      for (int i = 0; i < found; ++i) step(owner_[i], int(terms_.channel[entry_[i]]), to_float(delta[entry_[i]]));
    }
  }

  // Rows and places of the outliers of the rows from `begin` to `end`; returns how many there are. They are listed before they
  // are worked on, because a loop over the one or two of each row would be mispredicted at its end every time.
  int list(Stretch rows, int begin, int end) const {
    constexpr int kAtOnce = 8;  // written at once, for speed, even if fewer are needed
    int32_t *owner = owner_, *entry = entry_;
    int count = 0;
    for (int t = begin; t < end; ++t) {
      const int64_t row = rows[t];
      const int32_t first = terms_.first[row], size = terms_.first[row + 1] - first;
      int i = 0;
      do {
        std::fill_n(owner + count + i, kAtOnce, t);
        for (int j = 0; j < kAtOnce; ++j) entry[count + i + j] = first + i + j;
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
