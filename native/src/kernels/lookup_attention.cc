// `lutjax.lookup_attention`: a pair's row concatenates the query, key and distance bits.
//
// row = query.index[j] << query_shift | key.index[i] << key_shift | position.index[d];  y[j] = sum_{i, t} weights[t, row];
// dweights[t, row] += dy[j];  the closer of query and key gets slope(margin) * <dy[j], weights[t, row] - weights[t, row ^ flip]>, and
// so does the position where it is closer than both.
//
// Own arrays: query ids [B, Lq, T], key ids [B, Lk, T], position ids [distances, T or 1]; then, for margin gradients, their flips
// and margins, and dy [B, Lq, O].
#include "pairs.h"

namespace lutjax {
namespace {

enum : int {
  kQuery = kQueries,
  kKey = kKeys,
  kPosition = kOwn,
  kValues,  // of a gradient or an update; else:
  kQueryFlip = kValues,
  kQueryMargin,
  kKeyFlip,
  kKeyMargin,
  kPositionFlip,
  kPositionMargin,
  kCotangent
};
enum : int { kQueryShift = kOwnIntegers, kKeyShift };

// Values for one table and one sample: per query, per key, and per position difference.
template <class T>
struct Columns {
  T *query, *key, *position;

  static int64_t size(const Pairs& pairs) { return pairs.n_queries + pairs.n_keys + pairs.n_differences(); }
  Columns(const Pairs& pairs, T* memory) : query(memory), key(memory + pairs.n_queries), position(memory + pairs.n_queries + pairs.n_keys) {}

  void distances(const Pairs& pairs, const Array& of_position, int64_t t, int64_t b) {
    const int64_t n = of_position.shape[0], n_tables = of_position.shape[1];
    const T* from = data<const T>(of_position) + (n_tables == 1 ? 0 : t);
    for (int64_t x = 0; x < pairs.n_differences(); ++x) position[x] = from[pairs.distance(b, x, n) * n_tables];
  }
  void sample(const Pairs& pairs, const Array& of_query, const Array& of_key, int64_t t, int64_t b) {
    const int64_t n_tables = of_query.shape[2];
    const T* from = data<const T>(of_query) + b * pairs.n_queries * n_tables + t;
    for (int64_t j = 0; j < pairs.n_queries; ++j) query[j] = from[j * n_tables];
    from = data<const T>(of_key) + b * pairs.n_keys * n_tables + t;
    for (int64_t i = 0; i < pairs.n_keys; ++i) key[i] = from[i * n_tables];
  }
};

inline int32_t put(int32_t id, int64_t shift) { return static_cast<int32_t>(static_cast<uint32_t>(id) << shift); }

struct Ids {
  static constexpr int kWays = 1;
  struct More {};
  static int64_t bytes(const Pairs& pairs) { return 4 * Columns<int32_t>::size(pairs); }

  Ids(const Call& call, const Pairs& pairs, char* scratch)
      : inputs(call.inputs),
        pairs(pairs),
        query_shift(call.integers[kQueryShift]),
        key_shift(call.integers[kKeyShift]),
        n_rows(static_cast<int32_t>(inputs[kWeights].shape[1])),
        ids(pairs, reinterpret_cast<int32_t*>(scratch)) {}

  void distances(int64_t t, int64_t b) { ids.distances(pairs, inputs[kPosition], t, b); }
  void sample(int64_t t, int64_t b) {
    ids.sample(pairs, inputs[kQuery], inputs[kKey], t, b);
    for (int64_t j = 0; j < pairs.n_queries; ++j) ids.query[j] = put(ids.query[j], query_shift);
    for (int64_t i = 0; i < pairs.n_keys; ++i) ids.key[i] = put(ids.key[i], key_shift);
  }
  void rows(const Run& run, int32_t (*of)[kPairs], More*) const {
    const int32_t *key = ids.key + run.key, *position = ids.position + pairs.difference(run.query, run.key), query = ids.query[run.query];
    int32_t* to = of[0] + run.at;
    for (int64_t p = 0; p < run.n; ++p) to[p] = clamped(query | key[p] | position[p], n_rows);
  }

  const Array* inputs;
  const Pairs& pairs;
  const int64_t query_shift, key_shift;
  const int32_t n_rows;
  Columns<int32_t> ids;
};

// The row, the row with the closer one of the query and key flips, and the row with the position flip.
struct Flips : Ids {
  static constexpr int kWays = 3;
  struct More {
    float margin[kPairs], position_margin[kPairs];  // margin: of the closer one of query and key
    int32_t to_query[kPairs];                       // whether it is the query
    int32_t to_position[kPairs];                    // whether the position is closer than both
  };
  static int64_t bytes(const Pairs& pairs) { return 3 * Ids::bytes(pairs); }

