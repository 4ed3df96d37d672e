// SPDX-License-Identifier: Apache-2.0
// Entry points of page bounds and label scores for one instruction-set level. Each returns -1, or the number of a stream
// that leaves the storage.

#include "scores.h"

extern "C" int kvpress_bounds(const kvpress::Scores* p) {
  using namespace kvpress;
  switch (p->dtype) {
    case kFloat32:
      return score_all<BoundWorker<FloatDot<float>>>(*p);
    case kFloat16:
      return score_all<BoundWorker<FloatDot<f16>>>(*p);
    default:
#if defined(__AVX512BF16__)
      if (p->query_dtype == kBfloat16) return score_all<BoundWorker<PairDot>>(*p);
#endif
      return score_all<BoundWorker<FloatDot<bf16>>>(*p);
  }
}

extern "C" int kvpress_labels(const kvpress::Scores* p) {
  using namespace kvpress;
  if (p->scale) return score_all<LabelWorker<CodedLabels>>(*p);
#if defined(__AVX512BF16__)
  if (p->dtype == kBfloat16 && p->query_dtype == kBfloat16)
    return score_all<LabelWorker<PlainLabels<PairProduct>>>(*p);
#endif
  return score_all<LabelWorker<PlainLabels<FloatProduct>>>(*p);
}
