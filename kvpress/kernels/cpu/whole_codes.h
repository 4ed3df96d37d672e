// SPDX-License-Identifier: Apache-2.0
// Rows of codes in a single plane. Three-bit codes are expanded to four bits, once per row: that takes fewer instructions than
// products with each of their two planes.
#pragma once

#include "buffer.h"
#include "codes.h"

namespace kvpress {

class WholeCodes {
 public:
  // Expanded codes are kept for at most `most` rows.
  WholeCodes(const PackedRows& rows, int most)
      : rows_(rows), plane_(plane_of(rows.side())), written_(rows.side().bits == 3 ? most * plane_.bytes : 0) {}

  // Layout of the single plane.
  static Plane plane_of(const Rows& side) {
    return side.bits == 3 ? Plane{0, int(side.channels / 2), 4, 0} : *Planes(side).begin();
  }
  const Plane& plane() const { return plane_; }

  // Get the address of each row's codes, expanded if they have three bits; the last row is repeated up to `padded`.
  void locate(const int64_t* rows, int count, int padded, const uint8_t** out) {
    rows_.locate(rows, count, padded, out);
    if (rows_.side().bits != 3) return;
    const int bytes = plane_.bytes;
    uint8_t* row = written_;
    for (int t = 0; t < count; ++t, row += bytes) {
      if (bytes == 16)
        write_halves<uint64_t, uint32_t>(out[t], row);
      else if (bytes == 32)
        write_halves<Two, uint64_t>(out[t], row);
      else if (bytes == 64)
        write_halves<Four, Two>(out[t], row);
      else if (bytes > 64)
        write_row<Two>(out[t], bytes / 4, row);
      else if (bytes > 32)
        write_row<uint64_t>(out[t], bytes / 4, row);
      else
        write_row<uint8_t>(out[t], bytes / 4, row);
      out[t] = row;
    }
    for (int t = count; t < padded; ++t) out[t] = out[count - 1];
  }

 private:
  using Two = uint64_t __attribute__((vector_size(16)));
  using Four = uint64_t __attribute__((vector_size(32)));

  template <class Word>
  static KVPRESS_INLINE Word read(const uint8_t* from) {
    Word word;
    std::memcpy(&word, from, sizeof word);
    return word;
  }

  // The low plane has two bits of each channel, parts 0 to 3, in `2 * eighth` bytes. The high plane has the third bits: those
  // of the first half of the low bytes in bits 0, 2, 4 and 6 of its bytes, those of the second half in bits 1, 3, 5 and 7.
  template <class Word>
  static KVPRESS_INLINE void write_row(const uint8_t* from, int eighth, uint8_t* to) {
    constexpr int kStep = int(sizeof(Word));
    for (int next = 0; next < eighth; next += kStep) {
      const int j = std::min(next, eighth - kStep);  // the last word may write some bytes twice
      const Word third = read<Word>(from + 2 * eighth + j);
      write_out(read<Word>(from + j), third, to + j, 2 * eighth);
      write_out(read<Word>(from + eighth + j), Word(third >> 1), to + eighth + j, 2 * eighth);
    }
  }

  // The same for rows whose eighth is one word, with both halves in one vector.
  template <class Words, class Word>
  static KVPRESS_INLINE void write_halves(const uint8_t* from, uint8_t* to) {
    constexpr int kEighth = int(sizeof(Word));
    const Word third = read<Word>(from + 2 * kEighth);
    write_out(read<Words>(from), side_by_side(third, third >> 1), to, 2 * kEighth);
  }
  static KVPRESS_INLINE uint64_t side_by_side(uint32_t a, uint32_t b) { return a | uint64_t(b) << 32; }
  static KVPRESS_INLINE Two side_by_side(uint64_t a, uint64_t b) { return Two{a, b}; }
  static KVPRESS_INLINE Four side_by_side(Two a, Two b) { return Four{a[0], a[1], b[0], b[1]}; }

  // Parts 0 and 2 share bytes of two four-bit codes, and so do parts 1 and 3, `half` bytes later.
  template <class Word>
  static KVPRESS_INLINE void write_out(Word low, Word third, uint8_t* to, int half) {
    const Word two = Word(Word{} + 0x3333333333333333u), one = Word(Word{} + 0x4444444444444444u);
    const Word even = Word((low & two) | (third << 2 & one)), odd = Word((low >> 2 & two) | (third & one));
    std::memcpy(to, &even, sizeof even);
    std::memcpy(to + half, &odd, sizeof odd);
  }

  const PackedRows& rows_;
  const Plane plane_;
  Buffer<uint8_t> written_;
};

}  // namespace kvpress
