// Attention pairs (query, key), their addressed table rows, and the passes over these rows.
//
// A pair counts if the key precedes the query, its distance d = start + query - 1 - key is below the window, both are in the same
// segment, and the block mask selects it. Pairs are visited table by table, sample by sample, query by query: one table's rows occupy
// few pages. A block's row ids are computed before its first row is read, so rows can be prefetched.
//
// A source returns row ids: `sample(t, b)` prepares it, `rows(run, ids, more)` writes the ids for a run. `distances(t, b)` prepares
// distance-dependent values: once per table, or once per sample if samples have their own starts.
//
// A reach maps rows to outputs: all outputs, or the slots' targets.
#pragma once

#include "rules.h"
#include "slots.h"

#ifdef LUTJAX_LEVEL
namespace lutjax {
namespace {

constexpr int64_t kPairs = 512;        // of a block: their ids stay in the first cache
constexpr int64_t kPairsAhead = 64;    // pairs between the one whose rows are read and the one whose rows are fetched
constexpr int64_t kSmall = 1 << 17;    // bytes of rows that are not worth waking other threads
constexpr int64_t kParts = 32;         // of the work, for balance
constexpr int64_t kInRegisters = 64;   // outputs that are summed in registers

struct Pairs {
  int64_t n_samples, n_queries, n_keys, window;
  const int32_t* starts;  // of each sample
  bool same_start;        // one for all samples
  const int32_t *query_segments, *key_segments;  // null: all are of one segment
  const int32_t* mask;                           // of blocks of queries and keys [n_query_blocks, n_key_blocks]; null: all count
  int64_t n_query_blocks, n_key_blocks, of_queries, of_keys;

  int64_t start(int64_t sample) const { return starts[same_start ? 0 : sample]; }
  int64_t first_key(int64_t sample, int64_t query) const { return most<int64_t>(start(sample) + query - window, 0); }
  int64_t end_of_keys(int64_t sample, int64_t query) const { return least(start(sample) + query, n_keys); }
  // Place of the distance of (query, key) in arrays that have one number for each difference key - query, `n_differences` of them.
  int64_t difference(int64_t query, int64_t key) const { return n_queries - 1 - query + key; }
  int64_t n_differences() const { return most<int64_t>(n_queries + n_keys - 1, 0); }
  // Distance for such a difference, clamped to distances with known positions.
  int64_t distance(int64_t sample, int64_t difference, int64_t n_distances) const {
    return clamped<int64_t>(start(sample) + n_queries - 2 - difference, n_distances);
  }
  // Mask row for a query's block.
  const int32_t* blocks(int64_t query) const { return mask + least(query / of_queries, n_query_blocks - 1) * n_key_blocks; }
  // The first key from `key` on, below `end`, with a counted (or uncounted) block; `end` if there is none.
  int64_t next_key(const int32_t* blocks, int64_t key, int64_t end, bool counts) const {
    while (key < end && (blocks[least(key / of_keys, n_key_blocks - 1)] != 0) != counts) key = (key / of_keys + 1) * of_keys;
    return least(key, most(end, int64_t{0}));
  }
  int64_t count() const {  // of all samples and segments
    int64_t n = 0;
    for (int64_t b = 0; b < (same_start ? least<int64_t>(n_samples, 1) : n_samples); ++b)
      for (int64_t j = 0; j < n_queries; ++j) {
        const int64_t end = end_of_keys(b, j);
        for (int64_t key = first_key(b, j), last; key < end; key = last) {
          last = end;
          if (mask != nullptr) {
            key = next_key(blocks(j), key, end, true);
            last = next_key(blocks(j), key, end, false);
          }
          n += last - key;
        }
      }
    return same_start ? n * n_samples : n;
  }
};

// What both attentions are given first: `lutjax_cpu/_pairs.py`. Behind the tables are arrays of their own, then values [B, Lq, O] of a gradient or
// an update. start: int32, one or [B]. segments: [B, Lq], [B, Lk], and mask: [blocks of queries, of keys], looked at if there are any. targets:
// [T or 1, R or 1, K], of no table if rows reach all outputs. weights: [T, R, O or K].
enum Inputs { kStart, kQuerySegments, kKeySegments, kMask, kTargets, kWeights, kQueries, kKeys, kOwn };
enum Integers { kWindow, kSegments, kFixed, kOfQueries, kOfKeys, kOutputs, kOwnIntegers };
enum Numbers { kScale, kOwnNumbers };

Pairs pairs_of(const Array* inputs, const int64_t* integers) {
  const Array &queries = inputs[kQueries], &keys = inputs[kKeys], &mask = inputs[kMask];
  const bool segments = integers[kSegments] != 0, blocks = integers[kOfQueries] != 0;
  return Pairs{queries.shape[0],
               queries.shape[1],
               keys.shape[1],
               integers[kWindow],
               data<const int32_t>(inputs[kStart]),
               inputs[kStart].rank == 0,
               segments ? data<const int32_t>(inputs[kQuerySegments]) : nullptr,
               segments ? data<const int32_t>(inputs[kKeySegments]) : nullptr,
               blocks ? data<const int32_t>(mask) : nullptr,
               mask.shape[0],
               mask.shape[1],
               integers[kOfQueries],
               integers[kOfKeys]};
}

// Part of the work: ranges of tables, samples and queries.
struct Part {
  int64_t table, end_of_tables, sample, end_of_samples, query, end_of_queries;
};

// Pairs between one query and neighboring keys. `at`: the first pair's number in its block.
struct Run {
  int64_t table, sample, query, key, n, at;
};

// The runs in a part, in order.
template <class Source>
class Walk {
 public:
  Walk(const Pairs& pairs, const Part& part, Source& source)
      : pairs_(pairs), part_(part), source_(source), table_(part.table - 1), sample_(part.end_of_samples), query_(part.end_of_queries) {}

