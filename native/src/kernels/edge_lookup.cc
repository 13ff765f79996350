// Sums of rows with any number of edges. With row = index[b, t] and e over that row's edges in table t:
//
//   y[b, target[e]] += w[e]
//   dw[e] += dy[b, target[e]]
//   dmargin[b, t] = slope(margin[b, t]) * (sum_e w[e] dy[b, target[e]] - the same of row index ^ flip)
//
// w, target: [E]; first: [T * R + 1], the first edge of each row. Out-of-range edges and outputs are clamped. Forward, and for margins, a task
// owns some samples; for dw it owns a table, whose edges are contiguous.
#include "rules.h"

namespace lutjax {
namespace {

constexpr int64_t kSamples = 32;  // of a task

struct EdgeList {
  const int32_t *target, *bounds;
  int64_t n_edges, n_rows, n_bounds, n_outputs;

  EdgeList(const Array& targets, const Array& first, int64_t n_rows, int64_t n_outputs)
      : target(data<const int32_t>(targets)),
        bounds(data<const int32_t>(first)),
        n_edges(targets.shape[0]),
        n_rows(n_rows),
        n_bounds(first.shape[0]),
        n_outputs(n_outputs) {}

  // The first edge of a row, given its number among all tables' rows.
  int64_t begin(int64_t row) const {
    const int64_t edge = row < n_bounds ? bounds[row] : n_edges;
    return edge < 0 ? 0 : least(edge, n_edges);
  }
  int64_t output(int64_t edge) const { return clamped<int64_t>(target[edge], n_outputs); }

