// SPDX-License-Identifier: Apache-2.0
// Prefetches memory one cache line at a time, between products.
//
// A prefetch stalls until the processor has a free miss buffer. Many in a row delay all later instructions until memory has
// answered the first one; spread over the work, they cost a few instructions.
#pragma once

#include <algorithm>

#include "simd.h"

namespace kvpress {

// A range of memory, part of which may still have to be prefetched. Loops copy it into registers and write it back.
class Ahead {
 public:
  // Any address is allowed, but the processor takes long to reject an unreadable one.
  explicit Ahead(const void* at = nullptr, int64_t bytes = 0)
      : at_(static_cast<const char*>(at)), end_(static_cast<const char*>(at) + bytes) {}

  // Prepare for exactly `steps` calls of next(), each of which prefetches a line or part of one.
  void spread(int steps) { step_ = std::min(share(steps), kLine); }
  KVPRESS_INLINE void next() { prefetch_line(at_), at_ += step_; }

  // Prepare for about `steps` calls of next_lines(), each of which prefetches some lines.
  void spread_lines(int steps) { step_ = round_up(share(steps), kLine); }
  KVPRESS_INLINE void next_lines() {
    for (const char* const end = std::min(at_ + step_, end_); at_ < end; at_ += kLine) prefetch_line(at_);
  }

  // Prefetch all remaining lines.
  void rest() {
    for (; at_ < end_; at_ += kLine) prefetch_line(at_);
  }

 private:
  static constexpr int kLine = 64;

  int share(int steps) const { return (int(end_ - at_) + steps - 1) / steps; }

  const char *at_, *end_;
  int64_t step_ = 0;
};

}  // namespace kvpress
