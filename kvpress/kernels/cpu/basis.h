// SPDX-License-Identifier: Apache-2.0
// Rows stored in another basis: queries enter that of the keys, outputs leave that of the values (formats/basis.py).
#pragma once

#include "buffer.h"
#include "simd.h"
#include "split.h"

namespace kvpress {

// key or value of stream n = rotation[h] x + centre[n] with h = n % heads. Without `channel`, x = row * scale[n]; with it, the
// entries of a row are digits of the `width` channels of x (formats/digits.py).
struct Basis {
  const float* scale;      // [streams, inner], or null
  const void* rotation;    // [heads, outer, width], or null
  const void* centre;      // [streams, outer], or null
  const int16_t* channel;  // [heads, inner], or null
  const float* weight;     // [heads, inner]: weight of each digit
  int64_t rotation_dtype, centre_dtype;
  int64_t outer, inner, width, heads;

  bool changes() const { return scale || rotation || centre; }

  // Set `to` [inner] to q [outer] in the basis; `x` [width] is scratch.
  void enter(int64_t stream, const float* q, float* to, float* x) const {
    if (!rotation) {
      std::copy_n(q, inner, to);
    } else {
      float* const turned = channel ? x : to;
      std::fill_n(turned, width, 0.f);
      with_rotation(stream, [&](const auto* matrix) { add_rows(matrix, q, turned); });
    }
    const int64_t at = stream % heads * inner;
    for (int64_t s = 0; channel && s < inner; ++s) to[s] = x[channel[at + s]] * weight[at + s];
    for (int64_t c = 0; scale && c < inner; ++c) to[c] *= scale[stream * inner + c];
  }

  // Return the product of q with the centre of a stream.
  float product(int64_t stream, const float* q) const {
    float total = 0;
    for (int64_t d = 0; centre && d < outer; ++d) total += q[d] * centre_at(stream, d);
    return total;
  }

  // Set `out` [outer] to the decoded sum of stored rows `from` [inner], which is overwritten; `x` [width] is scratch.
  void leave(int64_t stream, float* from, float* out, float* x) const {
    for (int64_t c = 0; scale && c < inner; ++c) from[c] *= scale[stream * inner + c];
    const int64_t at = stream % heads * inner;
    if (channel) std::fill_n(x, width, 0.f);
    for (int64_t s = 0; channel && s < inner; ++s) x[channel[at + s]] += from[s] * weight[at + s];
    const float* const turned = channel ? x : from;
    if (rotation)
      with_rotation(stream, [&](const auto* matrix) {
        for (int64_t d = 0; d < outer; ++d) out[d] = dot(turned, matrix + d * width);
      });
    else
      std::copy_n(turned, outer, out);
    for (int64_t d = 0; centre && d < outer; ++d) out[d] += centre_at(stream, d);
  }

 private:
  template <class Use>
  void with_rotation(int64_t stream, Use&& use) const {
    const int64_t at = stream % heads * outer * width;
    if (rotation_dtype == kFloat16)
      use(static_cast<const f16*>(rotation) + at);
    else
      use(static_cast<const float*>(rotation) + at);
  }

  template <class T>
  void add_rows(const T* __restrict matrix, const float* __restrict q, float* __restrict to) const {
    for (int64_t d = 0; d < outer; ++d)
      for (int64_t c = 0; c < width; ++c) to[c] += q[d] * to_float(matrix[d * width + c]);
  }

  float centre_at(int64_t stream, int64_t d) const {
    const int64_t at = stream * outer + d;
    switch (centre_dtype) {
      case kFloat32:
        return static_cast<const float*>(centre)[at];
      case kFloat16:
        return to_float(static_cast<const f16*>(centre)[at]);
      default:
        return to_float(static_cast<const bf16*>(centre)[at]);
    }
  }

  float dot(const float* a, const f16* b) const {
    float total = 0;
    for (int64_t c = 0; c < width; ++c) total += a[c] * to_float(b[c]);
    return total;
  }

  float dot(const float* a, const float* b) const {
    F total = set1(0.f);
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) total = fma(load(a + c), load(b + c), total);
    float rest = 0;
    for (; c < width; ++c) rest += a[c] * b[c];
    return sum(total) + rest;
  }
};

// Bases of the keys and values of one part.
struct Bases {
  Basis keys, values;

  // Attend to a part with attend(one), which returns an invalid stream or -1; `one` and `owner` are those of the part.
  template <class Attend>
  int around(Asked& one, const Attention& part, Attend&& attend) const {
    const int64_t queries = one.streams * one.queries;
    const float* const q = one.q;
    float* const out = one.out;
    Buffer<float> entered(keys.changes() ? queries * keys.inner : 0), sums(values.changes() ? queries * values.inner : 0);
    if (keys.changes()) {
      run(one, part, keys, [&](int64_t m, int64_t owner, float* x) {
        keys.enter(owner, q + m * keys.outer, entered + m * keys.inner, x);
      });
      one.q = entered, one.bf16_queries = 0;
    }
    if (values.changes()) one.out = sums;
    const int bad = attend(one);
    if (bad >= 0) return bad;
    if (values.changes())
      run(one, part, values, [&](int64_t m, int64_t owner, float* x) {
        // A query that sees no row has no output, and no centre.
        if (one.lse[m] == -INFINITY)
          std::fill_n(out + m * values.outer, values.outer, 0.f);
        else
          values.leave(owner, sums + m * values.inner, out + m * values.outer, x);
      });
    for (int64_t m = 0; keys.centre && m < queries; ++m)
      one.lse[m] += float(one.scale) * keys.product(part.owner_of(m / one.queries), q + m * keys.outer);
    return -1;
  }

 private:
  // Run use(query, owner of its stream, scratch), on several threads where a thread has more to do than waking it costs.
  template <class Use>
  static void run(const Asked& one, const Attention& part, const Basis& basis, Use&& use) {
    const int64_t queries = one.streams * one.queries, work = queries * basis.outer * basis.width;
    parallel(queries, std::min<int64_t>(one.threads, 1 + work / (1 << 20)), [&] {
      return [&, x = std::vector<float>(basis.width)](int64_t m) mutable {
        use(m, part.owner_of(m / one.queries), x.data());
      };
    });
  }
};

}  // namespace kvpress
