// In-place table row updates, from the reads that touched the rows: see `lutjax/kernels/_xla/_row_updates.py` and the rules in
// `lutjax/values/_row_rules.py`.
//
// A hit is a row read: read number i in table t. A kernel returns the row, and adds up gradients:
//
//   LUTJAX_KERNEL(lookup_update) {
//     const Update update(call);                 // what `lutjax_cpu/_rules.py` passes; the kernel's own arrays and options are
//                                                // update.inputs, update.integers, update.numbers
//     return move_rows(call, update, n_hits,
//       [&](int64_t t, int64_t i) -> int64_t { the row, clamped; -1 if the hit does not count },
//       [&](const auto& how, int64_t t, const Hit* hits, int64_t n, auto* sums) { adds to sums[outputs] the addends (`how`, see
//         lanes.h) of the gradients of hits[0..n-1].number, which all hit one row of table t, in this order });
//   }
//
// A table's hits are sorted by row, stably. Each hit row is updated once, by the sum of its
// gradients. If the rule needs no sums (`RowRule.additive`, float32 rows, no fixed point, one rate per table), hits are added to the
// table one after the other: `how` then multiplies by the rate, n is 1, and `sums` is the row. One task owns a table or a part of its
// rows, so results do not depend on the number of threads.
#pragma once

#include <cmath>

#include "ids.h"

#if defined(LUTJAX_LEVEL) && defined(_MSC_VER)
#include <intrin.h>
#endif

#ifdef LUTJAX_LEVEL
namespace lutjax {
namespace {

// Calls body(i, scratch) once for each i below n, on any thread, with `bytes` of exclusive scratch memory. Returns false
// if no memory is left. worth_threads: whether the work justifies more threads; waking one takes several microseconds.
template <class Body>
bool in_parallel_with(const Call& call, int64_t n, int64_t bytes, const Body& body, bool worth_threads = true) {
  const int64_t workers = least(n, worth_threads ? call.pool.n_threads : 1), each = (bytes + 127) / 64 * 64;
  if (workers <= 0) return true;
  char* scratch = allocated<char>(call, workers * each);
  if (scratch == nullptr) return false;
  alignas(64) long long next = 0;
  in_parallel(call, workers, [&](int64_t worker) {
    for (;;) {
#if defined(__GNUC__)
      const int64_t i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
#else
      const int64_t i = _InterlockedExchangeAdd64(&next, 1);
#endif
      if (i >= n) return;
      body(i, scratch + worker * each);
    }
  });
  return true;
}

// ------------------------------------------------------------------------------------- sorted hits
struct Hit {
  int32_t row, number;
};

constexpr int64_t kDigits = 2048;  // of a pass of the sort

// Scratch bytes for `sorted_hits`.
inline int64_t bytes_to_sort(int64_t n_hits) { return 2 * n_hits * static_cast<int64_t>(sizeof(Hit)) + kDigits * 4; }

// Sorts hits by row, stably. `hits` has room for twice as many, then for the digit counts. Returns the sorted hits.
LUTJAX_NOINLINE inline Hit* sorted(Hit* hits, int64_t n, int64_t room, int64_t n_rows) {
  if (n <= 16) {
    for (int64_t i = 1; i < n; ++i) {
      const Hit hit = hits[i];
      int64_t to = i;
      for (; to > 0 && hits[to - 1].row > hit.row; --to) hits[to] = hits[to - 1];
      hits[to] = hit;
    }
    return hits;
  }
  Hit *from = hits, *to = hits + room;
  int32_t* counts = reinterpret_cast<int32_t*>(hits + 2 * room);
  int bits = 0, passes = 1;
  while (bits < 31 && (int64_t{1} << bits) < n_rows) ++bits;
  while (bits > 11 * passes) ++passes;
  const int width = (bits + passes - 1) / passes;
  const int32_t digits = 1 << width, mask = digits - 1;
  for (int shift = 0; shift < bits; shift += width) {
    for (int32_t d = 0; d < digits; ++d) counts[d] = 0;
    for (int64_t i = 0; i < n; ++i) ++counts[(from[i].row >> shift) & mask];
    for (int32_t d = 0, first = 0; d < digits; ++d) {
      const int32_t count = counts[d];
      counts[d] = first;
      first += count;
    }
    for (int64_t i = 0; i < n; ++i) to[counts[(from[i].row >> shift) & mask]++] = from[i];
    Hit* swapped = from;
    from = to;
    to = swapped;
  }
  return from;
}

// ------------------------------------------------------------------------------------- rules
enum class Rule : int64_t { sgd, adagrad, momentum, adam };

// Row factors: a scalar, or [T or 1, R or 1, O or 1].
struct Factors {
  const float* from;
  int64_t of_table = 0, of_row = 0, of_output = 0;  // how far the next one is; 0: it is the same

