// Pairs of places (query, key) of attention, the rows of tables that they address, and the passes over these rows.
//
// Which pairs count: place of the key before that of the query, at a distance d = start + query - 1 - key below the window, both in one
// segment. Pairs are visited table by table, sample by sample, query by query: the rows of one table lie in few pages. The ids of a
// block of pairs are known before the first row of it is read, so rows are fetched ahead of their use.
//
// A source tells which rows: `table(t)` and `sample(t, b)` prepare it, `rows(j, key, n, ids)` gives the ids of query j with n keys from
// `key` on.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels.h"
#include "vectors.h"

#ifdef LUTJAX_LEVEL
namespace lutjax {
namespace {

constexpr int64_t kPairs = 512;  // of a block: their ids stay in the first cache
constexpr int64_t kAhead = 16;   // pairs between the one that is read and the one that is fetched
constexpr int64_t kLanes = 16;   // sums of products are made in so many parts, the same at every level of instructions

struct Pairs {
  int64_t n_samples, n_queries, n_keys, start, window;
  const int32_t *query_segments, *key_segments;  // null: all are of one segment

  int64_t first_key(int64_t query) const { return most<int64_t>(start + query - window, 0); }
  int64_t end_of_keys(int64_t query) const { return least(start + query, n_keys); }
  // Place of the distance of (query, key) in arrays that have one number for each difference key - query, `n_differences` of them.
  int64_t difference(int64_t query, int64_t key) const { return n_queries - 1 - query + key; }
  int64_t n_differences() const { return most<int64_t>(n_queries + n_keys - 1, 0); }
  // Distance of such a place, as one of those that positions are known for.
  int64_t distance(int64_t difference, int64_t n_distances) const {
    return clamped<int64_t>(start + n_queries - 2 - difference, n_distances);
  }
  int64_t count() const {  // of a sample, of all segments
    int64_t n = 0;
    for (int64_t j = 0; j < n_queries; ++j) n += most<int64_t>(end_of_keys(j) - first_key(j), 0);
    return n;
  }
};

// A part of the work: ranges of tables, samples and queries.
struct Part {
  int64_t table, end_of_tables, sample, end_of_samples, query, end_of_queries;
};

// Pairs of one query and neighbouring keys. `at`: the first one's number in its block.
struct Run {
  int64_t table, sample, query, key, n, at;
};

// The runs of a part, one after the other.
template <class Source>
class Walk {
 public:
  Walk(const Pairs& pairs, const Part& part, Source& source)
      : pairs_(pairs), part_(part), source_(source), table_(part.table - 1), sample_(part.end_of_samples), query_(part.end_of_queries) {}

  // False if there is none left.
  bool next(int64_t most_pairs, Run* run) {
    while (key_ >= end_)
      if (!next_query()) return false;
    int64_t end = least(end_, key_ + most_pairs);
    if (of_keys_ != nullptr) {
      int64_t last = key_ + 1;
      while (last < end && of_keys_[last] == segment_) ++last;
      end = last;
    }
    *run = Run{table_, sample_, query_, key_, end - key_, 0};
    key_ = end;
    skip();
    return true;
  }

 private:
  bool next_query() {
    if (part_.query >= part_.end_of_queries || part_.sample >= part_.end_of_samples) return false;
    if (++query_ >= part_.end_of_queries) {
      query_ = part_.query;
      if (++sample_ >= part_.end_of_samples) {
        sample_ = part_.sample;
        if (table_ + 1 >= part_.end_of_tables) {
          sample_ = part_.end_of_samples, query_ = part_.end_of_queries;  // still none when asked again
          return false;
        }
        ++table_;
        source_.table(table_);
      }
      source_.sample(table_, sample_);
    }
    key_ = pairs_.first_key(query_);
    end_ = pairs_.end_of_keys(query_);
    if (pairs_.key_segments != nullptr) {
      of_keys_ = pairs_.key_segments + sample_ * pairs_.n_keys;
      segment_ = pairs_.query_segments[sample_ * pairs_.n_queries + query_];
    }
    skip();
    return true;
  }

  void skip() {  // keys of other segments
    if (of_keys_ != nullptr)
      while (key_ < end_ && of_keys_[key_] != segment_) ++key_;
  }