  // Returns false after the last run.
  LUTJAX_NOINLINE bool next(int64_t most_pairs, Run* run) {
    while (key_ >= end_)
      if (!next_query()) return false;
    int64_t end = least(end_, key_ + most_pairs);
    if (blocks_ != nullptr) end = pairs_.next_key(blocks_, key_, end, false);
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
        if (pairs_.same_start) source_.distances(table_, 0);
      }
      if (!pairs_.same_start) source_.distances(table_, sample_);
      source_.sample(table_, sample_);
    }
    key_ = pairs_.first_key(sample_, query_);
    end_ = pairs_.end_of_keys(sample_, query_);
    if (pairs_.mask != nullptr) blocks_ = pairs_.blocks(query_);
    if (pairs_.key_segments != nullptr) {
      of_keys_ = pairs_.key_segments + sample_ * pairs_.n_keys;
      segment_ = pairs_.query_segments[sample_ * pairs_.n_queries + query_];
    }
    skip();
    return true;
  }

  void skip() {  // keys of other segments, or in blocks that do not count
    for (int64_t seen = -1; seen != key_;) {
      seen = key_;
      if (blocks_ != nullptr) key_ = pairs_.next_key(blocks_, key_, end_, true);
      if (of_keys_ != nullptr)
        while (key_ < end_ && of_keys_[key_] != segment_) ++key_;
      if (blocks_ == nullptr) return;
    }
  }

  const Pairs& pairs_;
  const Part part_;
  Source& source_;
  int64_t table_, sample_, query_, key_ = 0, end_ = 0;
  const int32_t *of_keys_ = nullptr, *blocks_ = nullptr;
  int32_t segment_ = 0;
};

// ------------------------------------------------------------------------------------- rows
// Prefetches into the second-level cache: the first level tracks too few outstanding lines, and random rows from large tables arrived half as fast.
LUTJAX_INLINE void fetch(const void* from, int64_t n_bytes) {
#if defined(__GNUC__)
  const char* p = static_cast<const char*>(from);
  for (int64_t at = 0; at < n_bytes; at += 64) __builtin_prefetch(p + at, 0, 2);
#else
  (void)from;
  (void)n_bytes;
#endif
}