  explicit Factors(const Array& a) : from(data<const float>(a)) {
    if (a.rank != 3) return;
    if (a.shape[0] > 1) of_table = a.shape[1] * a.shape[2];
    if (a.shape[1] > 1) of_row = a.shape[2];
    if (a.shape[2] > 1) of_output = 1;
  }

  bool same_in_table() const { return of_row == 0 && of_output == 0; }
  const float* row_factors(int64_t t, int64_t row) const { return from + t * of_table + row * of_row; }
};

struct Update {
  Array weights;
  Rule rule;
  Factors rate, factor;
  float weight_decay, eps, decay, second_decay;  // decay: `momentum` or `b1`, second_decay: `b2`
  bool fixed;
  float scale;     // of fixed point
  float* state[3];  // in the order of `RowRule.state_sizes`
  const Array* inputs;
  const int64_t* integers;
  const double* numbers;

  explicit Update(const Call& call)
      : weights(call.outputs[0]),
        rule(static_cast<Rule>(call.integers[0])),
        rate(call.inputs[1]),
        factor(call.inputs[2]),
        weight_decay(static_cast<float>(call.numbers[0])),
        eps(static_cast<float>(call.numbers[1])),
        decay(static_cast<float>(call.numbers[2])),
        second_decay(static_cast<float>(call.numbers[3])),
        fixed(call.integers[2] != 0),
        scale(static_cast<float>(call.numbers[4])),
        inputs(call.inputs + 3 + call.integers[1]),
        integers(call.integers + 3),
        numbers(call.numbers + 5) {
    for (int64_t i = 0; i < 3; ++i) state[i] = i < call.integers[1] ? data<float>(call.outputs[1 + i]) : nullptr;
  }

  float gradient_of(float sum) const { return sum; }
  float gradient_of(int32_t sum) const { return static_cast<float>(sum) / scale; }

  // Prefetches a row's state in all state tables: scalars per row, the first cache line of other state.
  void ask_for_state(int64_t row, int64_t size) const {
    for (int i = 0; i < 3; ++i)
      if (state[i] != nullptr) prefetch(state[i] + row * (rule == Rule::momentum || i == 2 ? size : 1));
  }

