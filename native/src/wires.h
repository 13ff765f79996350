// Gates with wires: division of rows into tasks, and the readers of each input.
//
// Arrays are features first: a wire reads a row of x, [I, B], with contiguous samples. If x is larger than the caches, gates and
// inputs are visited along the wires: each next gate shares an input with the last one, so a row comes from memory about once, not
// once for every wire. Results do not depend on this order, also when written past the caches.
#pragma once

#include "lanes.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#ifdef LUTJAX_LEVEL
namespace lutjax {
namespace {

// Samples per chunk: their sums over readers stay in the nearest cache.
constexpr int64_t kColumns = 1024;

// Readers of an input whose tasks are not divided.
constexpr int64_t kMostTogether = 64;

// Rows per task: enough work to justify another thread.
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

// Writes lanes past the caches if `to` is aligned: memory that is overwritten completely need not be read first.
template <bool past, class V, class T>
void put(const V& a, T* to) {
#if defined(__SSE2__)
  if constexpr (past && sizeof(V) == 4 * kLanes && sizeof(T) == 4) {
#if LUTJAX_LANES == 16
    _mm512_stream_ps(reinterpret_cast<float*>(to), from_memory<__m512>(&a));
#elif LUTJAX_LANES == 8
    _mm256_stream_ps(reinterpret_cast<float*>(to), from_memory<__m256>(&a));
#else
    _mm_stream_ps(reinterpret_cast<float*>(to), from_memory<__m128>(&a));
#endif
    return;
  }
#endif
  store(a, to);
}

// Publishes writes past the caches to other threads.
inline void finish_writes() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <bool b>
struct Choice {
  static constexpr bool value = b;
};

// Wires for gates with equal numbers of inputs.
struct Wires {
  const int32_t* ids;
  int64_t n_gates, per_gate, n_inputs;

  int64_t n() const { return n_gates * per_gate; }
  int64_t input(int64_t wire) const { return clamped<int64_t>(ids[wire], n_inputs); }
};

constexpr int64_t kCached = int64_t{16} << 20;  // bytes of x that a cache may keep

template <class X>
bool in_memory(int64_t n_inputs, int64_t batch) {
  return n_inputs * batch * static_cast<int64_t>(sizeof(X)) > kCached;
}

// Returns true if rows with this many elements may be written past the caches: they consist of whole lanes.
template <class T>
bool aligned(const T* to, int64_t batch) { return sizeof(T) == 4 && reinterpret_cast<uintptr_t>(to) % 64 == 0 && batch % 16 == 0; }

// For each input the wires that read it, in their order: of[first[i]] to of[first[i + 1] - 1], numbers in the flat list of wires.
//
// A list passed by the caller is ignored: building this one takes less time than skipping the gaps.
struct Readers {
  int32_t *first, *of;

  // Returns false if no memory is left.
  bool make(const Call& call, const Wires& wires) {
    const int64_t n_inputs = wires.n_inputs, n_wires = wires.n();
    first = allocated<int32_t>(call, n_inputs + 2);
    of = allocated<int32_t>(call, n_wires);
    if (first == nullptr || of == nullptr) return false;
    std::memset(first, 0, static_cast<size_t>(n_inputs + 2) * sizeof(int32_t));
    if (n_inputs == 0) return true;
    for (int64_t w = 0; w < n_wires; ++w) ++first[wires.input(w) + 2];
    for (int64_t i = 0; i < n_inputs; ++i) first[i + 2] += first[i + 1];
    // first[i + 1] is now where those of i start, and moves to where they end.
    for (int64_t w = 0; w < n_wires; ++w) of[first[wires.input(w) + 1]++] = static_cast<int32_t>(w);
    return true;
  }

