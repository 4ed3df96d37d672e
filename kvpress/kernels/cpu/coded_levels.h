// SPDX-License-Identifier: Apache-2.0
// Scalar codebooks of up to four bits: keys and values of attention on codes, without tables of products.
#pragma once

#include "centroids.h"
#include "level_keys.h"
#include "level_values.h"
#include "variants.h"

namespace kvpress {

// Get the address of each row's codes; the last row is repeated up to `padded`.
inline void locate(const Coded& side, Stretch rows, int first, int count, int padded, const uint8_t** out) {
  for (int t = 0; t < count; ++t) out[t] = side.codes + rows[first + t] * side.stride;
  for (int t = count; t < padded; ++t) out[t] = out[count - 1];
}

// Prefetch range of the codes of as many rows after these, if row numbers are consecutive.
inline Ahead next_codes(const Coded& side, Stretch rows, int first, int count) {
  return Ahead(side.codes + rows[rows.listed ? first : first + count] * side.stride, rows.listed ? 0 : count * side.stride);
}

// Set the tables to channel `part` of each centroid.
template <class Levels>
inline void set_levels(const Coded& side, int64_t book, int part, float* scratch, Levels& tables) {
  for (int g = 0; g < side.book_groups; ++g)
    tables.set(g, read_book(side, book, g, scratch) + part, int(side.entries), int(side.coupled));
}

// Return whether keys are decoded by looking up levels.
inline bool keys_are_levels(const CodedProblem& p) {
  if (p.keys.coupled > (p.coarse ? 1 : 2) || (p.coarse && p.rotary % 8)) return false;
  return LevelKeys<Tables>::fits(p.keys.bits, p.keys.groups);
}
inline bool values_are_levels(const Coded& side) {
  return side.coupled == 1 && LevelValues<Tables>::fits(side.bits, side.groups);
}

template <class Levels>
class CodedLevelKeys {
  static constexpr int kRows = LevelKeys<Levels>::kRows;
  static constexpr bool kRotates = std::is_same_v<Levels, Tables>;

 public:
  explicit CodedLevelKeys(const CodedProblem& p)
      : p_(p),
        groups_(int(p.keys.groups)),
        half_(p.coarse ? int(p.rotary / 2) : 0),
        keys_(int(p.keys.bits), groups_, int(p.keys.book_groups), int(p.keys.coupled), int(p.keys.coupled)),
        book_(p.keys.group_size()),
        turned_(half_ * 8),
        queries_(p.keys.channels()),
        fine_(half_ * 2 * kStep + kRows),
        angles_(half_ * 2 * kRows),
        products_(4 * kRows),
        ones_(kRows) {
    std::fill_n(static_cast<float*>(ones_), kRows, 1.f);
    for (int position = 0; position < (half_ ? kStep : 0); ++position)
      for (int i = 0; i < 2 * half_; ++i)
        fine_[(i % half_ * 2 + i / half_) * kStep + position] = p.fine[position * 2 * half_ + i];
  }

  // Set queries, by channel.
  void begin(const Quad* queries, int64_t stream) {
    const int coupled = int(p_.keys.coupled);
    for (int part = 0; part < coupled; ++part) {
      set_levels(p_.keys, p_.book_of(stream), part, book_, keys_.levels(part));
      for (int g = 0; g < groups_; ++g) queries_[part * groups_ + g] = queries[g * coupled + part];
    }
    keys_.take(queries_, coupled);
    stream_ = stream;
    block_ = ~uint64_t(0);
  }

  void score(Stretch rows, int count, Quad* scores) {
    for (int t = 0, size; t < count; t += size) {
      size = std::min(kRows, count - t);
      const float* angles = fine_;
      int64_t step = 2 * kStep;
      if (half_) {
        uint64_t positions[kRows];
        const bool running = positions_of_block(rows, t, size, positions);
        turn_queries(positions[0] / kStep);
        angles = running ? fine_ + positions[0] % kStep : copy_angles(positions, size);
        if (!running) step = 2 * kRows;
      }
      const uint8_t* codes[kRows];
      locate(p_.keys, rows, t, size, kRows, codes);
      Ahead ahead = next_codes(p_.keys, rows, t, size);
      ahead.spread_lines((groups_ - half_) / 4);
      keys_.load(codes, size);
      std::fill_n(static_cast<float*>(products_), 4 * kRows, 0.f);
      if constexpr (kRotates)
        if (half_) keys_.multiply_rotated(turned_, half_, angles, step, step / 2, products_, kRows, ahead);
      for (int part = 0; part < p_.keys.coupled; ++part)
        keys_.template multiply<4>(part, 2 * half_, groups_, ones_, products_, kRows, ahead, part);
      for (int i = 0; i < size; ++i)
        scores[t + i] = Quad{products_[i], products_[kRows + i], products_[2 * kRows + i], products_[3 * kRows + i]};
    }
  }

