// Sums of addressed rows, and their gradients; G groups of consecutive tables have separate outputs:
//
//   y[b, g] = sum over tables t of g of w[t, index[b, t]]
//   dw[t, index[b, t]] += dy[b, g]
//   dmargin[b, t] = slope(margin[b, t]) * <dy[b, g], w[t, index] - w[t, index ^ flip]>
//
// w: [T, R, O], index: [B, T], y: [B, G * O]. Forward, and for margins, a task owns some samples: sums stay in registers, and the next
// sample's rows are prefetched. For dw a task owns a table, or some of its rows.
#include "rules.h"

namespace lutjax {
namespace {

constexpr int64_t kSamples = 32;      // of a task
constexpr int64_t kWorth = 1 << 15;  // numbers of rows that are worth a second thread

struct Sizes {
  int64_t n_tables, n_rows, n_outputs, groups, each, width, n_samples;

  Sizes(const Array& weights, const Array& index, int64_t groups)
      : n_tables(weights.shape[0]),
        n_rows(weights.shape[1]),
        n_outputs(weights.shape[2]),
        groups(groups),
        each(weights.shape[0] / groups),
        width(groups * weights.shape[2]),
        n_samples(index.shape[0]) {}
};

template <class W, class How>
const char* forward(const Call& call, const How& how) {
  using Y = typename How::template Output<W>;
  const Sizes s(call.inputs[0], call.inputs[1], call.integers[0]);
  const W* w = data<const W>(call.inputs[0]);
  const int32_t* ids = data<const int32_t>(call.inputs[1]);
  Y* y = data<Y>(call.outputs[0]);
  const int64_t samples = samples_of_block(s.n_samples, kSamples), n_blocks = (s.n_samples + samples - 1) / samples;
  // Few samples: also divide the outputs.
  const int64_t n_parts = n_blocks * s.groups >= 8 ? 1 : most<int64_t>(least<int64_t>(s.n_outputs / 64, 8), 1);
  const int64_t part = ((s.n_outputs + n_parts - 1) / n_parts + 15) / 16 * 16;
  const int64_t rows_at = (part * 4 + 63) / 64 * 64;
  const bool done = in_parallel_with(call, n_blocks * s.groups * n_parts, rows_at + 2 * s.each * 8, [&](int64_t i, char* scratch) {
    const int64_t of_part = i % n_parts, g = i / n_parts % s.groups, first = i / n_parts / s.groups * samples;
    const int64_t last = least(first + samples, s.n_samples), from = of_part * part, size = least(part, s.n_outputs - from);
    if (size <= 0) return;
    auto* sums = reinterpret_cast<typename How::Sum*>(scratch);
    const W** rows = reinterpret_cast<const W**>(scratch + rows_at);
    const W** next = rows + s.each;
    const int64_t asked = least<int64_t>(size * static_cast<int64_t>(sizeof(W)), 256);
    const auto look_up = [&](int64_t b, const W** found) {
      const int32_t* of = ids + b * s.n_tables + g * s.each;
      for (int64_t t = 0; t < s.each; ++t) {
        found[t] = w + ((g * s.each + t) * s.n_rows + clamped<int64_t>(of[t], s.n_rows)) * s.n_outputs + from;
        ask_for(found[t], asked);
      }
    };
    look_up(first, rows);
    for (int64_t b = first; b < last; ++b) {
      if (b + 1 < last) look_up(b + 1, next);
      for (int64_t o = 0; o < size; ++o) sums[o] = 0;
      add_rows(how, s.each, [=](int64_t t) { return rows[t]; }, size, sums);
      Y* to = y + b * s.width + g * s.n_outputs + from;
      for (int64_t o = 0; o < size; ++o) store_sum(sums[o], to + o);
      const W** seen = rows;
      rows = next;
      next = seen;
    }
  }, s.n_samples * s.n_tables * s.n_outputs > kWorth);
  return done ? nullptr : "no memory for the rows of a sample";
}

// <dy, row - other>, the rows subtracted first.
template <class How, class W>
inline typename How::Part product(const How& how, const float* dy, const W* row, const W* other, int64_t size) {
  typename How::Parts a{}, b{};
  int64_t o = 0;
  for (; o + 2 * kLanes <= size; o += 2 * kLanes) {
    a += how.addend((load(row + o) - load(other + o)) * load(dy + o));
    b += how.addend((load(row + o + kLanes) - load(other + o + kLanes)) * load(dy + o + kLanes));
  }
  for (; o + kLanes <= size; o += kLanes) a += how.addend((load(row + o) - load(other + o)) * load(dy + o));
  auto sum = sum_of(a + b);
  for (; o < size; ++o) sum += how.addend((value(row[o]) - value(other[o])) * dy[o]);
  return sum;
}

template <class W, class How>
const char* backward(const Call& call, const How& how) {
  using Sum = typename How::Sum;
  const Array &weights = call.inputs[0], &index = call.inputs[1];
  const Sizes s(weights, index, call.integers[0]);
  const bool of_weights = call.integers[2] != 0, of_detection = call.integers[3] != 0;
  const W* w = data<const W>(weights);
  const int32_t *ids = data<const int32_t>(index), *flips = data<const int32_t>(call.inputs[2]);
  const float *margin = data<const float>(call.inputs[3]), *dy = data<const float>(call.inputs[4]);
  Sum* d_weights = of_weights ? data<Sum>(call.outputs[0]) : nullptr;
  Sum* d_margin = of_detection ? data<Sum>(call.outputs[of_weights ? 1 : 0]) : nullptr;

  const int32_t* by_table = nullptr;
  if (of_weights && (by_table = ids_by_table(call, index, s.n_rows)) == nullptr) return "no memory for ids";
  const int64_t n_parts = s.n_tables >= 8 ? 1 : least<int64_t>(8, most<int64_t>(s.n_rows / 16, 1));
  const int64_t part = (s.n_rows + n_parts - 1) / n_parts, of_tables = of_weights ? s.n_tables * n_parts : 0;
  const int64_t asked_of_sums = least<int64_t>(s.n_outputs * 4, 256);
  const auto table = [&](int64_t i) {
    const int64_t t = i / n_parts, first = i % n_parts * part, last = least(first + part, s.n_rows);
    Sum* rows = d_weights + t * s.n_rows * s.n_outputs;
    if (first < last) std::memset(rows + first * s.n_outputs, 0, static_cast<size_t>((last - first) * s.n_outputs) * sizeof(Sum));
    const int32_t* of = by_table + t * s.n_samples;
    const float* from = dy + t / s.each * s.n_outputs;
    for (int64_t b = 0; b < s.n_samples; ++b, from += s.width) {
      if (b + kAhead < s.n_samples) ask_for(rows + of[b + kAhead] * s.n_outputs, asked_of_sums);
      if (of[b] >= first && of[b] < last) add_row(how, from, s.n_outputs, rows + of[b] * s.n_outputs);
    }
  };

  const int64_t samples = samples_of_block(s.n_samples, kSamples);
  const int64_t of_samples = of_detection && s.n_tables > 0 ? (s.n_samples + samples - 1) / samples : 0;
  // Rows are prefetched while the rows of as many preceding tables are multiplied: a few kilobytes are in flight.
  const int64_t asked = least<int64_t>(s.n_outputs * static_cast<int64_t>(sizeof(W)), 256);
  const int64_t ahead = least(s.n_tables, least<int64_t>(most<int64_t>(2048 / most<int64_t>(asked, 1), 1), 16));
  const auto block = [&](int64_t i, char* scratch) {
    Sum* differences = reinterpret_cast<Sum*>(scratch);
    const W** rows = reinterpret_cast<const W**>(scratch + (s.n_tables * 4 + 63) / 64 * 64);
    const W** next = rows + 2 * s.n_tables;
    const int64_t first = i * samples, last = least(first + samples, s.n_samples);
    const auto look_up = [&](int64_t b, const W** found) {
      for (int64_t t = 0; t < s.n_tables; ++t) {
        const int32_t id = ids[b * s.n_tables + t], other = id ^ flips[b * s.n_tables + t];
        const W* of = w + t * s.n_rows * s.n_outputs;
        found[2 * t] = of + clamped<int64_t>(id, s.n_rows) * s.n_outputs;
        found[2 * t + 1] = of + clamped<int64_t>(other, s.n_rows) * s.n_outputs;
      }
    };
    look_up(first, rows);
    for (int64_t b = first; b < last; ++b) {
      if (b + 1 < last) look_up(b + 1, next);
      for (int64_t g = 0; g < s.groups; ++g)
        for (int64_t t = g * s.each; t < (g + 1) * s.each; ++t) {
          const int64_t later = t + ahead;
          if (later < s.n_tables) {
            ask_for(rows[2 * later], asked);
            ask_for(rows[2 * later + 1], asked);
          } else if (b + 1 < last) {
            ask_for(next[2 * (later - s.n_tables)], asked);
            ask_for(next[2 * (later - s.n_tables) + 1], asked);
          }
          differences[t] = static_cast<Sum>(product(how, dy + b * s.width + g * s.n_outputs, rows[2 * t], rows[2 * t + 1], s.n_outputs));
        }
      for (int64_t t = 0, at = b * s.n_tables; t < s.n_tables; ++t) store_slope(margin[at + t], differences[t], d_margin + at + t);
      const W** seen = rows;
      rows = next;
      next = seen;
    }
  };
  const int64_t bytes = of_samples == 0 ? 0 : (s.n_tables * 4 + 63) / 64 * 64 + 4 * s.n_tables * 8;
  const bool done = in_parallel_with(call, of_tables + of_samples, bytes, [&](int64_t i, char* scratch) {
    if (i < of_tables)
      table(i);
    else
      block(i - of_tables, scratch);
  });
  return done ? nullptr : "no memory for the rows of a sample";
}

const char* update(const Call& call) {
  const Update u(call);
  const Sizes s(u.weights, u.inputs[0], u.integers[0]);
  const float* dy = data<const float>(u.inputs[1]);
  return move_addressed_rows(call, u, u.inputs[0], [=](const auto& how, int64_t t, const Hit* hits, int64_t n, auto* sums) {
    const float* of_group = dy + t / s.each * s.n_outputs;
    add_rows(how, n, [=](int64_t i) { return of_group + hits[i].number * s.width; }, s.n_outputs, sums);
  });
}

}  // namespace
}  // namespace lutjax

// Outputs have the type of the tables, or are fixed-point sums.
LUTJAX_KERNEL(lookup_forward) {
  using namespace lutjax;
  const bool fixed = call.integers[1] != 0;
  return for_type(call.inputs[0], fixed, call.numbers[0], [&](auto weight, auto how) { return forward<decltype(weight)>(call, how); });
}

LUTJAX_KERNEL(lookup_backward) {
  using namespace lutjax;
  const bool fixed = call.integers[1] != 0;
  return for_type(call.inputs[0], fixed, call.numbers[0], [&](auto weight, auto how) { return backward<decltype(weight)>(call, how); });
}

LUTJAX_KERNEL(lookup_update) { return lutjax::update(call); }