  template <class Sum, class W>
  void move(int64_t t, int64_t of, int64_t size, const Sum* sums, float* gradient, W* to) const;
};

// Calls f(function from output o to its factor), for one row.
template <class Body>
inline void with_factors(const Factors& factors, int64_t t, int64_t row, const Body& f) {
  const float* of = factors.row_factors(t, row);
  if (factors.of_output != 0)
    return f([=](int64_t o) { return of[o]; });
  const float all = *of;
  f([=](int64_t) { return all; });
}

inline float mean_square(const float* x, int64_t size) {
  Floats squares{};
  int64_t o = 0;
  for (; o + kLanes <= size; o += kLanes) squares += load(x + o) * load(x + o);
  float sum = sum_of(squares);
  for (; o < size; ++o) sum += x[o] * x[o];
  return sum / static_cast<float>(most<int64_t>(size, 1));
}

// Updates row `of` in table t by sums; `gradient` is scratch memory for as many elements.
template <class Sum, class W>
void Update::move(int64_t t, int64_t of, int64_t size, const Sum* sums, float* gradient, W* to) const {
  const int64_t row = t * weights.shape[1] + of;
  with_factors(factor, t, of, [&](auto by) {
    for (int64_t o = 0; o < size; ++o) gradient[o] = gradient_of(sums[o]) * by(o);
  });
  if (rule == Rule::adagrad) {
    float* sum = state[0] + row;
    *sum += mean_square(gradient, size);
    const float scaled = 1 / sqrtf(*sum + eps);
    for (int64_t o = 0; o < size; ++o) gradient[o] *= scaled;
  } else if (rule == Rule::momentum) {
    float* velocity = state[0] + row * size;
    for (int64_t o = 0; o < size; ++o) gradient[o] = velocity[o] = decay * velocity[o] + gradient[o];
  } else if (rule == Rule::adam) {
    float *second = state[0] + row, *count = state[1] + row;
    *count += 1;
    *second = second_decay * *second + (1 - second_decay) * mean_square(gradient, size);
    if (state[2] != nullptr) {
      float* first = state[2] + row * size;
      const float unbiased = 1 - powf(decay, *count);
      for (int64_t o = 0; o < size; ++o) {
        first[o] = decay * first[o] + (1 - decay) * gradient[o];
        gradient[o] = first[o] / unbiased;
      }
    }
    const float scale = sqrtf(*second / (1 - powf(second_decay, *count))) + eps;
    for (int64_t o = 0; o < size; ++o) gradient[o] /= scale;
  }
  if (weight_decay != 0)
    for (int64_t o = 0; o < size; ++o) gradient[o] += weight_decay * value(to[o]);
  with_factors(rate, t, of, [&](auto by) {
    for (int64_t o = 0; o < size; ++o) store(value(to[o]) - by(o) * gradient[o], to + o);
  });
}

constexpr int64_t kAhead = 8;  // rows whose memory is asked for before they move

// Prefetches a row's first cache lines.
template <class W>
LUTJAX_INLINE void ask_for(const W* row, int64_t bytes) {
  const char* from = reinterpret_cast<const char*>(row);
  for (int64_t at = 0; at < bytes; at += 64) prefetch(from + at);
}

// Addends for a table that is updated hit by hit.
struct TimesRate {
  using Sum = float;
  using Part = float;
  using Parts = Floats;
  float scale;

