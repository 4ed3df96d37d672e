// Attention on rows of codes into books of centroids, four queries at a time.
//
// Keys: a table holds the product of every centroid with the four queries, so a logit is a sum of table entries. Keys
// coded before their rotary embedding are put together from centroids and rotated instead. Values: weights are
// collected per code, and one product with the book at the end turns them into the output.
#pragma once

#include "codebook.h"
#include "logits.h"
#include "split.h"

namespace kvpress {

struct Lookup {
  const float* q;                 // [N, M, D]
  const int64_t* starts;          // [N]
  const int64_t* lengths;         // [N]
  const int64_t* book_of_stream;  // [N]
  const int32_t* positions;       // [R], or null when keys are not rotated
  const float* cos;               // [angles, rotary / 2]
  const float* sin;
  const float* bias;              // [R] or null
  float* out;                     // [N, M, Dv]
  float* lse;                     // [N, M]
  int64_t rows;
  int64_t streams;
  int64_t queries;
  int64_t books;
  int64_t angles;
  int64_t rotary;                 // leading channels that are rotated
  int64_t causal;
  int64_t threads;
  double scale;
  double softcap;                 // 0 when absent
  Coded keys;
  Coded values;
};

constexpr int kLookupRows = 1024;    // rows whose weights are held at once
constexpr int kLookupPiece = 16384;  // long enough to pay for the table and for the product with the book
constexpr float kSlack = 16;         // a weight may reach 2^16 before everything collected is scaled down

// One thread's state.
template <class KeyCode, class ValueCode>
class LookupWorker {
 public:
  explicit LookupWorker(const Lookup& p)
      : p_(p),
        base_two_(p.scale, p.softcap),
        keys_(p.keys),
        values_(p.values),
        dim_(round_up(p.keys.channels, kLanes)),
        table_(p.positions ? 0 : int64_t(p.keys.groups()) * keys_.size()),
        weights_(int64_t(p.values.groups()) * values_.size()),
        scores_(kLookupRows + kLanes),
        queries_(dim_),
        book_(std::max(p.keys.entries * p.keys.coupled, p.values.entries * p.values.coupled)),
        rows_(p.positions ? 4 * dim_ : 0),
        key_(p.positions ? dim_ : 0) {}

  void attend(const Piece& piece) {
    for (int64_t m = 0; m < p_.queries; m += 4) attend_four(piece, m, int(std::min<int64_t>(4, p_.queries - m)));
  }

 private:
  void attend_four(const Piece& piece, int64_t m, int live) {
    const int64_t start = p_.starts[piece.stream], book = p_.book_of_stream[piece.stream];
    load_queries(p_.q + (piece.stream * p_.queries + m) * p_.keys.channels, live);
    if (!p_.positions) fill_table(book);
    clear_weights();
    for (int i = 0; i < 4; ++i) base_[i] = -INFINITY, sum_[i] = 0;
    for (int64_t at = piece.begin; at < piece.end; at += kLookupRows) {
      const int count = int(std::min<int64_t>(kLookupRows, piece.end - at));
      if (p_.positions)
        score_rotated(start + at, count, book);
      else
        score(start + at, count);
      finish(piece.stream, m, start, at, count);
      weigh(count);
      collect(start + at, count);
    }
    float* out = piece.out + m * p_.values.channels;
    mix(book, live, out);
    for (int i = 0; i < live; ++i)
      piece.lse[m + i] = sum_[i] == 0 ? -INFINITY : (base_[i] + std::log2(sum_[i])) * kLn2;
  }

  // Queries times the factor of the logits, by channel and, for rotated keys, by query as well.
  void load_queries(const float* q, int live) {
    const int channels = int(p_.keys.channels);
    for (int i = 0; i < 4; ++i)
      for (int c = 0; c < channels; ++c) {
        const float x = i < live ? q[i * channels + c] * base_two_.factor() : 0.f;
        queries_[c][i] = x;
        if (p_.positions) rows_[i * dim_ + c] = x;
      }
  }

