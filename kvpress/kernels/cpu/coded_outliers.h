// SPDX-License-Identifier: Apache-2.0
// Outliers of rows of codes: single channels that are added to what a row decodes to.
#pragma once

#include "codebook.h"

namespace kvpress {

class CodedOutliers {
 public:
  explicit CodedOutliers(const Coded& side) : terms_(side.correction), channels_(side.channels()) {}

  bool none() const { return !terms_.first; }

  // Whether all outliers and channels that the rows refer to exist.
  bool stores(Stretch rows, int count) const {
    for (int t = 0; !none() && t < count; ++t) {
      const int32_t begin = terms_.first[rows[t]], end = terms_.first[rows[t] + 1];
      if (begin < 0 || end < begin || end > terms_.outliers || end - begin > channels_) return false;
      for (int32_t i = begin; i < end; ++i)
        if (terms_.channel[i] >= channels_) return false;
    }
    return true;
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
    for (int t = 0; t < count; ++t) {
      const int64_t row = rows[t];
      for (int32_t i = terms_.first[row]; i < terms_.first[row + 1]; ++i)
        step(t, int(terms_.channel[i]), to_float(delta[i]));
    }
  }

  const Correction& terms_;
  const int64_t channels_;
};

}  // namespace kvpress
