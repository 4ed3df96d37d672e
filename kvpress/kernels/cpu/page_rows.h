// SPDX-License-Identifier: Apache-2.0
// Selects the pages of each stream with the largest bounds, while these are still in the cache, and lists their rows.
#pragma once

#include "scores.h"
#include "select.h"

namespace kvpress {

// Bounds and selection of the pages of the same streams; bounds are not stored.
struct PageRows {
  Scores pages;
  Select choice;
  const int64_t* starts;   // [N], first row of each stream
  const int64_t* lengths;  // [N], rows of each stream; only its last page may be shorter than `size`
  int32_t* rows;           // [N, width], 0 past the listed rows
  int64_t* counts;         // [N]
  int64_t size;            // rows of a page
  int64_t width;

  // List the rows of the chosen pages of stream n.
  void list(int64_t n) const {
    const int32_t* page = choice.rows + n * choice.width;
    int32_t* const out = rows + n * width;
    int64_t count = 0;
    for (int64_t i = 0; i < choice.counts[n]; ++i) {
      const int64_t first = (page[i] - choice.starts[n]) * size;
      const int64_t end = std::min(first + size, lengths[n]);
      for (int64_t rank = first; rank < end && count < width; ++rank) out[count++] = int32_t(starts[n] + rank);
    }
    counts[n] = count;
    std::fill(out + count, out + width, 0);
  }
};

// Return -1, the number of a stream outside the pages, or N plus the number of a stream whose pages cannot be selected.
template <class Worker>
int page_rows(const PageRows& p) {
  if (const int bad = first_outside(p.pages); bad >= 0) return bad;
  if (const int bad = first_impossible(p.choice); bad >= 0) return int(p.pages.streams) + bad;
  parallel(p.pages.streams, p.pages.threads, [&] {
    return [&, worker = std::make_shared<Worker>(p.pages), selector = std::make_shared<Selector>(p.choice),
            scores = std::shared_ptr<float[]>(new float[p.choice.capacity])](int64_t n) {
      for (int64_t at = 0; at < p.pages.counts[n]; at += Worker::kRows) worker->score(n, at, scores.get());
      selector->choose(n, scores.get());
      p.list(n);
    };
  });
  return -1;
}

}  // namespace kvpress
