// `lutjax.lut_pair_attention`: every pair of positions is detected separately, z = [keys[i], x[j], positions[d]].
//
// y[j] = sum_{i, t} weights[t, row(z)];  dweights[t, row] += dy[j];  dz of the ends of the closest comparison is
// +-slope(margin) * <dy[j], weights[t, row] - weights[t, row ^ flip]>.
//
// A comparison is the sum of its key, query and position terms, at most two of them nonzero. Terms are
// computed once per position. Such sums are exact.
//
// Arrays of its own, numbers in float32: x [B, Lq, I], keys [B, Lk, I], anchors [T, C, 2] (clamped here), positions [distances, T or 1, N].
#include "pairs.h"

namespace lutjax {
namespace {

enum : int { kX = kQueries, kAnchors = kOwn, kPositions, kValues };
enum : int { kInterleave = kOwnIntegers };
enum : int { kEpsilon = kOwnNumbers };

// A comparison end: an element of the key, the query or the position.
struct End {
  enum Of { key, query, position } of;
  int64_t id;
};

// All detectors' comparisons.
struct Comparisons {
  Comparisons(const Array* inputs, const int64_t* integers)
      : anchors(data<const int32_t>(inputs[kAnchors])),
        n(inputs[kAnchors].shape[1]),
        n_inputs(inputs[kX].shape[2]),
        n_bits(inputs[kPositions].shape[2]),
        interleave(integers[kInterleave] != 0) {}

  End end(int64_t t, int64_t r, int64_t e) const {
    const int64_t id = clamped<int64_t>(anchors[(t * n + r) * 2 + e], 2 * n_inputs + n_bits);
    if (interleave) return End{static_cast<End::Of>(id % 3), id / 3};
    const int64_t of = id < n_inputs ? 0 : id < 2 * n_inputs ? 1 : 2;
    return End{static_cast<End::Of>(of), id - of * n_inputs};
  }

  const int32_t* anchors;
  const int64_t n, n_inputs, n_bits;
  const bool interleave;
};

// The pairs' rows; with `kFlipped` also the rows with the closest comparison's bit flipped.
template <bool kFlipped>
struct Detected {
  static constexpr int kWays = kFlipped ? 2 : 1;
  struct More {
    float margin[kFlipped ? kPairs : 1];
    int32_t closest[kFlipped ? kPairs : 1];  // number of the comparison
  };
  static constexpr int64_t kMost = 31;  // comparisons

  static int64_t bytes(const Pairs& pairs) { return 4 * kMost * (pairs.n_queries + pairs.n_keys + pairs.n_differences()); }

  Detected(const Call& call, const Pairs& pairs, char* scratch)
      : inputs(call.inputs),
        pairs(pairs),
        comparisons(call.inputs, call.integers),
        epsilon(static_cast<float>(call.numbers[kEpsilon])),
        n_rows(static_cast<int32_t>(inputs[kWeights].shape[1])),
        query(reinterpret_cast<float*>(scratch)),
        key(query + comparisons.n * pairs.n_queries),
        position(key + comparisons.n * pairs.n_keys) {}

  void distances(int64_t t, int64_t b) {
    const Array& positions = inputs[kPositions];
    const int64_t n_positions = positions.shape[1], n_bits = comparisons.n_bits;
    const float* from = data<const float>(positions) + (n_positions == 1 ? 0 : t) * n_bits;
    for (int64_t r = 0; r < comparisons.n; ++r) {
      float* to = position + r * pairs.n_differences();
      const End first = comparisons.end(t, r, 0), second = comparisons.end(t, r, 1);
      for (int64_t x = 0; x < pairs.n_differences(); ++x) {
        const float* at = from + pairs.distance(b, x, positions.shape[0]) * n_positions * n_bits;
        to[x] = (first.of == End::position ? at[first.id] : 0.0f) - (second.of == End::position ? at[second.id] : 0.0f);
      }
    }
  }
  void sample(int64_t t, int64_t b) {
    terms(inputs[kX], End::query, t, b, query);
    terms(inputs[kKeys], End::key, t, b, key);
  }
  void terms(const Array& of_places, End::Of of, int64_t t, int64_t b, float* to) const {
    const int64_t n = of_places.shape[1], n_inputs = comparisons.n_inputs;
    const float* from = data<const float>(of_places) + b * n * n_inputs;
    for (int64_t r = 0; r < comparisons.n; ++r) {
      const End first = comparisons.end(t, r, 0), second = comparisons.end(t, r, 1);
      for (int64_t i = 0; i < n; ++i) {
        const float* at = from + i * n_inputs;
        to[r * n + i] = (first.of == of ? at[first.id] : 0.0f) - (second.of == of ? at[second.id] : 0.0f);
      }
    }
  }