  Part addend(float x) const { return scale * x; }
  Parts addend(const Floats& x) const { return scale * x; }
};

// Row partitions per table: several if there are more threads than tables, and enough hits for all.
inline int64_t parts_of(const Call& call, int64_t n_tables, int64_t n_hits) {
  const int64_t wanted = (call.pool.n_threads + n_tables - 1) / most<int64_t>(n_tables, 1);
  return most<int64_t>(least(wanted, n_hits / 512), 1);
}

// The hits in partition `part` of `parts`, by table row.
template <class Row>
inline int64_t hits_of(int64_t t, int64_t n_hits, const Row& row, Hit* hits, int64_t n_rows = INT64_MAX, int64_t part = 0,
                       int64_t parts = 1) {
  const int64_t first = n_rows * part / parts, end = n_rows * (part + 1) / parts;
  int64_t n = 0;
  for (int64_t i = 0; i < n_hits; ++i) {
    const int64_t of = row(t, i);
    if (of >= first && of < end) hits[n++] = {static_cast<int32_t>(of), static_cast<int32_t>(i)};
  }
  return n;
}

template <class Row, class Sum>
bool add_to_rows(const Call& call, const Update& u, int64_t n_hits, const Row& row, const Sum& sum) {
  const int64_t n_rows = u.weights.shape[1], size = u.weights.shape[2], asked = least<int64_t>(size * 4, 1024);
  float* weights = data<float>(u.weights);
  const int64_t parts = parts_of(call, u.weights.shape[0], n_hits);
  return in_parallel_with(call, n_rows > 0 ? u.weights.shape[0] * parts : 0, n_hits * static_cast<int64_t>(sizeof(Hit)),
                          [&](int64_t task, char* scratch) {
                            const int64_t t = task / parts;
                            Hit* hits = reinterpret_cast<Hit*>(scratch);
                            const int64_t n = hits_of(t, n_hits, row, hits, n_rows, task % parts, parts);
                            float* table = weights + t * n_rows * size;
                            const TimesRate how{-*u.rate.row_factors(t, 0) * *u.factor.row_factors(t, 0)};
                            for (int64_t i = 0; i < n; ++i) {
                              if (i + kAhead < n) ask_for(table + hits[i + kAhead].row * size, asked);
                              sum(how, t, hits + i, int64_t{1}, table + hits[i].row * size);
                            }
                          });
}

template <class How, class W, class Row, class Sum>
bool move_rows_of(const Call& call, const Update& u, const How& how, int64_t n_hits, const Row& row, const Sum& sum) {
  const int64_t n_tables = u.weights.shape[0], n_rows = u.weights.shape[1], size = u.weights.shape[2];
  W* weights = data<W>(u.weights);
  const int64_t room = n_hits, bytes = bytes_to_sort(room), sums_at = (bytes + 63) / 64 * 64;
  const int64_t parts = parts_of(call, n_tables, n_hits);
  return in_parallel_with(call, n_rows > 0 ? n_tables * parts : 0, sums_at + size * 8 + 64, [&](int64_t task, char* scratch) {
    const int64_t t = task / parts;
    Hit* hits = reinterpret_cast<Hit*>(scratch);
    auto* sums = reinterpret_cast<typename How::Sum*>(scratch + sums_at);
    float* gradient = reinterpret_cast<float*>(sums + size);
    const int64_t n = hits_of(t, n_hits, row, hits, n_rows, task % parts, parts);
    hits = sorted(hits, n, room, n_rows);
    W* table = weights + t * n_rows * size;
    const int64_t asked = least<int64_t>(size * static_cast<int64_t>(sizeof(W)), 1024);
    int64_t ahead = 0;
    for (int64_t first = 0, last; first < n; first = last) {
      const int32_t of = hits[first].row;
      for (last = first + 1; last < n && hits[last].row == of;) ++last;
      for (ahead = most(ahead, last); ahead < least(n, last + kAhead); ++ahead)
        if (hits[ahead].row != hits[ahead - 1].row) {
          ask_for(table + hits[ahead].row * size, asked);
          u.ask_for_state(t * n_rows + hits[ahead].row, size);
        }
      for (int64_t o = 0; o < size; ++o) sums[o] = 0;
      sum(how, t, hits + first, last - first, sums);
      u.move(t, of, size, sums, gradient, table + of * size);
    }
  });
}

// Updates every hit row; see above. Returns a kernel result.
template <class Row, class Sum>
const char* move_rows(const Call& call, const Update& u, int64_t n_hits, const Row& row, const Sum& sum) {
  if (n_hits > INT32_MAX) return "more hits than fit int32";
  const bool adds = u.rule == Rule::sgd && u.weight_decay == 0 && u.rate.same_in_table() && u.factor.same_in_table();
  bool done;
  switch (u.weights.type) {
    case Type::float32:
      done = u.fixed ? move_rows_of<InIntegers, float>(call, u, {u.scale}, n_hits, row, sum)
             : adds  ? add_to_rows(call, u, n_hits, row, sum)
                     : move_rows_of<InFloats, float>(call, u, {}, n_hits, row, sum);
      break;
    case Type::bfloat16:
      done = u.fixed ? move_rows_of<InIntegers, bfloat16>(call, u, {u.scale}, n_hits, row, sum)
                     : move_rows_of<InFloats, bfloat16>(call, u, {}, n_hits, row, sum);
      break;
    default: return "weights must be float32 or bfloat16";
  }
  return done ? nullptr : "no memory for the hits of a table";
}

// Updates the rows addressed by detections [B, T]; `sum` as above.
template <class Sum>
const char* move_addressed_rows(const Call& call, const Update& u, const Array& index, const Sum& sum) {
  const int64_t n_samples = index.shape[0];
  const int32_t* by_table = ids_by_table(call, index, u.weights.shape[1]);
  if (by_table == nullptr) return "no memory for ids";
  return move_rows(call, u, n_samples, [=](int64_t t, int64_t b) -> int64_t { return by_table[t * n_samples + b]; }, sum);
}

}  // namespace
}  // namespace lutjax
#endif