// <dy, a - b>: rows are subtracted before the product, because products with large rows would lose their difference.
template <class W>
inline float product(const InFloats&, const float* dy, const W* a, const W* b, int64_t size) {
  Floats sums{};
  int64_t o = 0;
  for (; o + kLanes <= size; o += kLanes) sums += (load(a + o) - load(b + o)) * load(dy + o);
  float sum = sum_of(sums);
  for (; o < size; ++o) sum += (value(a[o]) - value(b[o])) * dy[o];
  return sum;
}

template <class W>
inline float product(const InIntegers& how, const float* dy, const W* a, const W* b, int64_t size) {
  Words sums{};
  int64_t o = 0;
  for (; o + kLanes <= size; o += kLanes) sums += how.addend((load(a + o) - load(b + o)) * load(dy + o));
  uint32_t sum = sum_of(sums);
  for (; o < size; ++o) sum += how.addend((value(a[o]) - value(b[o])) * dy[o]);
  return static_cast<float>(static_cast<int32_t>(sum)) / how.scale;
}

template <class How>
inline void add_to(const How&, typename How::Sum* sum, typename How::Part addend) {
  *sum = static_cast<typename How::Sum>(static_cast<typename How::Part>(*sum) + addend);
}

inline void add_row(float* to, const float* from, int64_t size) {
  int64_t o = 0;
  for (; o + kLanes <= size; o += kLanes) store(load(to + o) + load(from + o), to + o);
  for (; o < size; ++o) to[o] += from[o];
}
inline void add_row(int32_t* to, const int32_t* from, int64_t size) {
  for (int64_t o = 0; o < size; ++o) to[o] = static_cast<int32_t>(static_cast<uint32_t>(to[o]) + static_cast<uint32_t>(from[o]));
}

// ------------------------------------------------------------------------------------- blocks of pairs
// Runs of pairs, and the row addresses that each pair reads, in `Source::kWays` ways. Rows are prefetched
// kPairsAhead pairs ahead. `more`: additional source values per pair.
template <class W, class Source>
struct Block {
  static constexpr int kWays = Source::kWays;

  int64_t n = 0, n_runs = 0;
  Run runs[kPairs];
  W* rows[kWays][kPairs + kPairsAhead];
  typename Source::More more;

  LUTJAX_NOINLINE void fill(Walk<Source>& walk, Source& source, W* weights, int64_t n_rows, int64_t n_outputs) {
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
      for (int64_t p = 0; p < kPairsAhead; ++p) rows[way][n + p] = p < next.n ? next.rows[way][p] : rows[way][n - 1];
  }

  // Prefetches bytes from the rows that are read after pair p.
  LUTJAX_INLINE void fetch_ahead(int64_t p, int64_t first_output, int64_t n_bytes) const {
    for (int way = 0; way < kWays; ++way) fetch(rows[way][p + kPairsAhead] + first_output, n_bytes);
  }
};

// Calls visit(block) for each block in a part.
template <class W, class Source, class Visit>
void for_each_block(const Pairs& pairs, const Part& part, Source& source, W* weights, int64_t n_rows, int64_t n_outputs, const Visit& visit) {
  Walk<Source> walk(pairs, part, source);
  Block<W, Source> blocks[2];
  blocks[0].fill(walk, source, weights, n_rows, n_outputs);
  for (int64_t p = -kPairsAhead; p < least<int64_t>(0, blocks[0].n - kPairsAhead); ++p)
    blocks[0].fetch_ahead(p, 0, n_outputs * static_cast<int64_t>(sizeof(W)));
  for (int now = 0; blocks[now].n > 0; now = 1 - now) {
    Block<W, Source>& next = blocks[1 - now];
    next.fill(walk, source, weights, n_rows, n_outputs);
    blocks[now].continue_with(next);
    visit(blocks[now]);
  }
}