  // Maximum wires per input.
  int64_t most(int64_t n_inputs) const {
    int64_t found = 0;
    for (int64_t i = 0; i < n_inputs; ++i) found = lutjax::most<int64_t>(found, first[i + 1] - first[i]);
    return found;
  }
};

// An order of the numbers below n with neighbors close together; null if no memory is left. near(i, unseen) returns a number
// with unseen(number), or -1, and each call continues after the last result for i.
template <class Near>
const int32_t* walk(const Call& call, int64_t n, const Near& near) {
  int32_t* order = allocated<int32_t>(call, n);
  uint8_t* seen = allocated<uint8_t>(call, n);
  if (order == nullptr || seen == nullptr) return nullptr;
  std::memset(seen, 0, static_cast<size_t>(n));
  const auto unseen = [&](int64_t i) { return seen[i] == 0; };
  int64_t found = 0;
  for (int64_t start = 0; start < n; ++start)
    for (int64_t i = start; i >= 0 && unseen(i); i = near(i, unseen)) {
      seen[i] = 1;
      order[found++] = static_cast<int32_t>(i);
    }
  return order;
}

// Start of each input's remaining readers.
inline int32_t* cursors(const Call& call, const Readers& readers, int64_t n_inputs) {
  int32_t* next = allocated<int32_t>(call, n_inputs);
  if (next != nullptr) std::memcpy(next, readers.first, static_cast<size_t>(n_inputs) * sizeof(int32_t));
  return next;
}

inline const int32_t* walk_over_gates(const Call& call, const Wires& wires, const Readers& readers) {
  int32_t* next = cursors(call, readers, wires.n_inputs);
  if (next == nullptr) return nullptr;
  return walk(call, wires.n_gates, [&](int64_t g, const auto& unseen) {
    for (int64_t place = wires.per_gate - 1; place >= 0; --place) {
      const int64_t i = wires.input(g * wires.per_gate + place);
      for (; next[i] < readers.first[i + 1]; ++next[i])
        if (const int64_t other = readers.of[next[i]] / wires.per_gate; unseen(other)) return other;
    }
    return int64_t{-1};
  });
}

inline const int32_t* walk_over_inputs(const Call& call, const Wires& wires, const Readers& readers) {
  int32_t* next = cursors(call, readers, wires.n_inputs);
  if (next == nullptr) return nullptr;
  return walk(call, wires.n_inputs, [&](int64_t i, const auto& unseen) {
    for (; next[i] < readers.first[i + 1]; ++next[i]) {
      const int64_t g = readers.of[next[i]] / wires.per_gate;
      for (int64_t place = 0; place < wires.per_gate; ++place)
        if (const int64_t other = wires.input(g * wires.per_gate + place); unseen(other)) return other;
    }
    return int64_t{-1};
  });
}

// Calls body(past, g) for each gate: `past` allows writing y past the caches. cost: per sample.
template <class X, class Body>
void for_gates(const Call& call, const Wires& wires, int64_t batch, int64_t cost, const X* y, const Body& body) {
  const int64_t n = wires.n_gates;
  const bool far = in_memory<X>(wires.n_inputs, batch), past = aligned(y, batch) && in_memory<X>(n, batch);
  const int32_t* order = nullptr;
  Readers readers{};
  if (far && readers.make(call, wires)) order = walk_over_gates(call, wires, readers);
  // Consecutive tasks share a row.
  const int64_t each = order == nullptr ? rows_of_task(batch, cost) : 16;
  in_parallel(call, (n + each - 1) / each, [&](int64_t task) {
    for (int64_t k = task * each; k < least(task * each + each, n); ++k) {
      const int64_t g = order == nullptr ? k : order[k];
      if (past)
        body(Choice<true>{}, g);
      else
        body(Choice<false>{}, g);
    }
    if (past) finish_writes();
  });
}

// dx[i] = sum over the wires w that read i of addend(w)(lanes, j), for the samples j from `first` to `last`, at most kColumns: rows of [I, B].
template <bool past, class Addend>
void sum_over_readers(const Readers& readers, int64_t i, int64_t first, int64_t last, float* to, const Addend& addend) {
  const int64_t begin = readers.first[i], end = readers.first[i + 1];
  if (begin == end) std::memset(to + first, 0, static_cast<size_t>(last - first) * sizeof(float));
  alignas(64) float sums[kColumns];
  for (int64_t r = begin; r < end; ++r) {
    const auto values = addend(readers.of[r]);
    const bool starts = r == begin, ends = r + 1 == end;
    // One loop for all addends: a loop for each case would compile `values`, which may be long, four times.
    in_lanes<float, past>(first, last, [&](auto lanes, int64_t j) {
      auto sum = values(lanes, j);
      if (!starts) sum = read<decltype(lanes)>(sums + (j - first)) + sum;
      if (ends)
        put<past>(sum, to + j);
      else
        store(sum, sums + (j - first));
    });
  }
}

// Calls f(i); f is compiled once for all callers.
template <class F>
LUTJAX_NOINLINE void call_apart(const F& f, int64_t i) {
  f(i);
}

// Input and parameter cotangents for gates; null pointers are skipped. Threads share both.
//
// addend: see `sum_over_readers`. of_gate(g) computes a gate's sums over samples. cost: per sample and wire.
template <class X, class Addend, class OfGate>
const char* cotangents(const Call& call, const Wires& wires, float* dx, int64_t batch, bool of_gates, int64_t cost, const Addend& addend,
                       const OfGate& of_gate) {
  const int64_t n_inputs = wires.n_inputs, n_gates = of_gates ? wires.n_gates : 0;
  Readers readers{};
  if (dx != nullptr && !readers.make(call, wires)) return "no memory is left";
  const bool past = dx != nullptr && aligned(dx, batch) && in_memory<float>(n_inputs, batch);
  const auto sum_inputs = [&](int64_t i, int64_t first, int64_t last) {
    if (past)
      sum_over_readers<true>(readers, i, first, last, dx + i * batch, addend);
    else
      sum_over_readers<false>(readers, i, first, last, dx + i * batch, addend);
  };
  if (dx != nullptr && in_memory<X>(n_inputs, batch) && readers.most(n_inputs) <= kMostTogether) {
    // A gate's sums are computed with its first input, while its rows are cached.
    const int32_t* order = walk_over_inputs(call, wires, readers);
    if (order == nullptr) return "no memory is left";
    constexpr int64_t each = 16;
    in_parallel(call, (n_inputs + each - 1) / each, [&](int64_t task) {
      for (int64_t k = task * each; k < least(task * each + each, n_inputs); ++k) {
        const int64_t i = order[k];
        for (int64_t first = 0; first < batch; first += kColumns) sum_inputs(i, first, least(first + kColumns, batch));
        for (int64_t r = readers.first[i]; of_gates && r < readers.first[i + 1]; ++r)
          if (readers.of[r] % wires.per_gate == 0) call_apart(of_gate, readers.of[r] / wires.per_gate);
      }
      if (past) finish_writes();
    });
    return nullptr;
  }
  const int64_t columns = least(batch, kColumns), n_parts = columns > 0 ? (batch + columns - 1) / columns : 0;
  const int64_t inputs = rows_of_task(columns, cost), gates = rows_of_task(batch, cost);
  const int64_t input_tasks = dx != nullptr ? (n_inputs + inputs - 1) / inputs * n_parts : 0;
  // An input may have many readers: its tasks start first, so that none finishes last.
  in_parallel(call, input_tasks + (n_gates + gates - 1) / gates, [&](int64_t task) {
    if (task < input_tasks) {
      const int64_t row = task / n_parts * inputs, first = task % n_parts * columns;
      for (int64_t i = row; i < least(row + inputs, n_inputs); ++i) sum_inputs(i, first, least(first + columns, batch));
      if (past) finish_writes();
    } else {
      const int64_t row = (task - input_tasks) * gates;
      for (int64_t g = row; g < least(row + gates, n_gates); ++g) call_apart(of_gate, g);
    }
  });
  return nullptr;
}

}  // namespace
}  // namespace lutjax
#endif