  LUTJAX_NOINLINE void rows(const Run& run, int32_t (*of)[kPairs], More* more) const {
    int32_t index[kPairs];
    for (int64_t p = 0; p < run.n; ++p) index[p] = 0;
    float* margin = more->margin + (kFlipped ? run.at : 0);
    int32_t* closest = more->closest + (kFlipped ? run.at : 0);
    if (kFlipped)
      for (int64_t p = 0; p < run.n; ++p) margin[p] = INFINITY, closest[p] = 0;
    for (int64_t r = 0; r < comparisons.n; ++r) {
      const float *of_key = key + r * pairs.n_keys + run.key, of_query = query[r * pairs.n_queries + run.query];
      const float* of_position = position + r * pairs.n_differences() + pairs.difference(run.query, run.key);
      const int32_t bit = int32_t{1} << r, number = static_cast<int32_t>(r);
      for (int64_t p = 0; p < run.n; ++p) {
        const float delta = of_key[p] + of_query + of_position[p], size = std::fabs(delta);
        index[p] |= ((delta > 0) & !(size < epsilon)) ? bit : 0;
        if (kFlipped) {
          // Strictly closer, so that the first of equals stays; NaN is closer than any number.
          const bool closer = (r == 0) | (size < std::fabs(margin[p])) | ((delta != delta) & (margin[p] == margin[p]));
          margin[p] = closer ? delta : margin[p];
          closest[p] = closer ? number : closest[p];
        }
      }
    }
    for (int64_t p = 0; p < run.n; ++p) of[0][run.at + p] = clamped(index[p], n_rows);
    if (kFlipped)
      for (int64_t p = 0; p < run.n; ++p) of[kWays - 1][run.at + p] = clamped(index[p] ^ (comparisons.n > 0 ? 1 << closest[p] : 0), n_rows);
  }