  Flips(const Call& call, const Pairs& pairs, char* scratch)
      : Ids(call, pairs, scratch),
        flips(pairs, reinterpret_cast<int32_t*>(scratch + Ids::bytes(pairs))),
        margins(pairs, reinterpret_cast<float*>(scratch + 2 * Ids::bytes(pairs))) {}

  void distances(int64_t t, int64_t b) {
    Ids::distances(t, b);
    flips.distances(pairs, inputs[kPositionFlip], t, b);
    margins.distances(pairs, inputs[kPositionMargin], t, b);
  }
  void sample(int64_t t, int64_t b) {
    Ids::sample(t, b);
    flips.sample(pairs, inputs[kQueryFlip], inputs[kKeyFlip], t, b);
    margins.sample(pairs, inputs[kQueryMargin], inputs[kKeyMargin], t, b);
    for (int64_t j = 0; j < pairs.n_queries; ++j) flips.query[j] = put(flips.query[j], query_shift);
    for (int64_t i = 0; i < pairs.n_keys; ++i) flips.key[i] = put(flips.key[i], key_shift);
  }
  void rows(const Run& run, int32_t (*of)[kPairs], More* more) const {
    const int64_t at = pairs.difference(run.query, run.key);
    const int32_t *key = ids.key + run.key, *position = ids.position + at, query = ids.query[run.query];
    const int32_t *key_flip = flips.key + run.key, *position_flip = flips.position + at, query_flip = flips.query[run.query];
    const float *key_margin = margins.key + run.key, *position_margin = margins.position + at, query_margin = margins.query[run.query];
    const float of_query = std::fabs(query_margin);
    int32_t *main = of[0] + run.at, *flipped = of[1] + run.at, *by_position = of[2] + run.at;
    float *margin = more->margin + run.at, *own_margin = more->position_margin + run.at;
    int32_t *to_query = more->to_query + run.at, *to_position = more->to_position + run.at;
    for (int64_t p = 0; p < run.n; ++p) {
      const int32_t id = query | key[p] | position[p];
      const float of_key = std::fabs(key_margin[p]), of_position = std::fabs(position_margin[p]);
      const bool closer = of_query < of_key, closest = (of_position < of_query) & (of_position < of_key);
      main[p] = clamped(id, n_rows);
      flipped[p] = clamped(id ^ (closer ? query_flip : key_flip[p]), n_rows);
      by_position[p] = clamped(id ^ (closest ? position_flip[p] : 0), n_rows);
      margin[p] = closer ? query_margin : key_margin[p];
      own_margin[p] = position_margin[p];
      to_query[p] = closer;
      to_position[p] = closest;
    }
  }

