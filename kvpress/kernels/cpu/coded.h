// SPDX-License-Identifier: Apache-2.0
// Attention on codes that index codebooks of centroids, four queries at a time.
//
// Keys: a table has the product of every centroid with the four queries, so a logit is a sum of table entries.
// Values: weights are summed per table entry, and one product with the codebook at the end turns them into the output.
// A few rows do not pay for tables; these rows, and keys that were encoded before their rotary embedding, are assembled from
// centroids. Keys need no assembly if each centroid is a full vector or part of one. Scalar codebooks of three and four bits,
// and of fewer where tables do not pay, need neither: shuffles look up the levels.
#pragma once

#include "logits.h"
#include "coded_keys.h"
#include "coded_values.h"
#include "split.h"

namespace kvpress {

constexpr float kSlack = 16;  // a weight may reach 2^16 before all sums are scaled down

constexpr int64_t kCodedPiece = 16384;  // rows of one piece: enough to pay for the tables

// State of one thread; no piece has more than `longest` rows.
template <class KeyIndex, class ValueIndex>
class CodedWorker {
 public:
  CodedWorker(const CodedProblem& p, int64_t longest)
      : p_(p),
        base_two_(p.scale, p.softcap),
        keys_(p, longest),
        values_(p, longest),
        scores_(kCodedRows + kLanes) {}

  bool attend(const Piece& piece) {
    const Stretch rows = p_.stretch(piece.stream, piece.begin);
    const int count = int(piece.end - piece.begin);
    if (!keys_.stores(rows, count) || !values_.stores(rows, count)) return false;
    for (int t = 0; t < count && p_.added.products; ++t)
      if (!p_.added.holds(piece.stream, rows[t])) return false;
    for (int64_t m = 0; m < p_.queries; m += 4) attend_four(piece, m, int(std::min<int64_t>(4, p_.queries - m)));
    return true;
  }

 private:
  void attend_four(const Piece& piece, int64_t m, int live) {
    const int64_t book = p_.book_of(piece.stream), length = piece.end - piece.begin;
    const float* q = p_.q + (piece.stream * p_.queries + m) * p_.keys.channels();
    keys_.begin(q, live, base_two_.factor(), piece.stream, length);
    values_.begin(book, length);
    for (int i = 0; i < 4; ++i) base_[i] = -INFINITY, sum_[i] = 0;
    for (int64_t at = piece.begin; at < piece.end; at += kCodedRows) {
      const int count = int(std::min<int64_t>(kCodedRows, piece.end - at));
      const Stretch rows = p_.stretch(piece.stream, at);
      keys_.score(rows, count, scores_);
      finish(piece.stream, m, live, rows, at, count);
      weigh(count);
      values_.correct(rows, count, scores_);
      scale_rows(p_.values, rows, count);
      values_.collect(rows, count, scores_);
    }
    Quad inverse;
    for (int i = 0; i < 4; ++i) inverse[i] = sum_[i] == 0 ? 0.f : 1 / sum_[i];
    values_.finish(live, inverse, piece.out + m * p_.values.channels());
    for (int i = 0; i < live; ++i)
      piece.lse[m + i] = sum_[i] == 0 ? -INFINITY : (base_[i] + std::log2(sum_[i])) * kLn2;
  }

  // Multiply the scores_ of the rows by the row scales.
  void scale_rows(const Coded& side, Stretch rows, int count) {
    if (!side.row_scale) return;
    const auto scale = [&](const auto* factors) {
      for (int t = 0; t < count; ++t) scores_[t] *= to_float(factors[rows[t]]);
    };
    if (side.scale_dtype == kFloat32) return scale(static_cast<const float*>(side.row_scale));
    if (side.scale_dtype == kFloat16) return scale(static_cast<const f16*>(side.row_scale));
    scale(static_cast<const bf16*>(side.row_scale));
  }

  // Add the offsets at the places of the rows.
  KVPRESS_APART void add_offsets(int64_t stream, int64_t m, int live, Stretch rows, int count) {
    for (int i = 0; i < live; ++i) {
      const float* products = p_.added.of(stream * p_.queries + m + i);
      for (int t = 0; t < count; ++t)
        scores_[t][i] += base_two_.factor() * products[p_.added.place(stream, rows[t])];
    }
  }