  void fill_table(int64_t book) {
    const int coupled = int(p_.keys.coupled), entries = int(p_.keys.entries);
    for (int g = 0; g < keys_.groups(); ++g) {
      const float* centroids = read_book(p_.keys, book, g, book_);
      const Quad* q = queries_ + g * coupled;
      Quad* out = table_ + int64_t(g) * keys_.size();
      for (int e = 0; e < entries; ++e, centroids += coupled) {
        Quad sum = q[0] * centroids[0];
        for (int j = 1; j < coupled; ++j) sum += q[j] * centroids[j];
        out[e] = sum;
      }
    }
  }

  void clear_weights() {
    for (int g = 0; g < values_.groups(); ++g)
      std::memset(static_cast<void*>(weights_ + int64_t(g) * values_.size()), 0, p_.values.entries * sizeof(Quad));
  }

  // scores[t] = sum over groups of table[group, code].
  void score(int64_t row, int count) {
    const int size = keys_.size();
    const int64_t stride = keys_.stride();
    for_group_tiles(keys_.groups(), [&](auto tile, int g) {
      const KeyCode* codes = keys_.row(row) + g;
      Quad *tables = table_ + int64_t(g) * size, *scores = scores_;
      for (int t = 0; t < count; ++t, codes += stride) {
        Quad found[4] = {};
        CodeRows<KeyCode>::template for_entries<tile>(
            codes, tables, size, [&](const Quad* entry, int k) KVPRESS_INLINE_LAMBDA { found[k] = *entry; });
        const Quad sum = tile == 4 ? (found[0] + found[1]) + (found[2] + found[3]) : found[0];
        scores[t] = g == 0 ? sum : scores[t] + sum;
      }
    });
  }

  void score_rotated(int64_t row, int count, int64_t book) {
    const int64_t size = p_.keys.half ? 2 : 4;
    const char* centroids = static_cast<const char*>(p_.keys.book) + book * p_.keys.channels * p_.keys.entries * size;
    for (int t = 0; t < count; ++t) {
      const KeyCode* codes = keys_.row(row + t);
      if (p_.keys.half)
        assemble(codes, reinterpret_cast<const f16*>(centroids));
      else
        assemble(codes, reinterpret_cast<const float*>(centroids));
      rotate(p_.positions[row + t]);
      F sums[4] = {set1(0.f), set1(0.f), set1(0.f), set1(0.f)};
      for (int c = 0; c < dim_; c += kLanes) {
        const F key = load(key_ + c);
        for (int i = 0; i < 4; ++i) sums[i] = fma(key, load(rows_ + i * dim_ + c), sums[i]);
      }
      store_sums(reinterpret_cast<float*>(scores_ + t), sums[0], sums[1], sums[2], sums[3]);
    }
  }

  // The key of a row of codes, as it was before its rotary embedding.
  template <class T>
  void assemble(const KeyCode* codes, const T* centroids) {
    switch (p_.keys.coupled) {
      case 8:
        return assemble<T, 8>(codes, centroids);
      case 4:
        return assemble<T, 4>(codes, centroids);
      case 2:
        return assemble<T, 2>(codes, centroids);
      default:
        return assemble<T, 0>(codes, centroids);
    }
  }