// ------------------------------------------------------------------------------------- tables and parts of the work
template <class W>
struct Tables {
  W* weights;
  int64_t n_tables, n_rows, n_outputs;
  explicit Tables(const Array& a) : weights(data<W>(a)), n_tables(a.shape[0]), n_rows(a.shape[1]), n_outputs(a.shape[2]) {}
  int64_t row_bytes() const { return n_outputs * static_cast<int64_t>(sizeof(W)); }
  W* table_rows(int64_t t) const { return weights + t * n_rows * n_outputs; }
};

// Returns the call restricted to one thread if its work is small.
inline Call call_for(const Call& call, int64_t n_bytes) {
  Call found = call;
  if (n_bytes < kSmall) found.pool.n_threads = 1;
  return found;
}

// A fixed division of tables, samples and queries into parts.
struct Parts {
  Parts(const Pairs& pairs, int64_t n_tables, int64_t samples, int64_t queries, int64_t wanted)
      : pairs(pairs), n_tables(n_tables), samples(most<int64_t>(samples, 1)), queries(most<int64_t>(queries, 1)) {
    of_samples = (pairs.n_samples + this->samples - 1) / this->samples;
    of_queries = (pairs.n_queries + this->queries - 1) / this->queries;
    const int64_t places = most<int64_t>(of_samples * of_queries, 1);
    const int64_t chunks = clamped<int64_t>((wanted + places - 1) / places, n_tables + 1);
    tables = chunks > 0 ? (n_tables + chunks - 1) / chunks : 1;
    of_tables = (n_tables + tables - 1) / tables;
  }
  int64_t n() const { return of_tables * of_samples * of_queries; }
  int64_t chunk(int64_t i) const { return i % of_tables; }                 // of tables
  int64_t group(int64_t i) const { return i / of_tables / of_queries; }  // of samples
  Part operator[](int64_t i) const {
    // Late queries, which have the most keys, come first.
    const int64_t t = chunk(i) * tables, b = group(i) * samples, j = (of_queries - 1 - i / of_tables % of_queries) * queries;
    return Part{t, least(t + tables, n_tables), b, least(b + samples, pairs.n_samples), j, least(j + queries, pairs.n_queries)};
  }
  const Pairs& pairs;
  const int64_t n_tables, samples, queries;
  int64_t of_tables, of_samples, of_queries, tables;
};

// ------------------------------------------------------------------------------------- outputs that rows reach
// Rows [O] that reach all outputs.
struct AllOutputs {
  int64_t n_outputs;

  AllOutputs(const Array&, int64_t n_outputs) : n_outputs(n_outputs) {}
  int64_t width() const { return n_outputs; }  // of the sums of a query
  int64_t bytes() const { return 0; }          // that `values` needs

  // Values that table t's rows read, from values for all outputs.
  template <class V>
  const V* values(int64_t, const V* of_outputs, char*) const { return of_outputs; }

  template <class Block, class W>
  LUTJAX_INLINE void fetch_ahead(const Block& block, int64_t p, const W*, int64_t, int64_t first, int64_t n) const {
    block.fetch_ahead(p, first, n * static_cast<int64_t>(sizeof(W)));
  }

  // Adds a run's rows to sums.
  template <class How, class Block, class W>
  void add_rows(const How& how, const Block& block, const Run& run, const W* table, char*, typename How::Sum* sums) const {
    for (int64_t o = 0; o < n_outputs; o += kInRegisters) {
      const int64_t n = least(n_outputs - o, kInRegisters);
      const auto from = [&](int64_t p) {
        fetch_ahead(block, run.at + p, table, run.table, o, n);
        return block.rows[0][run.at + p] + o;
      };
      lutjax::add_rows(how, run.n, from, n, sums + o);
    }
  }

  // Adds values to a row.
  template <class Sum>
  void add(int64_t, const Sum*, Sum* row, const Sum* values) const { add_row(row, values, n_outputs); }

  // <dy, row - other>.
  template <class How, class W>
  float product(const How& how, int64_t, const W*, const float* dy, const W* row, const W* other) const {
    return lutjax::product(how, dy, row, other, n_outputs);
  }

