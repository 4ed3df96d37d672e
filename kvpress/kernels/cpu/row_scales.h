// SPDX-License-Identifier: Apache-2.0
// Scales of quantised rows, each of which belongs to one row or to a few neighbouring rows.
#pragma once

#include "codes.h"
#include "words.h"

namespace kvpress {

// Scales or zeros of rows as float32 [groups, stride]. Zeros that are not stored are -zero_point * scale.
class RowScales {
 public:
  explicit RowScales(const PackedRows& rows, bool zeros = false)
      : rows_(rows),
        base_(zeros && rows.side().zero ? rows.side().zero : rows.side().scale),
        groups_(int(rows.scales_per_row())),
        factor_(zeros && !rows.side().zero ? -float(rows.side().zero_point) : 1.f) {}

  void read(const int64_t* rows, int count, float* out, int stride) const {
    read_stored(rows, count, out, stride);
    for (int g = 0; factor_ != 1.f && g < groups_; ++g)
      for (int t = 0; t < count; ++t) out[g * stride + t] *= factor_;
  }

 private:
  void read_stored(const int64_t* rows, int count, float* out, int stride) const {
    switch (rows_.side().dtype) {
      case kFloat16:
        return read(static_cast<const f16*>(base_), rows, count, out, stride);
      case kFloat8:
        return read(static_cast<const e4m3*>(base_), rows, count, out, stride);
      case kPower:
        return read(static_cast<const e8m0*>(base_), rows, count, out, stride);
      default:
        read(static_cast<const float*>(base_), rows, count, out, stride);
    }
  }

  template <class S>
  void read(const S* scale, const int64_t* rows, int count, float* out, int stride) const {
    if (rows_.side().group_rows == 1 && groups_ <= 4) {
      bool running = true;
      for (int t = 0; t < count; ++t) running &= rows[t] == rows[0] + t;
      const S* const from = scale + rows[0] * groups_;
      if (running && groups_ == 1) return spread<1>(from, count, out, stride);
      if (running && groups_ == 2) return spread<2>(from, count, out, stride);
      if (running && groups_ == 4) return spread<4>(from, count, out, stride);
    }
    if constexpr (sizeof(S) == 1) return read_bytes(scale, rows, count, out, stride);
    for (int t = 0; t < count; ++t) {
      const S* from = scale + rows_.group(rows[t]) * groups_;
      for (int g = 0; g < groups_; ++g) out[g * stride + t] = to_float(from[g]);
    }
  }

  // With a constant number of groups, compilers turn the loop into shuffles.
  template <int kGroups, class S>
  static void spread(const S* from, int count, float* out, int stride) {
    if constexpr (sizeof(S) == 1) return spread_bytes<kGroups>(from, count, out, stride);
    for (int g = 0; g < kGroups; ++g)
      for (int t = 0; t < count; ++t) out[g * stride + t] = to_float(from[t * kGroups + g]);
  }

  template <int kGroups, class S>
  static void spread_bytes(const S* from, int count, float* out, int stride) {
    for (int t = 0; t < count; t += kLanes)
      for (int g = 0; g < kGroups; ++g) {
        int32_t bits[kLanes];
        for (int i = 0; i < kLanes; ++i) bits[i] = from[std::min(t + i, count - 1) * kGroups + g].bits;
        Words words;
        std::memcpy(&words, bits, sizeof words);
        store(out + g * stride + t, wide(S{}, words));
      }
  }

  // Read one-byte scales; four scales of a row are a word.
  template <class S>
  void read_bytes(const S* scale, const int64_t* rows, int count, float* out, int stride) const {
    const int padded = round_up(count, kLanes);
    const uint8_t *from[kChunk], *base = reinterpret_cast<const uint8_t*>(scale);
    if (rows_.side().group_rows == 1)
      for (int t = 0; t < count; ++t) from[t] = base + rows[t] * groups_;
    else
      for (int t = 0; t < count; ++t) from[t] = base + rows_.group(rows[t]) * groups_;
    for (int t = count; t < padded; ++t) from[t] = from[count - 1];
    for (int t = 0; t < padded; t += kLanes)
      for (int at = 0; at < groups_; at += 16) {
        Words column[4];
        transpose_rows(from + t, at, groups_ - at, column);
        for (int g = at; g < std::min(at + 16, groups_); ++g)
          store(out + g * stride + t, wide(S{}, column[(g - at) / 4] >> 8 * (g % 4) & 255));
      }
  }

  static KVPRESS_INLINE F wide(e8m0, Words bits) { return (F)(bits << 23 | ((bits == 0) & 0x00400000)); }
  static KVPRESS_INLINE F wide(e4m3, Words bits) {
    const Words normal = (bits & 127) + (120 << 3) << 20, small = (Words)(__builtin_convertvector(bits & 7, Floats) * 0x1p-9f);
    const Words subnormal = (bits & 0x78) == 0;
    return (F)((subnormal & small) | (~subnormal & normal) | bits >> 7 << 31);
  }

  const PackedRows& rows_;
  const void* const base_;
  const int groups_;
  const float factor_;  // of the stored numbers
};

}  // namespace kvpress