 private:
  static Quad* quad(float* base, int i) { return reinterpret_cast<Quad*>(base) + i; }

  // Get the positions of rows from `first` on that are in one block; `size` becomes their number. Return whether they are
  // consecutive.
  bool positions_of_block(Stretch rows, int first, int& size, uint64_t* positions) const {
    const CodedProblem::Places places = p_.places(stream_);
    bool running = true;
    int i = 0;
    for (; i < size; ++i) {
      positions[i] = places[rows[first + i]];
      if (positions[i] / kStep != positions[0] / kStep) break;
      running &= positions[i] == positions[0] + i;
    }
    size = i;
    return running;
  }

  // Copy the cosines and sines of scattered positions, by pair.
  const float* copy_angles(const uint64_t* positions, int size) {
    for (int t = 0; t < size; ++t)
      for (int i = 0; i < 2 * half_; ++i) angles_[i * kRows + t] = fine_[i * kStep + positions[t] % kStep];
    return angles_;
  }

  // Rotate the queries backwards by the angles of a block.
  void turn_queries(uint64_t block) {
    if (block == block_) return;
    block_ = block;
    const float *cosine = p_.coarse + block * 2 * half_, *sine = cosine + half_;
    for (int i = 0; i < half_; ++i) {
      const Quad low = queries_[i], high = queries_[half_ + i];
      *quad(turned_, i) = low * cosine[i] + high * sine[i];
      *quad(turned_, half_ + i) = high * cosine[i] - low * sine[i];
    }
  }

  const CodedProblem& p_;
  const int groups_, half_;  // codes of a row; pairs that are rotated
  int64_t stream_ = 0;
  uint64_t block_ = 0;  // block of positions that turned_ is rotated for
  LevelKeys<Levels> keys_;
  Buffer<float> book_, turned_;            // one group of a codebook; rotated queries [rotary, 4]
  Buffer<Quad> queries_;                   // [coupled, groups]
  Buffer<float> fine_, angles_;            // cosines and sines [pairs, 2, kStep]; those of scattered rows [pairs, 2, kRows]
  Buffer<float> products_, ones_;
};

template <class Levels>
class CodedLevelValues {
 public:
  explicit CodedLevelValues(const Coded& side)
      : side_(side),
        values_(int(side.bits), int(side.groups), int(side.book_groups)),
        book_(side.group_size()),
        weights_(4 * kScoreStride) {}

  void begin(int64_t book) { set_levels(side_, book, 0, book_, values_.levels()); }

  // sums[i, channel] += weights[t, i] * value of row t
  void add(Stretch rows, int count, const Quad* weights, float* sums, int stride) {
    for (int t = 0; t < count; t += kChunk) {
      const int size = std::min(kChunk, count - t), padded = round_up(size, kLanes);
      const uint8_t* codes[kChunk];
      locate(side_, rows, t, size, padded, codes);
      values_.load(codes, size);
      for (int i = 0; i < 4; ++i) {
        for (int r = 0; r < size; ++r) weights_[i * kScoreStride + r] = weights[t + r][i];
        std::fill(weights_ + i * kScoreStride + size, weights_ + i * kScoreStride + padded, 0.f);
      }
      Ahead ahead = next_codes(side_, rows, t, size);
      ahead.spread_lines(int(side_.groups) / 4);
      values_.template mix<4>(weights_, size, 0, int(side_.groups), sums, stride, ahead);
    }
  }

 private:
  const Coded& side_;
  LevelValues<Levels> values_;
  Buffer<float> book_, weights_;
};

// Set `kernel` to the reader of one side. Levels are rounded to integers if the model permits it, one codebook serves all
// channels, and keys are not rotated.
template <template <class> class Kernel, class Variant, class... Arguments>
void choose_levels(Variant& kernel, const CodedProblem& p, const Coded& side, bool rotated, const Arguments&... arguments) {
#if defined(KVPRESS_WHOLE_LEVELS)
  if (!p.exact && !rotated && side.book_groups == 1) {
    kernel.template emplace<Kernel<WholeLevels>>(arguments...);
    return;
  }
#endif
  kernel.template emplace<Kernel<Tables>>(arguments...);
}

template <template <class> class Kernel>
using OfLevels = std::variant<std::monostate,
#if defined(KVPRESS_WHOLE_LEVELS)
                              Kernel<WholeLevels>,
#endif
                              Kernel<Tables>>;

}  // namespace kvpress
