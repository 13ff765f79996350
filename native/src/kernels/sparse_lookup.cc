// Sums of rows whose slots reach selected outputs. With row = index[b, t] and k over a row's slots:
//
//   y[b, targets[t, row, k]] += w[t, row, k]
//   dw[t, row, k] += dy[b, targets[t, row, k]]
//   dmargin[b, t] = slope(margin[b, t]) * (sum_k w[t, row, k] dy[b, targets[t, row, k]] - the same of row index ^ flip)
//
// w: [T, R, K], targets: [T or 1, R or 1, K]; negative targets are unused slots, others are clamped. Outputs have an additional element
// for unused slots. Forward, and for margins, a task owns some samples; for dw it owns a table.
#include "rules.h"
#include "slots.h"

namespace lutjax {
namespace {

constexpr int64_t kSamples = 32;  // of a task

template <class W, class How>
const char* forward(const Call& call, const How& how) {
  using Y = typename How::template Output<W>;
  using Sum = typename How::Sum;
  using Part = typename How::Part;
  const Array &weights = call.inputs[0], &index = call.inputs[1], &output = call.outputs[0];
  const int64_t n_tables = weights.shape[0], n_rows = weights.shape[1], n_samples = index.shape[0], n_outputs = output.shape[1];
  const Slots slots(call.inputs[2], n_outputs);
  const W* w = data<const W>(weights);
  const int32_t* ids = data<const int32_t>(index);
  Y* y = data<Y>(output);
  const int64_t samples = samples_of_block(n_samples, kSamples);
  const bool done = in_parallel_with(call, (n_samples + samples - 1) / samples, (n_outputs + 1) * 4, [&](int64_t i, char* scratch) {
    Sum* sums = reinterpret_cast<Sum*>(scratch);
    for (int64_t b = i * samples, last = least(b + samples, n_samples); b < last; ++b) {
      for (int64_t o = 0; o <= n_outputs; ++o) sums[o] = 0;
      for (int64_t t = 0; t < n_tables; ++t) {
        const int64_t row = clamped<int64_t>(ids[b * n_tables + t], n_rows);
        if (b + 1 < last) {
          const int64_t next = clamped<int64_t>(ids[(b + 1) * n_tables + t], n_rows);
          prefetch(w + (t * n_rows + next) * slots.n_slots);
        }
        const W* from = w + (t * n_rows + row) * slots.n_slots;
        const int32_t* to = slots.row_targets(t, row);
        for (int64_t k = 0; k < slots.n_slots; ++k) {
          Sum& sum = sums[slots.output(to[k])];
          sum = static_cast<Sum>(static_cast<Part>(sum) + how.addend(value(from[k])));
        }
      }
      for (int64_t o = 0; o < n_outputs; ++o) store_sum(sums[o], y + b * n_outputs + o);
    }
  });
  return done ? nullptr : "no memory for the sums of a sample";
}

template <class W, class How>
const char* backward(const Call& call, const How& how) {
  using Sum = typename How::Sum;
  using Part = typename How::Part;
  const Array &weights = call.inputs[0], &index = call.inputs[1], &cotangent = call.inputs[5];
  const int64_t n_tables = weights.shape[0], n_rows = weights.shape[1], n_samples = index.shape[0], n_outputs = cotangent.shape[1];
  const bool of_weights = call.integers[1] != 0, of_detection = call.integers[2] != 0;
  const Slots slots(call.inputs[4], n_outputs);
  const int64_t n_slots = slots.n_slots;
  const W* w = data<const W>(weights);
  const int32_t *ids = data<const int32_t>(index), *flips = data<const int32_t>(call.inputs[2]);
  const float *margin = data<const float>(call.inputs[3]), *dy = data<const float>(cotangent);
  Sum* d_weights = of_weights ? data<Sum>(call.outputs[0]) : nullptr;
  Sum* d_margin = of_detection ? data<Sum>(call.outputs[of_weights ? 1 : 0]) : nullptr;
  const int32_t* by_table = nullptr;
  if (of_weights && (by_table = ids_by_table(call, index, n_rows)) == nullptr) return "no memory for ids";

  const auto table = [&](int64_t t) {
    Sum* rows = d_weights + t * n_rows * n_slots;
    std::memset(rows, 0, static_cast<size_t>(n_rows * n_slots) * sizeof(Sum));
    for (int64_t b = 0; b < n_samples; ++b) {
      const int64_t row = by_table[t * n_samples + b];
      const int32_t* to = slots.row_targets(t, row);
      const float* of = dy + b * n_outputs;
      Sum* sums = rows + row * n_slots;
      for (int64_t k = 0; k < n_slots; ++k) {
        const int64_t o = slots.output(to[k]);
        if (o < n_outputs) sums[k] = static_cast<Sum>(static_cast<Part>(sums[k]) + how.addend(of[o]));
      }
    }
  };

  const int64_t samples = samples_of_block(n_samples, kSamples);
  const auto block = [&](int64_t i) {
    for (int64_t b = i * samples, last = least(b + samples, n_samples); b < last; ++b)
      for (int64_t t = 0; t < n_tables; ++t) {
        const int64_t at = b * n_tables + t, row = clamped<int64_t>(ids[at], n_rows);
        const int64_t other = clamped<int64_t>(ids[at] ^ flips[at], n_rows);
        if (b + 1 < last) {
          const int64_t next = clamped<int64_t>(ids[at + n_tables], n_rows);
          prefetch(w + (t * n_rows + next) * n_slots);
        }
        const W* of_table = w + t * n_rows * n_slots;
        const Part sum = slots.difference(how, dy + b * n_outputs, of_table + row * n_slots, of_table + other * n_slots, slots.row_targets(t, row),
                                          slots.row_targets(t, other));
        store_slope(margin[at], static_cast<Sum>(sum), d_margin + at);
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

const char* update(const Call& call) {
  const Update u(call);
  const int64_t n_outputs = u.inputs[2].shape[1];
  const Slots slots(u.inputs[1], n_outputs);
  const float* dy = data<const float>(u.inputs[2]);
  return move_addressed_rows(call, u, u.inputs[0], [=](const auto& how, int64_t t, const Hit* hits, int64_t n, auto* sums) {
    const int32_t* to = slots.row_targets(t, hits[0].row);
    for (int64_t i = 0; i < n; ++i) {
      const float* of = dy + hits[i].number * n_outputs;
      for (int64_t k = 0; k < slots.n_slots; ++k) {
        const int64_t o = slots.output(to[k]);
        if (o < n_outputs) add_row(how, of + o, 1, sums + k);
      }
    }
  });
}

}  // namespace
}  // namespace lutjax

// Outputs have the type of the tables, or are fixed-point sums.
LUTJAX_KERNEL(sparse_lookup_forward) {
  using namespace lutjax;
  const bool fixed = call.integers[0] != 0;
  return for_type(call.inputs[0], fixed, call.numbers[0], [&](auto weight, auto how) { return forward<decltype(weight)>(call, how); });
}

LUTJAX_KERNEL(sparse_lookup_backward) {
  using namespace lutjax;
  const bool fixed = call.integers[0] != 0;
  return for_type(call.inputs[0], fixed, call.numbers[0], [&](auto weight, auto how) { return backward<decltype(weight)>(call, how); });
}

LUTJAX_KERNEL(sparse_lookup_update) { return lutjax::update(call); }