  template <class Visit>
  void visit(int64_t t, int64_t row, const Visit& visit) const {
    if (n_outputs == 0) return;
    const int64_t place = t * n_rows + row;
    for (int64_t e = begin(place), end = begin(place + 1); e < end; ++e) visit(e, output(e));
  }
};

template <class W, class How>
const char* forward(const Call& call, const How& how) {
  using Y = typename How::template Output<W>;
  using Sum = typename How::Sum;
  using Part = typename How::Part;
  const Array &index = call.inputs[1], &output = call.outputs[0];
  const int64_t n_rows = call.integers[1], n_samples = index.shape[0], n_tables = index.shape[1], n_outputs = output.shape[1];
  const EdgeList edges(call.inputs[2], call.inputs[3], n_rows, n_outputs);
  const W* w = data<const W>(call.inputs[0]);
  const int32_t* ids = data<const int32_t>(index);
  Y* y = data<Y>(output);
  const int64_t samples = samples_of_block(n_samples, kSamples);
  const bool done = in_parallel_with(call, (n_samples + samples - 1) / samples, (n_outputs + 1) * 4, [&](int64_t i, char* scratch) {
    Sum* sums = reinterpret_cast<Sum*>(scratch);
    for (int64_t b = i * samples, last = least(b + samples, n_samples); b < last; ++b) {
      for (int64_t o = 0; o < n_outputs; ++o) sums[o] = 0;
      for (int64_t t = 0; t < n_tables; ++t)
        edges.visit(t, clamped<int64_t>(ids[b * n_tables + t], n_rows), [&](int64_t e, int64_t o) {
          sums[o] = static_cast<Sum>(static_cast<Part>(sums[o]) + how.addend(value(w[e])));
        });
      for (int64_t o = 0; o < n_outputs; ++o) store_sum(sums[o], y + b * n_outputs + o);
    }
  });
  return done ? nullptr : "no memory for the sums of a sample";
}

template <class W, class How>
const char* backward(const Call& call, const How& how) {
  using Sum = typename How::Sum;
  using Part = typename How::Part;
  const Array &index = call.inputs[1], &cotangent = call.inputs[6];
  const int64_t n_rows = call.integers[3], n_samples = index.shape[0], n_tables = index.shape[1], n_outputs = cotangent.shape[1];
  const bool of_weights = call.integers[1] != 0, of_detection = call.integers[2] != 0;
  const EdgeList edges(call.inputs[4], call.inputs[5], n_rows, n_outputs);
  const W* w = data<const W>(call.inputs[0]);
  const int32_t *ids = data<const int32_t>(index), *flips = data<const int32_t>(call.inputs[2]);
  const float *margin = data<const float>(call.inputs[3]), *dy = data<const float>(cotangent);
  Sum* d_weights = of_weights ? data<Sum>(call.outputs[0]) : nullptr;
  Sum* d_margin = of_detection ? data<Sum>(call.outputs[of_weights ? 1 : 0]) : nullptr;
  const int32_t* by_table = nullptr;
  if (of_weights) {
    std::memset(d_weights, 0, static_cast<size_t>(edges.n_edges) * sizeof(Sum));
    if ((by_table = ids_by_table(call, index, n_rows)) == nullptr) return "no memory for ids";
  }

  const auto table = [&](int64_t t) {
    for (int64_t b = 0; b < n_samples; ++b) {
      const float* of = dy + b * n_outputs;
      edges.visit(t, by_table[t * n_samples + b], [&](int64_t e, int64_t o) {
        d_weights[e] = static_cast<Sum>(static_cast<Part>(d_weights[e]) + how.addend(of[o]));
      });
    }
  };
  const auto product = [&](const float* of, int64_t t, int64_t row) {
    Part sum = 0;
    edges.visit(t, row, [&](int64_t e, int64_t o) { sum += how.addend(value(w[e]) * of[o]); });
    return sum;
  };
  const int64_t samples = samples_of_block(n_samples, kSamples);
  const auto block = [&](int64_t i) {
    for (int64_t b = i * samples, last = least(b + samples, n_samples); b < last; ++b)
      for (int64_t t = 0; t < n_tables; ++t) {
        const int64_t at = b * n_tables + t;
        const float* of = dy + b * n_outputs;
        const Part of_row = product(of, t, clamped<int64_t>(ids[at], n_rows));
        const Part of_other = product(of, t, clamped<int64_t>(ids[at] ^ flips[at], n_rows));
        store_slope(margin[at], static_cast<Sum>(of_row - of_other), d_margin + at);
      }
  };
  const int64_t of_tables = of_weights && n_rows > 0 ? n_tables : 0;
  in_parallel(call, of_tables + (of_detection ? (n_samples + samples - 1) / samples : 0), [&](int64_t i) {
    if (i < of_tables)
      table(i);
    else
      block(i - of_tables);
  });
  return nullptr;
}

// Updates each edge in the rows read, once: edges are one-element rows, and their table is [1, E, 1].
template <class W, class How>
const char* update(const Call& call, const Update& u, const How& how) {
  using Sum = typename How::Sum;
  const Array &index = u.inputs[0], &cotangent = u.inputs[3];
  const int64_t n_rows = u.integers[0], n_samples = index.shape[0], n_tables = index.shape[1], n_outputs = cotangent.shape[1];
  const EdgeList edges(u.inputs[1], u.inputs[2], n_rows, n_outputs);
  const float* dy = data<const float>(cotangent);
  W* w = data<W>(u.weights);
  const int32_t* by_table = ids_by_table(call, index, n_rows);
  if (by_table == nullptr) return "no memory for ids";
  const auto row = [=](int64_t t, int64_t b) -> int64_t { return by_table[t * n_samples + b]; };
  const bool done = in_parallel_with(call, n_rows > 0 ? n_tables : 0, bytes_to_sort(n_samples), [&](int64_t t, char* scratch) {
    Hit* hits = reinterpret_cast<Hit*>(scratch);
    const int64_t n = hits_of(t, n_samples, row, hits);
    hits = sorted(hits, n, n_samples, n_rows);
    for (int64_t first = 0, last; first < n; first = last) {
      for (last = first + 1; last < n && hits[last].row == hits[first].row;) ++last;
      edges.visit(t, hits[first].row, [&](int64_t e, int64_t o) {
        Sum sum = 0;
        for (int64_t i = first; i < last; ++i) add_row(how, dy + hits[i].number * n_outputs + o, 1, &sum);
        float gradient;
        u.move(0, e, 1, &sum, &gradient, w + e);
      });
    }
  });
  return done ? nullptr : "no memory for the hits of a table";
}

}  // namespace
}  // namespace lutjax

// Outputs have the type of the weights, or are fixed-point sums.
LUTJAX_KERNEL(edge_lookup_forward) {
  using namespace lutjax;
  const bool fixed = call.integers[0] != 0;
  return for_type(call.inputs[0], fixed, call.numbers[0], [&](auto weight, auto how) { return forward<decltype(weight)>(call, how); });
}

LUTJAX_KERNEL(edge_lookup_backward) {
  using namespace lutjax;
  const bool fixed = call.integers[0] != 0;
  return for_type(call.inputs[0], fixed, call.numbers[0], [&](auto weight, auto how) { return backward<decltype(weight)>(call, how); });
}

LUTJAX_KERNEL(edge_lookup_update) {
  using namespace lutjax;
  const Update u(call);
  return for_type(u.weights, u.fixed, u.scale, [&](auto weight, auto how) { return update<decltype(weight)>(call, u, how); });
}
