// SPDX-License-Identifier: Apache-2.0
// Quantises and packs rows. The arithmetic is exact where possible, so that all instruction-set levels give the same bits.
#pragma once

#include "codes.h"
#include "split.h"
#include "tile.h"

namespace kvpress {

struct Quantise {
  const void* x;      // [R, channels]
  uint8_t* codes;     // [R, channels * bits / 8]
  void* scale;        // [ceil(R / group_rows), channels / group_channels]
  void* zero;         // same shape as scale
  float* largest;     // largest magnitude, or NaN if a value is not finite
  int64_t rows;
  int64_t channels;
  int64_t stride;     // elements between two rows of x
  int64_t dtype;      // of x
  int64_t bits;
  int64_t group_rows;
  int64_t group_channels;
  int64_t parameters;  // dtype of scale and zero
  int64_t threads;
};

// State of one thread.
class Quantiser {
 public:
  explicit Quantiser(const Quantise& p)
      : p_(p),
        x_(p.x, p.dtype),
        planes_(describe(p)),
        channels_(int(p.channels)),
        groups_(int(p.channels / p.group_channels)),
        levels_(float((1 << p.bits) - 1)),
        row_(channels_ + kLanes),
        negated_(channels_ + kLanes),
        high_(channels_ + kLanes),
        zero_(channels_ + kLanes),
        step_(channels_ + kLanes),
        codes_(channels_ + kLanes) {}

  // Quantise the rows of one group. Return their largest magnitude, or NaN if a value is not finite.
  float quantise(int64_t group) {
    const int64_t first = group * p_.group_rows, end = std::min(p_.rows, first + p_.group_rows);
    const bool finite = find_range(first, end);
    const float largest = set_parameters(group);
    for (int64_t r = first; r < end; ++r) {
      if (p_.group_rows > 1) load_row(r);
      encode();
      pack(p_.codes + r * p_.channels * p_.bits / 8);
    }
    return finite ? largest : NAN;
  }

 private:
  static Rows describe(const Quantise& p) {
    Rows side{};
    side.channels = p.channels;
    side.bits = p.bits;
    return side;
  }

  void load_row(int64_t r) { x_.read(r * p_.stride, channels_, row_); }

  // Compute the largest x and -x of each channel over the rows. Return whether all values are finite.
  bool find_range(int64_t first, int64_t end) {
    std::fill_n(static_cast<float*>(negated_), channels_, -INFINITY);
    std::fill_n(static_cast<float*>(high_), channels_, -INFINITY);
    F bad = set1(0.f);
    for (int64_t r = first; r < end; ++r) {
      load_row(r);
      for (int c = 0; c < channels_; c += kLanes) {
        const F x = load(row_ + c);
        store(negated_ + c, max(load(negated_ + c), sub(set1(0.f), x)));
        store(high_ + c, max(load(high_ + c), x));
        bad = add(bad, sub(x, x));  // zero, or NaN
      }
    }
    return sum(bad) == 0;
  }

  // Store the scales and zeros of the group, and set zero_ and step_ of each channel. Return the largest magnitude.
  float set_parameters(int64_t group) {
    const int width = int(p_.group_channels);
    float largest = 0;
    for (int g = 0; g < groups_; ++g) {
      const float least = -largest_of(negated_ + g * width, width), most = largest_of(high_ + g * width, width);
      largest = std::max({largest, std::abs(least), std::abs(most)});
      const float zero = put(p_.zero, group * groups_ + g, least);
      const float scale = put(p_.scale, group * groups_ + g, std::max((most - zero) / levels_, 0.f));
      std::fill_n(zero_ + g * width, width, zero);
      std::fill_n(step_ + g * width, width, scale == 0 ? 1.f : scale);
    }
    return largest;
  }

  static float largest_of(const float* x, int count) {
    float out = -INFINITY;
    int i = 0;
    if (count >= kLanes) {
      F best = load(x);
      for (i = kLanes; i + kLanes <= count; i += kLanes) best = max(best, load(x + i));
      out = max_lane(best);
    }
    for (; i < count; ++i) out = std::max(out, x[i]);
    return out;
  }

  // Store a parameter and return its rounded value.
  float put(void* out, int64_t at, float value) const {
    if (p_.parameters == kFloat32) return static_cast<float*>(out)[at] = value;
    const f16 half = to_half(value);
    static_cast<f16*>(out)[at] = half;
    return to_float(half);
  }

  void encode() {
    for (int c = 0; c < channels_; c += kLanes) {
      const F exact = div(sub(load(row_ + c), load(zero_ + c)), load(step_ + c));
      store(codes_ + c, round(min(max(exact, set1(0.f)), set1(levels_))));
    }
  }

  void pack(uint8_t* out) const {
    for (const Plane& plane : planes_) switch (plane.bits) {
        case 1:
          pack<1>(plane, codes_, out + plane.offset);
          break;
        case 2:
          pack<2>(plane, codes_, out + plane.offset);
          break;
        case 4:
          pack<4>(plane, codes_, out + plane.offset);
          break;
        default:
          pack<8>(plane, codes_, out + plane.offset);
      }
  }

  template <int kBits>
  static void pack(const Plane& plane, const uint8_t* __restrict code, uint8_t* __restrict out) {
    const int bytes = plane.bytes, shift = plane.shift;
    for (int j = 0; j < bytes; ++j) {
      uint8_t byte = 0;
      for (int part = 0; part < 8 / kBits; ++part)
        byte |= (code[part * bytes + j] >> shift & ((1 << kBits) - 1)) << (part * kBits);
      out[j] = byte;
    }
  }

  const Quantise& p_;
  const Elements x_;
  const Planes planes_;
  const int channels_, groups_;
  const float levels_;
  Buffer<float> row_, negated_, high_, zero_, step_;
  Buffer<uint8_t> codes_;
};

constexpr int kQuantiseRows = 64;  // rows of one task

// Return the larger number, or NaN if either is NaN.
inline float worse(float a, float b) { return a != a || a > b ? a : b; }

inline void quantise_all(const Quantise& p) {
  const int64_t groups = (p.rows + p.group_rows - 1) / p.group_rows;
  const int64_t step = std::max<int64_t>(1, kQuantiseRows / p.group_rows), tasks = (groups + step - 1) / step;
  std::vector<float> largest(tasks, 0.f);
  parallel(tasks, p.threads, [&] {
    return [&, worker = std::make_shared<Quantiser>(p)](int64_t i) {
      for (int64_t g = i * step; g < std::min(groups, (i + 1) * step); ++g)
        largest[i] = worse(largest[i], worker->quantise(g));
    };
  });
  *p.largest = 0;
  for (float x : largest) *p.largest = worse(*p.largest, x);
}

}  // namespace kvpress