  const Array* inputs;
  const Pairs& pairs;
  const Comparisons comparisons;
  const float epsilon;
  const int32_t n_rows;
  float *query, *key, *position;  // [C, places or differences]
};

using Ids = Detected<false>;
using Flips = Detected<true>;

// Cotangents of the compared arrays. Outputs: x [B, Lq, I], keys [B, Lk, I], positions [distances, T or 1, N].
template <class W, class How, class Reach>
const char* inputs_of(const Call& given, const How& how, const Reach& reach) {
  using Sum = typename How::Sum;
  const Pairs pairs = pairs_of(given.inputs, given.integers);
  const Tables<const W> tables(given.inputs[kWeights]);
  const Comparisons comparisons(given.inputs, given.integers);
  const Array& positions = given.inputs[kPositions];
  const int64_t n_samples = pairs.n_samples, n_tables = tables.n_tables, n_outputs = given.integers[kOutputs], n_inputs = comparisons.n_inputs;
  const int64_t n_queries = pairs.n_queries, n_keys = pairs.n_keys, n_distances = positions.shape[0], n_bits = comparisons.n_bits;
  const float* dy = data<const float>(given.inputs[kValues]);
  const Call call = call_for(given, 2 * pairs.count() * n_tables * tables.row_bytes());
  // Each part adds to its own small sums: few samples are divided by tables, many by samples.
  const int64_t of_queries = n_samples * n_queries * n_inputs, of_keys = n_samples * n_keys * n_inputs;
  const int64_t wanted = kParts / 2, groups = clamped<int64_t>(most(of_queries / 16384, wanted / most<int64_t>(n_tables, 1)), wanted + 1);
  const Parts parts(pairs, n_tables, (n_samples + most<int64_t>(groups, 1) - 1) / most<int64_t>(groups, 1), n_queries, wanted);
  const int64_t chunks = parts.of_tables, of_table = n_distances * n_bits, of_positions = n_tables * of_table;
  const int64_t size = chunks * (of_queries + of_keys) + parts.of_samples * of_positions;
  Sum* sums = allocated<Sum>(call, size);
  if (sums == nullptr) return kNoMemory;
  Sum *to_queries = sums, *to_keys = sums + chunks * of_queries, *to_positions = to_keys + chunks * of_keys;
  std::memset(sums, 0, static_cast<size_t>(size) * sizeof(Sum));
  // Without comparisons there is no gradient.
  const bool done = comparisons.n == 0 || in_parallel_with(call, parts.n(), Flips::bytes(pairs) + reach.bytes(), [&](int64_t i, char* scratch) {
    Flips source(call, pairs, scratch + reach.bytes());
    Sum *own_queries = to_queries + parts.chunk(i) * of_queries, *own_keys = to_keys + parts.chunk(i) * of_keys;
    Sum* own_positions = to_positions + parts.group(i) * of_positions;
    for_each_block(pairs, parts[i], source, tables.weights, tables.n_rows, tables.n_outputs, [&](const auto& block) {
      for (int64_t r = 0; r < block.n_runs; ++r) {
        const Run& run = block.runs[r];
        const int64_t t = run.table, at_query = run.sample * n_queries + run.query;
        const W* table = tables.table_rows(t);
        const float* of_query = reach.values(t, dy + at_query * n_outputs, scratch);
        for (int64_t p = run.at; p < run.at + run.n; ++p) {
          reach.fetch_ahead(block, p, table, t, 0, tables.n_outputs);
          const float lost = reach.product(how, t, table, of_query, block.rows[0][p], block.rows[1][p]);
          const typename How::Part cotangent = how.addend(slope(block.more.margin[p]) * lost);
          const int64_t key = run.key + p - run.at;
          for (int64_t e = 0; e < 2; ++e) {
            const End end = comparisons.end(t, block.more.closest[p], e);
            Sum* to = end.of == End::query ? own_queries + at_query * n_inputs
                      : end.of == End::key ? own_keys + (run.sample * n_keys + key) * n_inputs
                                           : own_positions + t * of_table + pairs.distance(run.sample, pairs.difference(run.query, key), n_distances) * n_bits;
            add_to(how, to + end.id, e == 0 ? cotangent : 0 - cotangent);
          }
        }
      }
    });
  });
  if (!done) return kNoMemory;
  Sum *x = data<Sum>(call.outputs[0]), *keys = data<Sum>(call.outputs[1]), *of_distances = data<Sum>(call.outputs[2]);
  std::memset(x, 0, static_cast<size_t>(of_queries) * sizeof(Sum));
  std::memset(keys, 0, static_cast<size_t>(of_keys) * sizeof(Sum));
  for (int64_t c = 0; c < chunks; ++c) {
    add_row(x, to_queries + c * of_queries, of_queries);
    add_row(keys, to_keys + c * of_keys, of_keys);
  }
  const int64_t n_positions = positions.shape[1];
  std::memset(of_distances, 0, static_cast<size_t>(n_distances * n_positions * n_bits) * sizeof(Sum));
  for (int64_t g = 0; g < parts.of_samples; ++g)
    for (int64_t t = 0; t < n_tables; ++t)
      for (int64_t d = 0; d < n_distances; ++d)
        add_row(of_distances + (d * n_positions + (n_positions == 1 ? 0 : t)) * n_bits,
                to_positions + ((g * n_tables + t) * n_distances + d) * n_bits, n_bits);
  return nullptr;
}

}  // namespace
}  // namespace lutjax

LUTJAX_KERNEL(lut_pair_attention_forward) { return lutjax::forward<lutjax::Ids>(call); }

// Inputs as above, then dy [B, Lq, O].
LUTJAX_KERNEL(lut_pair_attention_inputs) {
  using namespace lutjax;
  return for_reach(call.inputs[kTargets], call.integers[kOutputs], [&](const auto& reach) {
    return for_type(call, [&](auto weight, auto how) { return inputs_of<decltype(weight)>(call, how, reach); });
  });
}

// The table gradient; only the tables' shape matters.
LUTJAX_KERNEL(lut_pair_attention_gradient) { return lutjax::add<lutjax::Ids>(call, call.inputs[lutjax::kValues], true); }

// The tables plus values, in place.
LUTJAX_KERNEL(lut_pair_attention_add) { return lutjax::add<lutjax::Ids>(call, call.inputs[lutjax::kValues], false); }

LUTJAX_KERNEL(lut_pair_attention_update) { return lutjax::update<lutjax::Ids>(call, lutjax::kValues + 1); }