  // Adds dy's addends to row `row` of table t.
  template <class How, class Dy>
  void add_hits(const How& how, int64_t, int64_t, int64_t n, const Dy& dy, typename How::Sum* sums) const {
    lutjax::add_rows(how, n, dy, n_outputs, sums);
  }
};

inline float total(const InFloats&, float sum) { return sum; }
inline float total(const InIntegers& how, uint32_t sum) { return static_cast<float>(static_cast<int32_t>(sum)) / how.scale; }

// Rows [K] with a target output per slot. A query's sums have one additional element for unused slots.
struct ChosenOutputs {
  Slots slots;

  ChosenOutputs(const Array& targets, int64_t n_outputs) : slots(targets, n_outputs) {}
  int64_t width() const { return slots.n_outputs + 1; }
  int64_t bytes() const { return (4 * slots.n_slots + 63) / 64 * 64; }
  bool same_for_rows() const { return slots.of_row == 0; }

  // Slot values for a table whose rows share one target list; 0 for unused slots.
  template <class V>
  const V* values(int64_t t, const V* of_outputs, char* scratch) const {
    if (!same_for_rows()) return of_outputs;
    V* found = reinterpret_cast<V*>(scratch);
    const int32_t* to = slots.row_targets(t, 0);
    for (int64_t k = 0; k < slots.n_slots; ++k) {
      const int64_t o = slots.output(to[k]);
      found[k] = o < slots.n_outputs ? of_outputs[o] : V(0);
    }
    return found;
  }

  // Targets for a row in table t, given the row's address.
  template <class W>
  const int32_t* targets(int64_t t, const W* table, const W* row) const {
    return slots.targets + t * slots.of_table + (same_for_rows() ? 0 : row - table);
  }

  template <class Block, class W>
  LUTJAX_INLINE void fetch_ahead(const Block& block, int64_t p, const W* table, int64_t t, int64_t first, int64_t n) const {
    block.fetch_ahead(p, first, n * static_cast<int64_t>(sizeof(W)));
    // Prefetched rows may be in the next table; then so are their targets.
    if (!same_for_rows() && slots.of_table != 0)
      for (const auto& rows : block.rows) fetch(targets(t, table, static_cast<const W*>(rows[p + kPairsAhead])), 4 * n);
  }

  template <class How, class Block, class W>
  void add_rows(const How& how, const Block& block, const Run& run, const W* table, char* scratch, typename How::Sum* sums) const {
    using Sum = typename How::Sum;
    const int64_t n = slots.n_slots;
    if (same_for_rows()) {
      Sum* of_slots = reinterpret_cast<Sum*>(scratch);
      std::memset(of_slots, 0, static_cast<size_t>(n) * sizeof(Sum));
      const auto from = [&](int64_t p) {
        fetch_ahead(block, run.at + p, table, run.table, 0, n);
        return block.rows[0][run.at + p];
      };
      lutjax::add_rows(how, run.n, from, n, of_slots);
      const int32_t* to = slots.row_targets(run.table, 0);
      for (int64_t k = 0; k < n; ++k) add_to(how, &sums[slots.output(to[k])], static_cast<typename How::Part>(of_slots[k]));
      return;
    }
    for (int64_t p = run.at; p < run.at + run.n; ++p) {
      fetch_ahead(block, p, table, run.table, 0, n);
      const W* row = block.rows[0][p];
      const int32_t* to = targets(run.table, table, row);
      for (int64_t k = 0; k < n; ++k) add_to(how, &sums[slots.output(to[k])], how.addend(value(row[k])));
    }
  }

  template <class Sum>
  void add(int64_t t, const Sum* table, Sum* row, const Sum* values) const {
    if (same_for_rows()) return add_row(row, values, slots.n_slots);
    const int32_t* to = targets(t, table, static_cast<const Sum*>(row));
    for (int64_t k = 0; k < slots.n_slots; ++k) {
      const int64_t o = slots.output(to[k]);
      if (o < slots.n_outputs) add_row(row + k, values + o, 1);
    }
  }

