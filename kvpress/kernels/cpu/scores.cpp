// SPDX-License-Identifier: Apache-2.0
// Entry points of page bounds, label scores and label selection, compiled once per instruction-set level. Each returns -1, or
// the number of a stream outside the storage (label_rows.h has one more case).

#include "label_rows.h"

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

namespace kvpress {

// Call run() with a null pointer to the worker that scores the labels.
template <class Run>
int for_labels(const Scores& p, Run&& run) {
  if (p.scale) return run(static_cast<LabelWorker<CodedLabels>*>(nullptr));
#if defined(__AVX512BF16__)
  if (p.dtype == kBfloat16 && p.query_dtype == kBfloat16) return run(static_cast<LabelWorker<PlainLabels<PairProduct>>*>(nullptr));
#endif
  return run(static_cast<LabelWorker<PlainLabels<FloatProduct>>*>(nullptr));
}

}  // namespace kvpress

extern "C" int kvpress_labels(const kvpress::Scores* p) {
  return kvpress::for_labels(*p, [&](auto* worker) { return kvpress::score_all<std::remove_pointer_t<decltype(worker)>>(*p); });
}

extern "C" int kvpress_label_rows(const kvpress::LabelRows* p) {
  return kvpress::for_labels(
      p->labels, [&](auto* worker) { return kvpress::label_rows<std::remove_pointer_t<decltype(worker)>>(*p); });
}
