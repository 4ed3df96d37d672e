// SPDX-License-Identifier: Apache-2.0
// Selects the rows of each stream whose labels score best, while the scores are still in the cache.
#pragma once

#include "scores.h"
#include "select.h"

namespace kvpress {

// Labels and selection of the same streams; scores are not stored.
struct LabelRows {
  Scores labels;
  Select choice;
};

// Return -1, the number of a stream outside the labels, or N plus the number of a stream whose rows cannot be selected.
template <class Worker>
int label_rows(const LabelRows& p) {
  if (const int bad = first_outside(p.labels); bad >= 0) return bad;
  if (const int bad = first_impossible(p.choice); bad >= 0) return int(p.labels.streams) + bad;
  parallel(p.labels.streams, p.labels.threads, [&] {
    return [&, worker = std::make_shared<Worker>(p.labels), selector = std::make_shared<Selector>(p.choice),
            scores = std::shared_ptr<float[]>(new float[p.choice.capacity])](int64_t n) {
      for (int64_t at = 0; at < p.labels.counts[n]; at += Worker::kRows) worker->score(n, at, scores.get());
      selector->choose(n, scores.get());
    };
  });
  return -1;
}

}  // namespace kvpress