  template <class How, class W>
  float product(const How& how, int64_t t, const W* table, const float* dy, const W* row, const W* other) const {
    if (!same_for_rows()) return total(how, slots.difference(how, dy, row, other, targets(t, table, row), targets(t, table, other)));
    const int32_t* to = slots.row_targets(t, 0);
    typename How::Part sum = 0;  // unused slots may hold any number
    for (int64_t k = 0; k < slots.n_slots; ++k)
      if (to[k] >= 0) sum += how.addend((value(row[k]) - value(other[k])) * dy[k]);
    return total(how, sum);
  }

  template <class How, class Dy>
  void add_hits(const How& how, int64_t t, int64_t row, int64_t n, const Dy& dy, typename How::Sum* sums) const {
    const int32_t* to = slots.row_targets(t, row);
    for (int64_t k = 0; k < slots.n_slots; ++k) {
      const int64_t o = slots.output(to[k]);
      if (o == slots.n_outputs) continue;
      for (int64_t i = 0; i < n; ++i) add_to(how, sums + k, how.addend(dy(i)[o]));
    }
  }
};

// ------------------------------------------------------------------------------------- passes
constexpr const char* kNoMemory = "no memory for the ids and sums of pairs";

// y[b, j, :] = sum over all pairs of query j and all tables: the pair's row.
template <class Source, class Reach, class W, class How>
const char* sum_pairs(const Call& given, const Pairs& pairs, const Tables<const W>& tables, const Reach& reach, const How& how, typename How::Sum* y,
                      int64_t n_outputs) {
  using Sum = typename How::Sum;
  const int64_t n_lines = pairs.n_samples * pairs.n_queries, width = reach.width(), size = n_lines * width;
  if (n_lines * n_outputs == 0) return nullptr;
  const int64_t n_pairs = pairs.count();
  const Call call = call_for(given, n_pairs * tables.n_tables * tables.row_bytes());
  // Lines of y that stay in the first cache, or more: a part reads each row four times, where so many pairs read it, so that most come from a cache.
  const int64_t fours = n_pairs / (4 * most<int64_t>(tables.n_rows, 1));
  const int64_t lines = most<int64_t>(32768 / (width * static_cast<int64_t>(sizeof(Sum))), fours > 0 ? n_lines / fours : 1);
  const Parts parts(pairs, tables.n_tables, lines / pairs.n_queries, lines, kParts / 2);
  const int64_t chunks = parts.of_tables;
  const bool in_place = chunks == 1 && width == n_outputs;
  Sum* sums = in_place ? y : allocated<Sum>(call, size * chunks);
  if (sums == nullptr) return kNoMemory;
  const bool done = in_parallel_with(call, parts.n(), Source::bytes(pairs) + reach.bytes(), [&](int64_t i, char* scratch) {
    const Part part = parts[i];
    Sum* own = sums + parts.chunk(i) * size;
    for (int64_t b = part.sample; b < part.end_of_samples; ++b)
      std::memset(own + (b * pairs.n_queries + part.query) * width, 0, static_cast<size_t>((part.end_of_queries - part.query) * width) * sizeof(Sum));
    Source source(call, pairs, scratch + reach.bytes());
    for_each_block(pairs, part, source, tables.weights, tables.n_rows, tables.n_outputs, [&](const auto& block) {
      for (int64_t r = 0; r < block.n_runs; ++r) {
        const Run& run = block.runs[r];
        reach.add_rows(how, block, run, tables.table_rows(run.table), scratch, own + (run.sample * pairs.n_queries + run.query) * width);
      }
    });
  });
  if (!done) return kNoMemory;
  if (!in_place) {
    const int64_t piece = most<int64_t>(4096 / n_outputs, 1);  // lines
    const Call last = call_for(call, size * chunks * static_cast<int64_t>(sizeof(Sum)) / 4);
    const bool added = in_parallel_with(last, (n_lines + piece - 1) / piece, 0, [&](int64_t i, char*) {
      const int64_t first = i * piece, end = least(first + piece, n_lines);
      std::memset(y + first * n_outputs, 0, static_cast<size_t>((end - first) * n_outputs) * sizeof(Sum));
      for (int64_t c = 0; c < chunks; ++c) {
        const Sum* from = sums + c * size;
        if (width == n_outputs) {
          add_row(y + first * width, from + first * width, (end - first) * width);
        } else {
          for (int64_t line = first; line < end; ++line) add_row(y + line * n_outputs, from + line * width, n_outputs);
        }
      }
    });
    if (!added) return kNoMemory;
  }
  return nullptr;
}