  template <class T, int kCoupled>
  void assemble(const KeyCode* codes, const T* centroids) {
    const int coupled = kCoupled ? kCoupled : int(p_.keys.coupled), groups = keys_.groups();
    const int64_t step = p_.keys.entries * coupled;
    const auto centroid = [&](int g) { return centroids + g * step + keys_.entry(codes[g]) * coupled; };
    int g = 0;
#if defined(__AVX512F__)
    // Whole vectors, because a load that spans two recent stores waits for both.
    if constexpr (kCoupled == 8 && sizeof(T) == 2)
      for (; g + 2 <= groups; g += 2) {
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(centroid(g)));
        const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(centroid(g + 1)));
        _mm512_storeu_ps(key_ + g * 8, _mm512_cvtph_ps(_mm256_set_m128i(high, low)));
      }
#endif
    for (; g < groups; ++g) {
      const T* from = centroid(g);
      if constexpr (kCoupled == kLanes)
        store(key_ + g * coupled, load(from));
      else
        for (int j = 0; j < coupled; ++j) key_[g * coupled + j] = to_float(from[j]);
    }
  }

  // Turn channels (i, i + rotary / 2) of the key by the angles of its position.
  void rotate(int64_t position) {
    const int half = int(p_.rotary / 2);
    const float *cos = p_.cos + position * half, *sin = p_.sin + position * half;
    float *low = key_, *high = key_ + half;
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
      const F a = load(low + i), b = load(high + i), c = load(cos + i), s = load(sin + i);
      store(low + i, sub(mul(a, c), mul(b, s)));
      store(high + i, fma(b, c, mul(a, s)));
    }
    for (; i < half; ++i) {
      const float a = low[i], b = high[i];
      low[i] = a * cos[i] - b * sin[i];
      high[i] = b * cos[i] + a * sin[i];
    }
  }

  // Cap and bias, and minus infinity where a query sees nothing.
  void finish(int64_t stream, int64_t m, int64_t start, int64_t at, int count) {
    float* scores = flat();
    if (base_two_.capped())
      for (int i = 0; i < 4 * count; i += kLanes) store(scores + i, base_two_.finish(load(scores + i)));
    if (p_.bias)
      for (int t = 0; t < count; ++t) scores_[t] += p_.bias[start + at + t] * kLog2e;
    if (p_.causal)
      for (int i = 0; i < 4; ++i) {
        const int64_t limit = p_.lengths[stream] - p_.causal + (m + i) % p_.causal + 1;
        for (int t = int(std::clamp<int64_t>(limit - at, 0, count)); t < count; ++t) scores_[t][i] = -INFINITY;
      }
    const Quad nothing = Quad{} - INFINITY;
    for (int t = count; t % (kLanes / 4); ++t) scores_[t] = nothing;
  }

  // Logits become weights 2^(logit - base); the base follows the maximum at a distance.
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
    if (moved) scale_down(keep);
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

  void scale_down(Quad keep) {
    for (int i = 0; i < 4; ++i) sum_[i] *= keep[i];
    for (int g = 0; g < values_.groups(); ++g) {
      Quad* weights = weights_ + int64_t(g) * values_.size();
      for (int e = 0; e < p_.values.entries; ++e) weights[e] *= keep;
    }
  }

  // weights[group, code] += scores[t] for every row t.
  void collect(int64_t row, int count) {
    const int size = values_.size();
    const int64_t stride = values_.stride();
    for_group_tiles(values_.groups(), [&](auto tile, int g) {
      const ValueCode* codes = values_.row(row) + g;
      Quad *tables = weights_ + int64_t(g) * size, *scores = scores_;
      for (int t = 0; t < count; ++t, codes += stride)
        CodeRows<ValueCode>::template for_entries<tile>(
            codes, tables, size,
            [weight = scores[t]](Quad* entry, int) KVPRESS_INLINE_LAMBDA { *entry += weight; });
    });
  }

  // out[i, channel] = weights of the codes times their centroids, over the sum of all weights.
  void mix(int64_t book, int live, float* out) {
    const int coupled = int(p_.values.coupled);
    Quad inverse{};
    for (int i = 0; i < live; ++i) inverse[i] = sum_[i] == 0 ? 0.f : 1 / sum_[i];
    for (int g = 0; g < values_.groups(); ++g) {
      const float* centroids = read_book(p_.values, book, g, book_);
      const Quad* weights = weights_ + int64_t(g) * values_.size();
      int j = 0;
      const auto write = [&](const Quad* sums, int width) {
        for (int k = 0; k < width; ++k)
          for (int i = 0; i < live; ++i) out[i * p_.values.channels + g * coupled + j + k] = (sums[k] * inverse)[i];
        j += width;
      };
      for (; j + 8 <= coupled;) write(mixed<8>(weights, centroids + j).sums, 8);
      for (; j < coupled;) write(mixed<1>(weights, centroids + j).sums, 1);
    }
  }

  template <int kWidth>
  struct Mixed {
    Quad sums[kWidth];
  };

  template <int kWidth>
  Mixed<kWidth> mixed(const Quad* weights, const float* centroids) const {
    const int64_t coupled = p_.values.coupled;
    Mixed<kWidth> mixed{};
    for (int e = 0; e < p_.values.entries; ++e, centroids += coupled)
      for (int k = 0; k < kWidth; ++k) mixed.sums[k] += weights[e] * centroids[k];
    return mixed;
  }

  float* flat() { return reinterpret_cast<float*>(static_cast<Quad*>(scores_)); }

  const Lookup& p_;
  const BaseTwo base_two_;
  const CodeRows<KeyCode> keys_;
  const CodeRows<ValueCode> values_;
  const int dim_;
  Buffer<Quad> table_, weights_, scores_, queries_;
  Buffer<float> book_, rows_, key_;
  float base_[4], sum_[4];
};