  // Apply row scales, outliers, offsets, cap and log-weights, and set logits to -inf where a query may not attend.
  void finish(int64_t stream, int64_t m, int live, Stretch rows, int64_t at, int count) {
    float* scores = flat();
    scale_rows(p_.keys, rows, count);
    keys_.correct(rows, count, scores_);
    if (p_.added.products) add_offsets(stream, m, live, rows, count);
    if (base_two_.capped())
      for (int i = 0; i < 4 * count; i += kLanes) store(scores + i, base_two_.finish(load(scores + i)));
    for_log_weights(p_, rows, count, [&](int t, float weight) { scores_[t] += weight * kLog2e; });
    if (p_.causal)
      for (int i = 0; i < 4; ++i) {
        const int64_t limit = p_.lengths[stream] - p_.causal + (m + i) % p_.causal + 1;
        for (int t = int(std::clamp<int64_t>(limit - at, 0, count)); t < count; ++t) scores_[t][i] = -INFINITY;
      }
    const Quad nothing = Quad{} - INFINITY;
    for (int t = count; t % (kLanes / 4); ++t) scores_[t] = nothing;
  }

  // Turn logits into weights 2^(logit - base). The base follows the maximum only if that exceeds it by kSlack.
  void weigh(int count) {
    float* scores = flat();
    F best = set1(-INFINITY);
    for (int i = 0; i < 4 * count; i += kLanes) best = max(best, load(scores + i));
    float lanes[kLanes], shift[kLanes];
    store(lanes, best);
    Quad keep = Quad{} + 1.f;
    bool moved = false;
    for (int i = 0; i < 4; ++i) {
      float top = -INFINITY;
      for (int l = i; l < kLanes; l += 4) top = std::max(top, lanes[l]);
      if (top > base_[i] + kSlack) {
        keep[i] = std::exp2(base_[i] - top);
        base_[i] = top;
        moved = true;
      }
      for (int l = i; l < kLanes; l += 4) shift[l] = base_[i] == -INFINITY ? 0.f : base_[i];
    }
    if (moved) {
      for (int i = 0; i < 4; ++i) sum_[i] *= keep[i];
      values_.scale(keep);
    }
    const F base = load(shift);
    F total = set1(0.f);
    for (int i = 0; i < 4 * count; i += kLanes) {
      const F weight = exp2(sub(load(scores + i), base));
      store(scores + i, weight);
      total = add(total, weight);
    }
    store(lanes, total);
    for (int l = 0; l < kLanes; ++l) sum_[l % 4] += lanes[l];
  }

  float* flat() { return reinterpret_cast<float*>(static_cast<Quad*>(scores_)); }

  const CodedProblem& p_;
  const BaseTwo base_two_;
  CodedKeys<KeyIndex> keys_;
  CodedValues<ValueIndex> values_;
  Buffer<Quad> scores_;
  float base_[4], sum_[4];
};

// Return the first stream with a row whose angles are not stored, or -1. Row numbers must be valid.
inline int first_outside_angles(const CodedProblem& p) {
  for (int64_t n = 0; p.coarse && n < p.streams; ++n) {
    const int64_t length = p.lengths[n];
    const Stretch rows = p.stretch(n, 0);
    const CodedProblem::Places places = p.places(n);
    uint64_t position = 0;
    if (p.listed || p.positions)
      for (int64_t t = 0; t < length; ++t) position = std::max(position, places[rows[t]]);
    else if (length)
      position = std::max(places[rows[0]], places[rows[length - 1]]);
    if (length && position >= uint64_t(p.blocks * kStep)) return int(n);
  }
  return -1;
}

template <class KeyIndex, class ValueIndex>
int attend_codes(const CodedProblem& p) {
  if (const int bad = first_invalid(p); bad >= 0) return bad;
  if (const int bad = first_outside_angles(p); bad >= 0) return bad;
  const int bad = attend_pieces(p, p.values.channels(), {kCodedPiece, kCodedPiece}, [&](int64_t longest) {
    return std::make_shared<CodedWorker<KeyIndex, ValueIndex>>(p, longest);
  });
  mark_not_numbers(p, p.keys.channels(), p.values.channels(), keys_are_levels(p));
  return bad;
}

}  // namespace kvpress