// Adds values[b, j, :] to the rows for all pairs of j. Each part owns its tables; `fresh`: they start at zero.
template <class Source, class Reach, class Sum>
const char* add_to_pairs(const Call& given, const Pairs& pairs, const Tables<Sum>& tables, const Reach& reach, const Sum* values, int64_t n_outputs,
                         bool fresh) {
  const int64_t n_pairs = pairs.count(), of_row = tables.n_outputs;
  const Call call = call_for(given, (n_pairs + (fresh ? tables.n_rows : 0)) * tables.n_tables * tables.row_bytes());
  const Parts parts(pairs, tables.n_tables, pairs.n_samples, pairs.n_queries, kParts);
  const bool done = in_parallel_with(call, parts.of_tables, Source::bytes(pairs) + reach.bytes(), [&](int64_t i, char* scratch) {
    const int64_t first = i * parts.tables, n = least(parts.tables, tables.n_tables - first) * tables.n_rows * of_row;
    if (fresh) std::memset(tables.weights + first * tables.n_rows * of_row, 0, static_cast<size_t>(n) * sizeof(Sum));
    if (n_pairs == 0 || n_outputs * of_row == 0) return;
    Source source(call, pairs, scratch + reach.bytes());
    for_each_block(pairs, parts[i], source, tables.weights, tables.n_rows, of_row, [&](const auto& block) {
      for (int64_t r = 0; r < block.n_runs; ++r) {
        const Run& run = block.runs[r];
        const Sum* table = tables.table_rows(run.table);
        const Sum* from = reach.values(run.table, values + (run.sample * pairs.n_queries + run.query) * n_outputs, scratch);
        for (int64_t p = run.at; p < run.at + run.n; ++p) {
          reach.fetch_ahead(block, p, table, run.table, 0, of_row);
          reach.add(run.table, table, block.rows[0][p], from);
        }
      }
    });
  });
  return done ? nullptr : kNoMemory;
}

// Updates each addressed row once, by the sum of dy[b, j, :] over its pairs: see rules.h.
template <class Source, class W, class Reach, class How>
const char* move_pairs(const Call& call, const Pairs& pairs, const Update& u, const Reach& reach, const How& how, const float* dy, int64_t n_outputs) {
  const Tables<W> tables(u.weights);
  const int64_t size = tables.n_outputs, n_rows = tables.n_rows, n_pairs = pairs.count();
  if (n_pairs == 0 || n_outputs * size == 0) return nullptr;
  const int64_t to_sort = (bytes_to_sort(n_pairs) + 63) / 64 * 64, ids_at = to_sort + (size * 8 + 63) / 64 * 64;
  const bool done = in_parallel_with(call, tables.n_tables, ids_at + Source::bytes(pairs), [&](int64_t t, char* scratch) {
    Source source(call, pairs, scratch + ids_at);
    Walk<Source> walk(pairs, Part{t, t + 1, 0, pairs.n_samples, 0, pairs.n_queries}, source);
    Hit* hits = reinterpret_cast<Hit*>(scratch);
    auto* sums = reinterpret_cast<typename How::Sum*>(scratch + to_sort);
    float* gradient = reinterpret_cast<float*>(sums + size);
    int64_t n = 0;
    int32_t ids[Source::kWays][kPairs];
    typename Source::More more;
    for (Run run; walk.next(kPairs, &run);) {
      source.rows(run, ids, &more);
      for (int64_t p = 0; p < run.n; ++p) hits[n + p] = Hit{ids[0][p], static_cast<int32_t>(run.sample * pairs.n_queries + run.query)};
      n += run.n;
    }
    hits = sorted(hits, n, n_pairs, n_rows);
    W* table = tables.table_rows(t);
    for (int64_t first = 0, end; first < n; first = end) {
      const int64_t row = hits[first].row;
      for (end = first + 1; end < n && hits[end].row == row;) ++end;
      if (first + kPairsAhead < n) fetch(table + hits[first + kPairsAhead].row * size, tables.row_bytes());
      std::memset(sums, 0, static_cast<size_t>(size) * sizeof *sums);
      reach.add_hits(how, t, row, end - first, [&](int64_t i) { return dy + hits[first + i].number * n_outputs; }, sums);
      u.move(t, row, size, sums, gradient, table + row * size);
    }
  });
  return done ? nullptr : kNoMemory;
}

