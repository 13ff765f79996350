// `lutjax.lookup_attention`: the row of a pair has the bits of query, key and distance side by side.
//
// row = query.index[j] << query_shift | key.index[i] << key_shift | position.index[d];  y[j] = sum_{i, t} weights[t, row];
// dweights[t, row] += dy[j];  the closer of query and key gets slope(margin) * <dy[j], weights[t, row] - weights[t, row ^ flip]>, and
// so does the position where it is closer than both.
//
// weights: [T, R, O]. start: one int32. segments: [B, Lq], [B, Lk], looked at if there are any. ids: query [B, Lq, T], key [B, Lk, T],
// position [distances, T or 1]; backward their flips and margins too, then dy [B, Lq, O].
#include "pairs.h"

namespace lutjax {
namespace {

enum Inputs { kWeights, kStart, kQuerySegments, kKeySegments, kQuery, kKey, kPosition };
enum Options { kWindow, kSegments, kQueryShift, kKeyShift, kFixed };

Pairs pairs_of(const Call& call) {
  const Array &query = call.inputs[kQuery], &key = call.inputs[kKey];
  const bool segments = call.integers[kSegments] != 0;
  return Pairs{query.shape[0],
               query.shape[1],
               key.shape[1],
               *data<const int32_t>(call.inputs[kStart]),
               call.integers[kWindow],
               segments ? data<const int32_t>(call.inputs[kQuerySegments]) : nullptr,
               segments ? data<const int32_t>(call.inputs[kKeySegments]) : nullptr};
}

template <class W>
Tables<W> tables_of(const Array& weights) {
  return Tables<W>{data<W>(weights), weights.shape[0], weights.shape[1], weights.shape[2]};
}

// Numbers of one table and one sample: of each query, each key, and each difference of places.
template <class T>
struct Columns {
  T *query, *key, *position;

  static int64_t size(const Pairs& pairs) { return pairs.n_queries + pairs.n_keys + pairs.n_differences(); }
  Columns(const Pairs& pairs, T* memory) : query(memory), key(memory + pairs.n_queries), position(memory + pairs.n_queries + pairs.n_keys) {}

  void table(const Pairs& pairs, const Array& of_position, int64_t t) {
    const int64_t n = of_position.shape[0], n_tables = of_position.shape[1];
    const T* from = data<const T>(of_position) + (n_tables == 1 ? 0 : t);
    for (int64_t x = 0; x < pairs.n_differences(); ++x) position[x] = from[pairs.distance(x, n) * n_tables];
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
  using Memory = int32_t;
  static int64_t size(const Pairs& pairs) { return Columns<int32_t>::size(pairs); }

  Ids(const Call& call, const Pairs& pairs, int32_t* memory)
      : call(call), pairs(pairs), n_rows(static_cast<int32_t>(call.inputs[kWeights].shape[1])), ids(pairs, memory) {}

  void table(int64_t t) { ids.table(pairs, call.inputs[kPosition], t); }
  void sample(int64_t t, int64_t b) {
    ids.sample(pairs, call.inputs[kQuery], call.inputs[kKey], t, b);
    for (int64_t j = 0; j < pairs.n_queries; ++j) ids.query[j] = put(ids.query[j], call.integers[kQueryShift]);
    for (int64_t i = 0; i < pairs.n_keys; ++i) ids.key[i] = put(ids.key[i], call.integers[kKeyShift]);
  }
  void rows(const Run& run, int32_t (*of)[kPairs], More*) const {
    const int32_t *key = ids.key + run.key, *position = ids.position + pairs.difference(run.query, run.key), query = ids.query[run.query];
    int32_t* to = of[0] + run.at;
    for (int64_t p = 0; p < run.n; ++p) to[p] = clamped(query | key[p] | position[p], n_rows);
  }

  const Call& call;
  const Pairs& pairs;
  const int32_t n_rows;
  Columns<int32_t> ids;
};

// The row, that with the flip of the closer one of query and key, and that with the flip of the position.
struct Flips : Ids {
  static constexpr int kWays = 3;
  struct More {
    float margin[kPairs], position_margin[kPairs];  // margin: of the closer one of query and key
    int32_t to_query[kPairs];                       // whether it is the query
    int32_t to_position[kPairs];                    // whether the position is closer than both
  };
  static int64_t size(const Pairs& pairs) { return 3 * Columns<int32_t>::size(pairs); }

  Flips(const Call& call, const Pairs& pairs, int32_t* memory)
      : Ids(call, pairs, memory),
        flips(pairs, memory + Columns<int32_t>::size(pairs)),
        margins(pairs, reinterpret_cast<float*>(memory + 2 * Columns<int32_t>::size(pairs))) {}