// The first stream that refers to rows, a book or angles that are not stored, or -1.
inline int first_invalid(const Lookup& p) {
  for (int64_t n = 0; n < p.streams; ++n) {
    const int64_t start = p.starts[n], length = p.lengths[n], book = p.book_of_stream[n];
    if (start < 0 || length < 0 || start + length > p.rows || book < 0 || book >= p.books) return int(n);
    uint32_t position = 0;
    for (int64_t t = 0; p.positions && t < length; ++t) position = std::max(position, uint32_t(p.positions[start + t]));
    if (p.positions && length && position >= p.angles) return int(n);
  }
  return -1;
}

template <class KeyCode, class ValueCode>
int look_up_all(const Lookup& p) {
  if (const int bad = first_invalid(p); bad >= 0) return bad;
  Problem shape{};  // what merge() needs to know
  shape.queries = p.queries;
  shape.values.channels = p.values.channels;
  const int64_t out_size = p.queries * p.values.channels, slot_size = out_size + p.queries;
  std::vector<Piece> pieces;
  std::vector<int64_t> first(p.streams + 1, 0);
  for (int64_t n = 0; n < p.streams; ++n) {
    for (int64_t at = 0; at == 0 || at < p.lengths[n]; at += kLookupPiece)
      pieces.push_back({n, at, std::min(at + kLookupPiece, p.lengths[n]), nullptr, nullptr});
    first[n + 1] = int64_t(pieces.size());
  }
  Buffer<float> scratch(int64_t(pieces.size()) > p.streams ? int64_t(pieces.size()) * slot_size : 0);
  for (size_t i = 0; i < pieces.size(); ++i) {
    Piece& piece = pieces[i];
    const bool whole = first[piece.stream + 1] - first[piece.stream] == 1;
    piece.out = whole ? p.out + piece.stream * out_size : scratch + int64_t(i) * slot_size;
    piece.lse = whole ? p.lse + piece.stream * p.queries : piece.out + out_size;
  }
  using Worker = LookupWorker<KeyCode, ValueCode>;
  parallel(int64_t(pieces.size()), p.threads, [&] {
    return [&, worker = std::make_shared<Worker>(p)](int64_t i) { worker->attend(pieces[i]); };
  });
  for (int64_t n = 0; n < p.streams; ++n)
    if (const int64_t count = first[n + 1] - first[n]; count > 1)
      merge(shape, &pieces[first[n]], count, p.out + n * out_size, p.lse + n * p.queries);
  return -1;
}

}  // namespace kvpress
