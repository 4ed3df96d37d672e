// SPDX-License-Identifier: Apache-2.0
// Entry points, compiled once per instruction-set level.
// Each returns -1, or the number of a stream that refers to rows or groups that are not stored.

#include "packed_reader.h"
#include "parts.h"

extern "C" int kvpress_dense(const kvpress::Problem* p) {
  using namespace kvpress;
  switch (p->keys.dtype) {
    case kFloat32:
      return attend_all<DenseReader<FloatDot<float>>>(*p);
    case kFloat16:
      return attend_all<DenseReader<FloatDot<f16>>>(*p);
    default:
#if defined(__AVX512BF16__)
      if (p->bf16_queries) return attend_all<DenseReader<PairDot>>(*p);
#endif
      return attend_all<DenseReader<FloatDot<bf16>>>(*p);
  }
}

extern "C" int kvpress_packed(const kvpress::Problem* p) { return kvpress::attend_all<kvpress::PackedReader>(*p); }

extern "C" int kvpress_parts(const kvpress::Parts* p) { return p->attend(); }