  static const Array& flip(const Call& call, int of) { return call.inputs[kPosition + 1 + 2 * of]; }
  static const Array& margin(const Call& call, int of) { return call.inputs[kPosition + 2 + 2 * of]; }
  static const Array& dy(const Call& call) { return call.inputs[kPosition + 7]; }

  void table(int64_t t) {
    Ids::table(t);
    flips.table(pairs, flip(call, 2), t);
    margins.table(pairs, margin(call, 2), t);
  }
  void sample(int64_t t, int64_t b) {
    Ids::sample(t, b);
    flips.sample(pairs, flip(call, 0), flip(call, 1), t, b);
    margins.sample(pairs, margin(call, 0), margin(call, 1), t, b);
    for (int64_t j = 0; j < pairs.n_queries; ++j) flips.query[j] = put(flips.query[j], call.integers[kQueryShift]);
    for (int64_t i = 0; i < pairs.n_keys; ++i) flips.key[i] = put(flips.key[i], call.integers[kKeyShift]);
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
      to_query[p] = closer;
      to_position[p] = closest;
      own_margin[p] = position_margin[p];
    }
  }

  Columns<int32_t> flips;
  Columns<float> margins;
};

template <class Source>
struct Sources {
  explicit operator bool() const { return memory != nullptr; }
  Source operator[](int64_t i) const { return Source(call, pairs, memory + i * Source::size(pairs)); }
  const Call& call;
  const Pairs& pairs;
  int32_t* memory;
};

template <class Source>
Sources<Source> sources_for(const Call& call, const Parts& parts) {
  return Sources<Source>{call, parts.pairs, allocated<int32_t>(call, parts.n() * Source::size(parts.pairs))};
}

template <class W>
const char* forward(const Call& call) {
  const Pairs pairs = pairs_of(call);
  const auto tables = tables_of<const W>(call.inputs[kWeights]);
  if (call.integers[kFixed])
    return forward_pass(call, pairs, tables, data<int32_t>(call.outputs[0]), static_cast<float>(call.numbers[0]), sources_for<Ids>);
  return forward_pass(call, pairs, tables, data<float>(call.outputs[0]), 0.0f, sources_for<Ids>);
}

// Cotangents of the margins. Outputs: of query [B, Lq, T], of key [B, Lk, T], of position [distances, T or 1]: sums of S.
template <class W, class S>
const char* margins_of(const Call& call) {
  const Pairs pairs = pairs_of(call);
  const auto tables = tables_of<const W>(call.inputs[kWeights]);
  const int64_t n_tables = tables.n_tables, n_outputs = tables.n_outputs;
  const int64_t n_queries = pairs.n_queries, n_keys = pairs.n_keys, n_differences = pairs.n_differences();
  const float* dy = data<const float>(Flips::dy(call));
  const float scale = static_cast<float>(call.numbers[0]);
  const bool large = pairs.n_samples * pairs.count() * n_tables * tables.row_bytes() >= kSmall;
  // Parts have tables of their own, so their queries and keys too; few tables are divided by samples as well.
  const int64_t groups = clamped<int64_t>((16 + n_tables) / most<int64_t>(n_tables, 1), pairs.n_samples + 1);
  const Parts parts(pairs, n_tables, (pairs.n_samples + most<int64_t>(groups, 1) - 1) / most<int64_t>(groups, 1), n_queries, kParts);
  const auto sources = sources_for<Flips>(call, parts);
  // Sums: [T, B, Lq], [T, B, Lk], [groups of samples, T, differences].
  const int64_t of_queries = n_tables * pairs.n_samples * n_queries, of_keys = n_tables * pairs.n_samples * n_keys;
  const int64_t size = of_queries + of_keys + parts.of_samples * n_tables * n_differences;
  S* sums = allocated<S>(call, size);
  if (!sources || sums == nullptr) return "out of memory";
  S *to_queries = sums, *to_keys = sums + of_queries, *to_differences = to_keys + of_keys;
  std::memset(static_cast<void*>(sums), 0, static_cast<size_t>(size) * sizeof(S));
  in_parallel_if(large, call, parts.n(), [&](int64_t i) {
    const Part part = parts[i];
    auto source = sources[i];
    for_each_block(pairs, part, source, tables.weights, tables.n_rows, n_outputs, [&](const auto& block) {
      float cotangent[kPairs];
      int32_t by_position[kPairs];
      for (int64_t r = 0; r < block.n_runs; ++r) {
        const Run& run = block.runs[r];
        const int64_t t = run.table, b = run.sample, end = run.at + run.n;
        const float* of_query = dy + (b * n_queries + run.query) * n_outputs;
        for (int64_t p = run.at; p < end; ++p) {
          block.fetch(p + kAhead, tables.row_bytes());
          cotangent[p] = product_of_difference(block.rows[0][p], block.rows[1][p], of_query, n_outputs, scale, sums);
        }
        for (int64_t p = run.at; p < end; ++p) cotangent[p] *= slope(block.more.margin[p]);
        S* to_query = to_queries + (t * pairs.n_samples + b) * n_queries + run.query;
        S* to_key = to_keys + (t * pairs.n_samples + b) * n_keys + run.key - run.at;
        S of_run = 0;
        for (int64_t p = run.at; p < end; ++p) {
          S c;
          addend(cotangent[p], scale, &c);
          add_to(&of_run, block.more.to_query[p] ? c : 0);
          add_to(&to_key[p], block.more.to_query[p] ? 0 : c);
        }
        add_to(to_query, of_run);

        S* to_difference = to_differences + (parts.group(i) * n_tables + t) * n_differences + pairs.difference(run.query, run.key) - run.at;
        int64_t n = 0;
        for (int64_t p = run.at; p < end; ++p) {
          by_position[n] = static_cast<int32_t>(p);
          n += block.more.to_position[p];
        }
        for (int64_t k = 0; k < n; ++k) {
          const int64_t p = by_position[k];
          const float difference = product_of_difference(block.rows[0][p], block.rows[2][p], of_query, n_outputs, scale, sums);
          S c;
          addend(slope(block.more.position_margin[p]) * difference, scale, &c);
          add_to(&to_difference[p], c);
        }
      }
    });
  });
  S *query = data<S>(call.outputs[0]), *key = data<S>(call.outputs[1]), *position = data<S>(call.outputs[2]);
  for (int64_t b = 0; b < pairs.n_samples; ++b) {
    for (int64_t j = 0; j < n_queries; ++j)
      for (int64_t t = 0; t < n_tables; ++t) query[(b * n_queries + j) * n_tables + t] = to_queries[(t * pairs.n_samples + b) * n_queries + j];
    for (int64_t k = 0; k < n_keys; ++k)
      for (int64_t t = 0; t < n_tables; ++t) key[(b * n_keys + k) * n_tables + t] = to_keys[(t * pairs.n_samples + b) * n_keys + k];
  }
  const int64_t n_distances = call.outputs[2].shape[0], n_positions = call.outputs[2].shape[1];
  for (int64_t x = 0; x < n_distances * n_positions; ++x) position[x] = 0;
  for (int64_t g = 0; g < parts.of_samples; ++g)
    for (int64_t t = 0; t < n_tables; ++t)
      for (int64_t x = 0; x < n_differences; ++x)
        add_to(&position[pairs.distance(x, n_distances) * n_positions + (n_positions == 1 ? 0 : t)],
               to_differences[(g * n_tables + t) * n_differences + x]);
  return nullptr;
}

// Adds values [B, Lq, O] to the rows of a table: its gradient, or the table in its own memory.
template <class S>
const char* add(const Call& call, const Array& values, bool fresh) {
  const Pairs pairs = pairs_of(call);
  return add_pass(call, pairs, tables_of<S>(call.outputs[0]), data<const S>(values), fresh, sources_for<Ids>);
}

}  // namespace
}  // namespace lutjax

LUTJAX_KERNEL(lookup_attention_forward) {
  using namespace lutjax;
  switch (call.inputs[0].type) {
    case Type::float32: return forward<float>(call);
    case Type::bfloat16: return forward<bfloat16>(call);
    default: return "weights must be float32 or bfloat16";
  }
}

LUTJAX_KERNEL(lookup_attention_margins) {
  using namespace lutjax;
  const bool fixed = call.integers[kFixed] != 0;
  switch (call.inputs[0].type) {
    case Type::float32: return fixed ? margins_of<float, int32_t>(call) : margins_of<float, float>(call);
    case Type::bfloat16: return fixed ? margins_of<bfloat16, int32_t>(call) : margins_of<bfloat16, float>(call);
    default: return "weights must be float32 or bfloat16";
  }
}

// Inputs as above, the tables only for their shape, then values [B, Lq, O].
LUTJAX_KERNEL(lookup_attention_gradient) {
  using namespace lutjax;
  const Array& values = call.inputs[kPosition + 1];
  return values.type == Type::int32 ? add<int32_t>(call, values, true) : add<float>(call, values, true);
}

LUTJAX_KERNEL(lookup_attention_add) {
  using namespace lutjax;
  return add<float>(call, call.inputs[kPosition + 1], false);
}
