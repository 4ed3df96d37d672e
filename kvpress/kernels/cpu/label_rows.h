// SPDX-License-Identifier: Apache-2.0
// The rows of each stream whose labels fit its queries best: its scores are chosen from while they are in the processor's cache.
#pragma once

#include "scores.h"
#include "select.h"

namespace kvpress {

// Of the same streams; there are no scores in memory.
struct LabelRows {
  Scores labels;
  Select choice;
};

// Returns -1, the number of a stream that leaves the labels, or, behind those, of one whose rows cannot be chosen.
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
