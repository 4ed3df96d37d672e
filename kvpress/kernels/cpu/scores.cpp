// SPDX-License-Identifier: Apache-2.0
// Entry points of page bounds, label scores and label selection, compiled once per instruction-set level. Each returns -1, or
// the number of a stream outside the storage (label_rows.h and page_rows.h have one more case).

#include "label_rows.h"
#include "page_rows.h"

namespace kvpress {

// Call run() with a null pointer to the worker that bounds the pages.
template <class Run>
int for_bounds(const Scores& p, Run&& run) {
  switch (p.dtype) {
    case kFloat32:
      return run(static_cast<BoundWorker<FloatDot<float>>*>(nullptr));
    case kFloat16:
      return run(static_cast<BoundWorker<FloatDot<f16>>*>(nullptr));
    default:
#if defined(__AVX512BF16__)
      if (p.query_dtype == kBfloat16) return run(static_cast<BoundWorker<PairDot>*>(nullptr));
#endif
      return run(static_cast<BoundWorker<FloatDot<bf16>>*>(nullptr));
  }
}

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

extern "C" int kvpress_bounds(const kvpress::Scores* p) {
  return kvpress::for_bounds(*p, [&](auto* worker) { return kvpress::score_all<std::remove_pointer_t<decltype(worker)>>(*p); });
}

extern "C" int kvpress_page_rows(const kvpress::PageRows* p) {
  return kvpress::for_bounds(
      p->pages, [&](auto* worker) { return kvpress::page_rows<std::remove_pointer_t<decltype(worker)>>(*p); });
}

extern "C" int kvpress_labels(const kvpress::Scores* p) {
  return kvpress::for_labels(*p, [&](auto* worker) { return kvpress::score_all<std::remove_pointer_t<decltype(worker)>>(*p); });
}

extern "C" int kvpress_label_rows(const kvpress::LabelRows* p) {
  return kvpress::for_labels(
      p->labels, [&](auto* worker) { return kvpress::label_rows<std::remove_pointer_t<decltype(worker)>>(*p); });
}
