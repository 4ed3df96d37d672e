// SPDX-License-Identifier: Apache-2.0
// Memory that is asked for a line at a time, in between products.
//
// A prefetch waits until the processor has room for one more request. Many in a row hold up all that follows until memory has
// answered the first of them; the same requests spread over the work cost a few instructions.
#pragma once

#include <algorithm>

#include "simd.h"

namespace kvpress {

// A stretch of memory, of which some may be left to ask for. Loops take a copy, which stays in registers, and put it back.
class Ahead {
 public:
  // Any address will do, but one that cannot be read takes the processor long to see.
  explicit Ahead(const void* at = nullptr, int64_t bytes = 0)
      : at_(static_cast<const char*>(at)), end_(static_cast<const char*>(at) + bytes) {}

  // Exactly so many calls of next() follow, each of which asks for a line or a part of one.
  void spread(int steps) { step_ = std::min(share(steps), kLine); }
  KVPRESS_INLINE void next() { prefetch_line(at_), at_ += step_; }

  // About as many calls of next_lines() follow, each of which asks for some lines.
  void spread_lines(int steps) { step_ = round_up(share(steps), kLine); }
  KVPRESS_INLINE void next_lines() {
    for (const char* const end = std::min(at_ + step_, end_); at_ < end; at_ += kLine) prefetch_line(at_);
  }

  // Asks for what is left at once.
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
