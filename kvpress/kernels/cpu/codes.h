// SPDX-License-Identifier: Apache-2.0
// Layout of quantised rows, and their decoding to float32 into a tile that stays in the L1 cache.
//
// A row of `channels` codes of b bits is one plane of channels * b / 8 bytes. With P = 8 / b parts, byte j holds channel p *
// (channels / P) + j at bit b * p, so that one load, shift and mask yields neighbouring channels. Three-bit codes are a plane
// of the low two bits followed by a plane of the high bit.
#pragma once

#include <algorithm>
#include <vector>

#include "dense.h"

namespace kvpress {

struct Plane {
  int offset;  // of the first byte within the row
  int bytes;   // per row; also the distance in channels between two parts
  int bits;
  int shift;   // bits of this plane count 2^shift
};

struct Planes {
  explicit Planes(const Rows& side) {
    const int channels = int(side.channels);
    if (side.bits == 3) {
      plane[0] = {0, channels / 4, 2, 0};
      plane[1] = {channels / 4, channels / 8, 1, 2};
      count = 2;
    } else {
      plane[0] = {0, int(channels * side.bits / 8), int(side.bits), 0};
    }
  }
  const Plane* begin() const { return plane; }
  const Plane* end() const { return plane + count; }

  Plane plane[2];
  int count = 1;
};

// True if decoded values have an offset: a zero per group, or a zero point.
inline bool has_zeros(const Rows& side) { return side.zero || side.zero_point != 0; }

// Rows of one side; maps rows of codes to rows of scale and zero.
class PackedRows {
 public:
  explicit PackedRows(const Rows& side)
      : side_(side),
        planes_(side),
        scales_per_row_(side.channels / side.group_channels) {
    while (shift_ < 62 && int64_t(1) << (shift_ + 1) <= side.group_rows) ++shift_;
    if (int64_t(1) << shift_ != side.group_rows) shift_ = -1;
    for (int64_t g = 0; side.lengths && g < side.groups; ++g) ends_.push_back((g ? ends_[g - 1] : 0) + std::max(side.lengths[g], 0));
    const f16* levels = static_cast<const f16*>(side.levels);
    for (int code = 0; levels && code < 1 << side.bits; ++code) levels_[code] = to_float(levels[code]);
  }

  const Rows& side() const { return side_; }
  const Planes& planes() const { return planes_; }
  const uint8_t* codes(int64_t row) const { return static_cast<const uint8_t*>(side_.data) + row * side_.stride; }
  // Get the address of each row's codes; the last row is repeated up to `padded`.
  void locate(const int64_t* rows, int count, int padded, const uint8_t** out) const {
    const uint8_t* base = codes(0);
    const int64_t stride = side_.stride;
    for (int t = 0; t < count; ++t) out[t] = base + rows[t] * stride;
    for (int t = count; t < padded; ++t) out[t] = out[count - 1];
  }

  int64_t scales_per_row() const { return scales_per_row_; }

  // Return the group of a row. It is a shift if possible: a division takes as long as the products with a row.
  int64_t group(int64_t row) const {
    if (!ends_.empty()) return seek(row);
    return shift_ >= 0 ? row >> shift_ : row / side_.group_rows;
  }

  // Return whether the groups of all rows exist.
  bool stores(const int64_t* rows, int count) const {
    if (!side_.lengths) return true;
    int64_t last = -1;
    for (int t = 0; t < count; ++t) last = std::max(last, rows[t]);
    return last < (ends_.empty() ? 0 : ends_.back());
  }

  // Return the number of leading rows that share the group of the first one.
  int run(const int64_t* rows, int count, bool contiguous) const {
    const int64_t first = group(rows[0]);
    const int64_t begin = ends_.empty() ? first * side_.group_rows : first ? ends_[first - 1] : 0;
    const int64_t size = ends_.empty() ? side_.group_rows : ends_[first] - begin;
    if (contiguous) return int(std::min<int64_t>(count, begin + size - rows[0]));
    int end = 1;  // compare with the range: a division per row would cost more than its dot products
    while (end < count && uint64_t(rows[end] - begin) < uint64_t(size)) ++end;
    return end;
  }