// ------------------------------------------------------------------------------------- kernels
// Calls body(value with the table type, summation method).
template <class Body>
const char* for_type(const Call& call, const Body& body) {
  return for_type(call.inputs[kWeights], call.integers[kFixed] != 0, call.numbers[kScale], body);
}

// Calls body(reach).
template <class Body>
const char* for_reach(const Array& targets, int64_t n_outputs, const Body& body) {
  return targets.shape[0] > 0 ? body(ChosenOutputs(targets, n_outputs)) : body(AllOutputs(targets, n_outputs));
}

// The output [B, Lq, O], as sums.
template <class Source>
const char* forward(const Call& call) {
  const int64_t n_outputs = call.integers[kOutputs];
  return for_reach(call.inputs[kTargets], n_outputs, [&](const auto& reach) {
    return for_type(call, [&](auto weight, auto how) {
      const Tables<const decltype(weight)> tables(call.inputs[kWeights]);
      auto* y = data<typename decltype(how)::Sum>(call.outputs[0]);
      return sum_pairs<Source>(call, pairs_of(call.inputs, call.integers), tables, reach, how, y, n_outputs);
    });
  });
}

// Adds values [B, Lq, O] to table rows: to the gradient (`fresh`), or to the table in place.
template <class Source>
const char* add(const Call& call, const Array& values, bool fresh) {
  const Pairs pairs = pairs_of(call.inputs, call.integers);
  const Array& table = call.outputs[0];
  const int64_t n = call.integers[kOutputs];
  return for_reach(call.inputs[kTargets], n, [&](const auto& reach) {
    return values.type == Type::int32
               ? add_to_pairs<Source>(call, pairs, Tables<int32_t>(table), reach, data<const int32_t>(values), n, fresh)
               : add_to_pairs<Source>(call, pairs, Tables<float>(table), reach, data<const float>(values), n, fresh);
  });
}

// What `lutjax_cpu/_rules.py` passes, then the arrays of a call without its tables, and the cotangent [B, Lq, O]: `n_inputs` with tables.
template <class Source>
const char* update(const Call& call, int n_inputs) {
  const Update u(call);
  Array inputs[16];
  for (int i = 0; i < n_inputs; ++i) inputs[i] = i < kWeights ? u.inputs[i] : i > kWeights ? u.inputs[i - 1] : u.weights;
  const float* dy = data<const float>(inputs[n_inputs - 1]);
  Call own = call;
  own.inputs = inputs;
  own.integers = u.integers;
  own.numbers = u.numbers;
  const int64_t n_outputs = u.integers[kOutputs];
  return for_reach(inputs[kTargets], n_outputs, [&](const auto& reach) {
    return for_type(u.weights, u.fixed, u.scale, [&](auto weight, auto how) {
      return move_pairs<Source, decltype(weight)>(own, pairs_of(inputs, u.integers), u, reach, how, dy, n_outputs);
    });
  });
}

}  // namespace
}  // namespace lutjax
#endif
