// Gates with wires: how their rows are divided into tasks, and which wires read an input.
//
// Arrays are features first: a wire reads a row of x, [I, B], whose samples are contiguous.
#pragma once

#include "lanes.h"

#ifdef LUTJAX_LEVEL
namespace lutjax {
namespace {

// Samples whose sums over readers are kept in the nearest cache.
constexpr int64_t kColumns = 1024;

// Rows that make one task: what they cost together is worth another thread.
inline int64_t rows_of_task(int64_t batch, int64_t cost) { return most<int64_t>(1, 32768 / most<int64_t>(1, batch * cost)); }

// A sum over lanes of any number, in a fixed order.
struct Sum {
  Lanes<float, kLanes> of_most{};
  Lanes<float, 4> of_four{};
  Lanes<float, 1> of_one{};

  template <class V>
  void add(const V& a) {
    if constexpr (sizeof(V) == sizeof of_most) of_most += a;
    else if constexpr (sizeof(V) == sizeof of_four) of_four += a;
    else of_one += a;
  }
  float total() const { return sum_of(of_most) + (sum_of(of_four) + sum_of(of_one)); }
};

// Calls body(row) for each row, several in a task.
template <class Body>
void in_tasks(const Call& call, int64_t n_rows, int64_t each, const Body& body) {
  in_parallel(call, (n_rows + each - 1) / each, [&](int64_t task) {
    for (int64_t row = task * each; row < least(task * each + each, n_rows); ++row) body(row);
  });
}

// For each input the wires that read it, in their order: of[first[i]] to of[first[i + 1] - 1], numbers in the flat list of wires.
//
// A list that the caller has is not read: making this one takes less time than skipping its gaps.
struct Readers {
  int32_t *first, *of;

  // Returns false where no memory is left.
  bool make(const Call& call, const int32_t* wires, int64_t n_wires, int64_t n_inputs) {
    first = allocated<int32_t>(call, n_inputs + 2);
    of = allocated<int32_t>(call, n_wires);
    if (first == nullptr || of == nullptr) return false;
    std::memset(first, 0, static_cast<size_t>(n_inputs + 2) * sizeof(int32_t));
    if (n_inputs == 0) return true;
    for (int64_t w = 0; w < n_wires; ++w) ++first[clamped<int64_t>(wires[w], n_inputs) + 2];
    for (int64_t i = 0; i < n_inputs; ++i) first[i + 2] += first[i + 1];
    // first[i + 1] is now where those of i start, and moves to where they end.
    for (int64_t w = 0; w < n_wires; ++w) of[first[clamped<int64_t>(wires[w], n_inputs) + 1]++] = static_cast<int32_t>(w);
    return true;
  }
};

// dx[i] = sum over the wires w that read i of addend(w)(lanes, j), for the samples j from `first` to `last`: rows of [I, B].
template <class Addend>
void sum_over_readers(const Readers& readers, int64_t i, int64_t first, int64_t last, float* to, const Addend& addend) {
  const int64_t begin = readers.first[i], end = readers.first[i + 1];
  if (begin == end) std::memset(to + first, 0, static_cast<size_t>(last - first) * sizeof(float));
  for (int64_t r = begin; r < end; ++r) {
    const auto values = addend(readers.of[r]);
    if (r == begin)
      in_lanes(first, last, [&](auto lanes, int64_t j) { store(values(lanes, j), to + j); });
    else
      in_lanes(first, last, [&](auto lanes, int64_t j) { store(read<decltype(lanes)>(to + j) + values(lanes, j), to + j); });
  }
}

// The cotangents of inputs and of parameters of gates, of those that are wanted (not null): threads share both.
//
// addend: see `sum_over_readers`. of_gate(g) makes the sums over samples of a gate. cost: of one sample of a wire.
template <class Addend, class OfGate>
const char* cotangents(const Call& call, const int32_t* wires, int64_t n_wires, float* dx, int64_t n_inputs, int64_t batch,
                       int64_t n_gates, int64_t cost, const Addend& addend, const OfGate& of_gate) {
  Readers readers{};
  if (dx != nullptr && !readers.make(call, wires, n_wires, n_inputs)) return "no memory is left";
  const int64_t columns = least(batch, kColumns), n_parts = columns > 0 ? (batch + columns - 1) / columns : 0;
  const int64_t inputs = rows_of_task(columns, cost), gates = rows_of_task(batch, cost);
  const int64_t input_tasks = dx != nullptr ? (n_inputs + inputs - 1) / inputs * n_parts : 0;
  // An input may have many readers: its tasks come first, so that none is the last to end.
  in_parallel(call, input_tasks + (n_gates + gates - 1) / gates, [&](int64_t task) {
    if (task < input_tasks) {
      const int64_t row = task / n_parts * inputs, first = task % n_parts * columns;
      for (int64_t i = row; i < least(row + inputs, n_inputs); ++i)
        sum_over_readers(readers, i, first, least(first + columns, batch), dx + i * batch, addend);
    } else {
      const int64_t row = (task - input_tasks) * gates;
      for (int64_t g = row; g < least(row + gates, n_gates); ++g) of_gate(g);
    }
  });
  return nullptr;
}

}  // namespace
}  // namespace lutjax
#endif