  void decode(int64_t row, float* out) const {
    for (const Plane& plane : planes_) switch (plane.bits) {
        case 1:
          unpack<1>(codes(row) + plane.offset, plane, out);
          break;
        case 2:
          unpack<2>(codes(row) + plane.offset, plane, out);
          break;
        case 4:
          unpack<4>(codes(row) + plane.offset, plane, out);
          break;
        default:
          unpack<8>(codes(row) + plane.offset, plane, out);
      }
    if (side_.levels)
      for (int c = 0; c < side_.channels; ++c) out[c] = levels_[int(out[c])];
    switch (side_.dtype) {
      case kFloat16:
        return rescale<f16>(group(row), out);
      case kFloat8:
        return rescale<e4m3>(group(row), out);
      case kPower:
        return rescale<e8m0>(group(row), out);
      default:
        rescale<float>(group(row), out);
    }
  }

  // Prefetch the codes of the rows.
  void prefetch_codes(const int64_t* rows, int count, bool contiguous) const {
    if (contiguous && count > 0) return prefetch_row(codes(rows[0]), count * side_.stride);
    for (int t = 0; t < count; ++t) prefetch_row(codes(rows[t]), side_.stride);
  }

  // Prefetch the scales from the first to the last row.
  void prefetch_scales(const int64_t* rows, int count) const {
    if (count <= 0) return;
    const int64_t first = group(rows[0]), groups = group(rows[count - 1]) - first + 1;
    if (groups < 1 || groups > count) return;
    const int64_t bytes = scales_per_row() * (side_.dtype == kFloat32 ? 4 : side_.dtype == kFloat16 ? 2 : 1);
    prefetch_row(static_cast<const char*>(side_.scale) + first * bytes, groups * bytes);
    if (side_.zero) prefetch_row(static_cast<const char*>(side_.zero) + first * bytes, groups * bytes);
  }

 private:
  // Return the group of a row. Rows mostly ascend, so the last group and the next one are tried before a binary search.
  int64_t seek(int64_t row) const {
    const int64_t last = int64_t(ends_.size()) - 1;
    for (int64_t g = last_group_; g <= std::min(last_group_ + 1, last); ++g)
      if (row < ends_[g] && (g == 0 || row >= ends_[g - 1])) return last_group_ = g;
    last_group_ = std::min<int64_t>(last, std::upper_bound(ends_.begin(), ends_.end(), row) - ends_.begin());
    return last_group_;
  }

  template <int kBits>
  static void unpack(const uint8_t* bytes, const Plane& plane, float* out) {
    const float unit = float(1 << plane.shift);
    for (int part = 0; part < 8 / kBits; ++part, out += plane.bytes)
      for (int j = 0; j < plane.bytes; ++j) {
        const float code = unit * float((bytes[j] >> (part * kBits)) & ((1 << kBits) - 1));
        out[j] = plane.offset ? out[j] + code : code;
      }
  }

  template <class S>
  void rescale(int64_t group, float* out) const {
    const S* scale = static_cast<const S*>(side_.scale) + group * scales_per_row();
    const int channels = int(side_.channels), width = int(side_.group_channels);
    if (!side_.zero) {
      const float point = float(side_.zero_point);
      for (int g = 0; g * width < channels; ++g) {
        const float s = to_float(scale[g]);
        for (int c = g * width; c < (g + 1) * width; ++c) out[c] = (out[c] - point) * s;
      }
      return;
    }
    if constexpr (sizeof(S) == 1) return;  // 8-bit scales have no zeros
    else rescale_and_move(scale, static_cast<const S*>(side_.zero) + group * scales_per_row(), out);
  }

  template <class S>
  void rescale_and_move(const S* scale, const S* zero, float* out) const {
    const int channels = int(side_.channels), width = int(side_.group_channels);
    if (width > 1) {
      for (int g = 0; g * width < channels; ++g) {
        const float s = to_float(scale[g]), z = to_float(zero[g]);
        for (int c = g * width; c < (g + 1) * width; ++c) out[c] = out[c] * s + z;
      }
      return;
    }
    int c = 0;
    for (; c + kLanes <= channels; c += kLanes) store(out + c, fma(load(out + c), load(scale + c), load(zero + c)));
    for (; c < channels; ++c) out[c] = out[c] * to_float(scale[c]) + to_float(zero[c]);
  }

  const Rows& side_;
  const Planes planes_;
  std::vector<int64_t> ends_;  // end row of each group, if `lengths` is set
  mutable int64_t last_group_ = 0;
  const int64_t scales_per_row_;
  int shift_ = 0;  // log2(group_rows), or -1 if this is no power of two
  float levels_[256];
};

}  // namespace kvpress