  const Pairs& pairs_;
  const Part part_;
  Source& source_;
  int64_t table_, sample_, query_, key_ = 0, end_ = 0;
  const int32_t* of_keys_ = nullptr;
  int32_t segment_ = 0;
};

// ------------------------------------------------------------------------------------- fixed point
// Sums are of float addends, or of int32 ones: trunc(value * scale), too large ones the largest, NaN 0. Sums wrap.
inline int32_t quantised(float x, float scale) {
  constexpr float kLimit = 2147483520.0f;  // the largest float below 2**31
  x *= scale;
  x = x > kLimit ? kLimit : x < -kLimit ? -kLimit : x;
  return x != x ? 0 : static_cast<int32_t>(x);
}
inline void addend(float x, float, float* to) { *to = x; }
inline void addend(float x, float scale, int32_t* to) { *to = quantised(x, scale); }
inline void add_to(float* sum, float x) { *sum += x; }
inline void add_to(int32_t* sum, int32_t x) { *sum = static_cast<int32_t>(static_cast<uint32_t>(*sum) + static_cast<uint32_t>(x)); }

// ------------------------------------------------------------------------------------- rows
template <class W>
inline void fetch_row(const W* row, int64_t n_bytes) {
  const char* p = reinterpret_cast<const char*>(row);
  for (int64_t at = 0; at < n_bytes; at += 64) prefetch(p + at);
}

// Sums plus n rows, N outputs of them, in registers. `fetch`: bytes of later rows to fetch on the way.
template <int N, class W, class S>
inline void add_rows_to(S* sums, const W* const* rows, int64_t n, int64_t first, float scale, int64_t fetch) {
  S of[N];
  for (int o = 0; o < N; ++o) of[o] = sums[first + o];
  for (int64_t p = 0; p < n; ++p) {
    if (fetch > 0) fetch_row(rows[p + kAhead], fetch);
    const W* row = rows[p] + first;
    for (int o = 0; o < N; ++o) {
      S x;
      addend(value(row[o]), scale, &x);
      add_to(&of[o], x);
    }
  }
  for (int o = 0; o < N; ++o) sums[first + o] = of[o];
}

template <class W, class S>
void sum_rows(S* sums, const W* const* rows, int64_t n, int64_t n_outputs, float scale, int64_t fetch) {
  int64_t o = 0;
  for (; o + 32 <= n_outputs; o += 32, fetch = 0) add_rows_to<32>(sums, rows, n, o, scale, fetch);
  for (; o + 8 <= n_outputs; o += 8, fetch = 0) add_rows_to<8>(sums, rows, n, o, scale, fetch);
  for (; o < n_outputs; ++o, fetch = 0) add_rows_to<1>(sums, rows, n, o, scale, fetch);
}

template <class S>
inline void add_row(S* to, const S* from, int64_t n_outputs) {
  int64_t o = 0;
  for (; o + 16 <= n_outputs; o += 16) {
    S sum[16];
    for (int l = 0; l < 16; ++l) {
      sum[l] = to[o + l];
      add_to(&sum[l], from[o + l]);
    }
    for (int l = 0; l < 16; ++l) to[o + l] = sum[l];
  }
  for (; o < n_outputs; ++o) add_to(&to[o], from[o]);
}

// <dy, a - b>: rows are subtracted before they are multiplied, as their products may be large.
template <class W>
inline float product_of_difference(const W* a, const W* b, const float* dy, int64_t n_outputs, float, const float*) {
  float lanes[kLanes] = {};
  int64_t o = 0;
  for (; o + kLanes <= n_outputs; o += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += (value(a[o + l]) - value(b[o + l])) * dy[o + l];
  for (int64_t l = 0; o + l < n_outputs; ++l) lanes[l] += (value(a[o + l]) - value(b[o + l])) * dy[o + l];
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

template <class W>
inline float product_of_difference(const W* a, const W* b, const float* dy, int64_t n_outputs, float scale, const int32_t*) {
  uint32_t sum = 0;
  for (int64_t o = 0; o < n_outputs; ++o) sum += static_cast<uint32_t>(quantised((value(a[o]) - value(b[o])) * dy[o], scale));
  return static_cast<float>(static_cast<int32_t>(sum)) / scale;
}

// The surrogate derivative.
inline float slope(float margin) {
  const float a = 1 + std::fabs(margin);
  return (margin > 0 ? 0.5f : -0.5f) / (a * a);
}

// ------------------------------------------------------------------------------------- blocks of pairs
// Runs of pairs, and for each pair the addresses of the rows that it reads, in `Source::kWays` ways. Rows are fetched when
// the pair kAhead before theirs is read. `more`: what else the source says of each pair.
template <class W, class Source>
struct Block {
  static constexpr int kWays = Source::kWays;

  int64_t n = 0, n_runs = 0;
  Run runs[kPairs];
  W* rows[kWays][kPairs + kAhead];
  typename Source::More more;

  void fill(Walk<Source>& walk, Source& source, W* weights, int64_t n_rows, int64_t n_outputs) {
    int32_t ids[kWays][kPairs];
    n = n_runs = 0;
    Run run;
    while (n < kPairs && walk.next(kPairs - n, &run)) {
      run.at = n;
      source.rows(run, ids, &more);
      W* table = weights + run.table * n_rows * n_outputs;
      for (int way = 0; way < kWays; ++way)
        for (int64_t p = n; p < n + run.n; ++p) rows[way][p] = table + ids[way][p] * n_outputs;
      n += run.n;
      runs[n_runs++] = run;
    }
  }

  void continue_with(const Block& next) {
    for (int way = 0; way < kWays; ++way)
      for (int64_t p = 0; p < kAhead; ++p) rows[way][n + p] = p < next.n ? next.rows[way][p] : rows[way][n - 1];
  }

  void fetch(int64_t p, int64_t n_bytes) const {
    for (int way = 0; way < kWays; ++way) fetch_row(rows[way][p], n_bytes);
  }
};

// Calls visit(block) for the blocks of a part.
template <class W, class Source, class Visit>
void for_each_block(const Pairs& pairs, const Part& part, Source& source, W* weights, int64_t n_rows, int64_t n_outputs, const Visit& visit) {
  Walk<Source> walk(pairs, part, source);
  Block<W, Source> blocks[2];
  blocks[0].fill(walk, source, weights, n_rows, n_outputs);
  for (int64_t p = 0; p < least(kAhead, blocks[0].n); ++p) blocks[0].fetch(p, n_outputs * static_cast<int64_t>(sizeof(W)));
  for (int now = 0; blocks[now].n > 0; now = 1 - now) {
    Block<W, Source>& next = blocks[1 - now];
    next.fill(walk, source, weights, n_rows, n_outputs);
    blocks[now].continue_with(next);
    visit(blocks[now]);
  }
}

// ------------------------------------------------------------------------------------- passes
// Arrays of a call of either attention, as far as they are the same.
template <class W>
struct Tables {
  W* weights;
  int64_t n_tables, n_rows, n_outputs;
  int64_t row_bytes() const { return n_outputs * static_cast<int64_t>(sizeof(W)); }
};

// Work below this many bytes of rows is not worth waking other threads.
constexpr int64_t kSmall = 1 << 17;

template <class Body>
void in_parallel_if(bool large, const Call& call, int64_t n, const Body& body) {
  if (large)
    in_parallel(call, n, body);
  else
    for (int64_t i = 0; i < n; ++i) body(i);
}

// A fixed division of tables, samples and queries into parts.
struct Parts {
  Parts(const Pairs& pairs, int64_t n_tables, int64_t samples, int64_t queries, int64_t wanted)
      : pairs(pairs), n_tables(n_tables), samples(most<int64_t>(samples, 1)), queries(most<int64_t>(queries, 1)) {
    of_samples = (pairs.n_samples + this->samples - 1) / this->samples;
    of_queries = (pairs.n_queries + this->queries - 1) / this->queries;
    const int64_t places = most<int64_t>(of_samples * of_queries, 1);
    of_tables = clamped<int64_t>((wanted + places - 1) / places, n_tables + 1);
    tables = of_tables > 0 ? (n_tables + of_tables - 1) / of_tables : 0;
    of_tables = tables > 0 ? (n_tables + tables - 1) / tables : 0;
  }
  int64_t n() const { return of_tables * of_samples * of_queries; }
  int64_t chunk(int64_t i) const { return i % of_tables; }
  int64_t group(int64_t i) const { return i / of_tables / of_queries; }  // of samples
  // Late queries, which have the most keys, come first.
  Part operator[](int64_t i) const {
    const int64_t t = chunk(i) * tables, b = group(i) * samples, j = (of_queries - 1 - i / of_tables % of_queries) * queries;
    return Part{t, least(t + tables, n_tables), b, least(b + samples, pairs.n_samples), j, least(j + queries, pairs.n_queries)};
  }
  const Pairs& pairs;
  const int64_t n_tables, samples, queries;
  int64_t of_tables, of_samples, of_queries, tables;
};

constexpr int64_t kParts = 32;  // wanted, for balance

// y[b, j, :] = sum of the rows of all pairs of j and all tables. `source(i)`: a source for part i.
template <class W, class S, class Sources>
const char* forward_pass(const Call& call, const Pairs& pairs, const Tables<const W>& tables, S* y, float scale, const Sources& sources_of) {
  const int64_t n_outputs = tables.n_outputs, lines = pairs.n_samples * pairs.n_queries, size = lines * n_outputs;
  if (size == 0) return nullptr;
  const int64_t n_pairs = pairs.count();
  const bool large = pairs.n_samples * n_pairs * tables.n_tables * tables.row_bytes() >= kSmall;
  const int64_t fitting = most<int64_t>(32768 / (n_outputs * static_cast<int64_t>(sizeof(S))), 1);  // lines of y in the first cache
  const Parts parts(pairs, tables.n_tables, fitting / most<int64_t>(pairs.n_queries, 1), fitting, kParts / 2);
  const int64_t chunks = parts.of_tables;
  S* sums = chunks == 1 ? y : allocated<S>(call, size * most<int64_t>(chunks, 1));
  const auto sources = sources_of(call, parts);
  if (sums == nullptr || !sources) return "out of memory";
  in_parallel_if(large, call, parts.n(), [&](int64_t i) {
    const Part part = parts[i];
    S* own = sums + parts.chunk(i) * size;
    for (int64_t b = part.sample; b < part.end_of_samples; ++b)
      std::memset(own + (b * pairs.n_queries + part.query) * n_outputs, 0,
                  static_cast<size_t>((part.end_of_queries - part.query) * n_outputs) * sizeof(S));
    auto source = sources[i];
    for_each_block(pairs, part, source, tables.weights, tables.n_rows, n_outputs, [&](const auto& block) {
      for (int64_t r = 0; r < block.n_runs; ++r) {
        const Run& run = block.runs[r];
        sum_rows(own + (run.sample * pairs.n_queries + run.query) * n_outputs, block.rows[0] + run.at, run.n, n_outputs, scale, tables.row_bytes());
      }
    });
  });
  if (chunks != 1) {
    constexpr int64_t kPiece = 4096;
    in_parallel_if(large && size > 8 * kPiece, call, (size + kPiece - 1) / kPiece, [&](int64_t i) {
      const int64_t end = least(size, (i + 1) * kPiece);
      for (int64_t o = i * kPiece; o < end; ++o) y[o] = 0;
      for (int64_t c = 0; c < chunks; ++c)
        for (int64_t o = i * kPiece; o < end; ++o) add_to(&y[o], sums[c * size + o]);
    });
  }
  return nullptr;
}

// Adds values[b, j, :] to the rows of all pairs of j. A part has tables of its own; `fresh`: they are set to zero first.
template <class S, class Sources>
const char* add_pass(const Call& call, const Pairs& pairs, const Tables<S>& tables, const S* values, bool fresh, const Sources& sources_of) {
  const int64_t n_outputs = tables.n_outputs, n_pairs = pairs.count();
  const bool large = (pairs.n_samples * n_pairs + (fresh ? tables.n_rows : 0)) * tables.n_tables * tables.row_bytes() >= kSmall;
  const Parts parts(pairs, tables.n_tables, most<int64_t>(pairs.n_samples, 1), most<int64_t>(pairs.n_queries, 1), kParts);
  const auto sources = sources_of(call, parts);
  if (!sources) return "out of memory";
  const int64_t n = (tables.n_tables + most<int64_t>(parts.tables, 1) - 1) / most<int64_t>(parts.tables, 1);
  in_parallel_if(large, call, n, [&](int64_t i) {
    const int64_t first = i * parts.tables, end = least(first + parts.tables, tables.n_tables);
    if (fresh)
      std::memset(static_cast<void*>(tables.weights + first * tables.n_rows * n_outputs), 0,
                  static_cast<size_t>((end - first) * tables.n_rows * n_outputs) * sizeof(S));
    if (pairs.n_samples * n_pairs * n_outputs == 0) return;
    auto source = sources[i];
    for_each_block(pairs, parts[i], source, tables.weights, tables.n_rows, n_outputs, [&](const auto& block) {
      for (int64_t r = 0; r < block.n_runs; ++r) {
        const Run& run = block.runs[r];
        const S* from = values + (run.sample * pairs.n_queries + run.query) * n_outputs;
        for (int64_t p = run.at; p < run.at + run.n; ++p) {
          block.fetch(p + kAhead, tables.row_bytes());
          add_row(block.rows[0][p], from, n_outputs);
        }
      }
    });
  });
  return nullptr;
}

}  // namespace
}  // namespace lutjax
#endif