  Columns<int32_t> flips;
  Columns<float> margins;
};

// Margin cotangents. Outputs: query [B, Lq, T], key [B, Lk, T], position [distances, T or 1].
template <class W, class How, class Reach>
const char* margins_of(const Call& given, const How& how, const Reach& reach) {
  using Sum = typename How::Sum;
  const Pairs pairs = pairs_of(given.inputs, given.integers);
  const Tables<const W> tables(given.inputs[kWeights]);
  const int64_t n_samples = pairs.n_samples, n_tables = tables.n_tables, n_outputs = given.integers[kOutputs];
  const int64_t n_queries = pairs.n_queries, n_keys = pairs.n_keys, n_differences = pairs.n_differences();
  const float* dy = data<const float>(given.inputs[kCotangent]);
  const Call call = call_for(given, 2 * pairs.count() * n_tables * tables.row_bytes());
  // Parts have tables of their own, so their margins too; few tables are divided by samples as well. A difference is of another distance in a sample with
  // another start.
  const int64_t groups = pairs.same_start ? most<int64_t>(16 / most<int64_t>(n_tables, 1), 1) : most<int64_t>(n_samples, 1);
  const Parts parts(pairs, n_tables, (n_samples + groups - 1) / groups, n_queries, kParts);
  // Sums: [T, B, Lq], [T, B, Lk], [groups of samples, T, differences].
  const int64_t of_queries = n_tables * n_samples * n_queries, of_keys = n_tables * n_samples * n_keys;
  const int64_t size = of_queries + of_keys + parts.of_samples * n_tables * n_differences;
  Sum* sums = allocated<Sum>(call, size);
  if (sums == nullptr) return kNoMemory;
  Sum *to_queries = sums, *to_keys = sums + of_queries, *to_differences = to_keys + of_keys;
  std::memset(sums, 0, static_cast<size_t>(size) * sizeof(Sum));
  const bool done = in_parallel_with(call, parts.n(), Flips::bytes(pairs) + reach.bytes(), [&](int64_t i, char* scratch) {
    const Part part = parts[i];
    Flips source(call, pairs, scratch + reach.bytes());
    for_each_block(pairs, part, source, tables.weights, tables.n_rows, tables.n_outputs, [&](const auto& block) {
      float cotangent[kPairs];
      int32_t closest[kPairs];
      for (int64_t r = 0; r < block.n_runs; ++r) {
        const Run& run = block.runs[r];
        const int64_t t = run.table, b = run.sample, end = run.at + run.n;
        const W* table = tables.table_rows(t);
        const float* of_query = reach.values(t, dy + (b * n_queries + run.query) * n_outputs, scratch);
        for (int64_t p = run.at; p < end; ++p) {
          reach.fetch_ahead(block, p, table, t, 0, tables.n_outputs);
          cotangent[p] = reach.product(how, t, table, of_query, block.rows[0][p], block.rows[1][p]);
        }
        for (int64_t p = run.at; p < end; ++p) cotangent[p] *= slope(block.more.margin[p]);
        Sum* to_key = to_keys + (t * n_samples + b) * n_keys + run.key - run.at;
        Sum to_query = 0;
        for (int64_t p = run.at; p < end; ++p) {
          const typename How::Part c = how.addend(cotangent[p]);
          add_to(how, &to_query, block.more.to_query[p] ? c : 0);
          add_to(how, &to_key[p], block.more.to_query[p] ? 0 : c);
        }
        Sum* total = to_queries + (t * n_samples + b) * n_queries + run.query;
        add_to(how, total, static_cast<typename How::Part>(to_query));

        Sum* to_difference = to_differences + (parts.group(i) * n_tables + t) * n_differences + pairs.difference(run.query, run.key) - run.at;
        int64_t n = 0;
        for (int64_t p = run.at; p < end; ++p) {
          closest[n] = static_cast<int32_t>(p);
          n += block.more.to_position[p];
        }
        for (int64_t k = 0; k < n; ++k) {
          const int64_t p = closest[k];
          const float lost = reach.product(how, t, table, of_query, block.rows[0][p], block.rows[2][p]);
          add_to(how, &to_difference[p], how.addend(slope(block.more.position_margin[p]) * lost));
        }
      }
    });
  });
  if (!done) return kNoMemory;
  Sum *query = data<Sum>(call.outputs[0]), *key = data<Sum>(call.outputs[1]), *position = data<Sum>(call.outputs[2]);
  transpose(to_queries, n_samples * n_queries, n_tables, n_samples * n_queries, query, n_tables);
  transpose(to_keys, n_samples * n_keys, n_tables, n_samples * n_keys, key, n_tables);
  const int64_t n_distances = call.outputs[2].shape[0], n_positions = call.outputs[2].shape[1];
  for (int64_t x = 0; x < n_distances * n_positions; ++x) position[x] = 0;
  for (int64_t g = 0; g < parts.of_samples; ++g)
    for (int64_t t = 0; t < n_tables; ++t)
      for (int64_t x = 0; x < n_differences; ++x)
        add_to(how, &position[pairs.distance(g, x, n_distances) * n_positions + (n_positions == 1 ? 0 : t)],
               static_cast<typename How::Part>(to_differences[(g * n_tables + t) * n_differences + x]));
  return nullptr;
}

}  // namespace
}  // namespace lutjax

LUTJAX_KERNEL(lookup_attention_forward) { return lutjax::forward<lutjax::Ids>(call); }

LUTJAX_KERNEL(lookup_attention_margins) {
  using namespace lutjax;
  return for_reach(call.inputs[kTargets], call.integers[kOutputs], [&](const auto& reach) {
    return for_type(call, [&](auto weight, auto how) { return margins_of<decltype(weight)>(call, how, reach); });
  });
}

// The table gradient; only the tables' shape matters.
LUTJAX_KERNEL(lookup_attention_gradient) { return lutjax::add<lutjax::Ids>(call, call.inputs[lutjax::kValues], true); }

// The tables plus values, in place.
LUTJAX_KERNEL(lookup_attention_add) { return lutjax::add<lutjax::Ids>(call, call.inputs[lutjax::kValues], false); }

LUTJAX_KERNEL(lookup_attention_update) { return lutjax::update<lutjax::Ids>(call, lutjax::kValues + 1); }
