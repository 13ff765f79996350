// Weighted sums of rows with given ids and coefficients; G groups of consecutive tables have separate outputs:
//
//   y[b, g] = sum over tables t of g and ways k of c[b, t, k] w[t, i[b, t, k]];   dc[b, t, k] = <dy[b, g], w[t, i]>
//   dw[t, i[b, t, k]] += c[b, t, k] dy[b, g]
//
// The first `valued` ways have values; other ways have only dc. Forward, and for dc, a task owns some samples in one group; for dw a table.
#include "rules.h"
#include "weighted_rows.h"

namespace lutjax {
namespace {

constexpr int kBlock = 64;           // samples
constexpr int64_t kTasks = 8;        // as many at least, if there are samples for them
constexpr int64_t kMostBlocks = 16;  // of a task

struct Reads {
  int64_t n, n_tables, n_rows, n_outputs, groups, each, ways, valued, blocks;
  const int32_t* index;
  const float* coefficient;

  // integers: groups, valued.
  Reads(const Array& weights, const Array* inputs, const int64_t* integers)
      : n(inputs[0].shape[0]),
        n_tables(weights.shape[0]),
        n_rows(weights.shape[1]),
        n_outputs(weights.shape[2]),
        groups(integers[0]),
        each(n_tables / most<int64_t>(groups, 1)),
        ways(inputs[0].shape[2]),
        valued(integers[1]),
        blocks((n + kBlock - 1) / kBlock),
        index(data<const int32_t>(inputs[0])),
        coefficient(data<const float>(inputs[1])) {}

  int samples(int64_t block) const { return static_cast<int>(least<int64_t>(n - block * kBlock, kBlock)); }
  int64_t offset(int64_t block, int64_t t, int64_t way) const { return (block * kBlock * n_tables + t) * ways + way; }
  int64_t stride() const { return n_tables * ways; }

  // One way of a table, sample after sample.
  void take(int64_t block, int64_t t, int64_t way, int32_t* ids, float* c) const {
    const int64_t from = offset(block, t, way);
    for (int b = 0; b < samples(block); ++b) {
      ids[b] = static_cast<int32_t>(clamped<int64_t>(index[from + b * stride()], n_rows));
      c[b] = way < valued ? coefficient[from + b * stride()] : 0;
    }
  }
};

template <class W, class Sums>
void forward(const Call& call, const Reads& a, const Sums& sums) {
  const W* weights = data<const W>(call.inputs[0]);
  auto* y = data<typename Sums::T>(call.outputs[0]);
  const int64_t of_group = a.each * a.valued, size = a.n_rows * a.n_outputs, stride = a.groups * a.n_outputs;
  // Some blocks read some tables before moving on: rows and sums stay in the cache.
  const int64_t wanted = most<int64_t>(kTasks / most<int64_t>(a.groups, 1), 1);
  const int64_t blocks = least<int64_t>(most<int64_t>((a.blocks + wanted - 1) / wanted, 1), kMostBlocks);
  in_parallel(call, (a.blocks + blocks - 1) / blocks * a.groups, [&](int64_t i) {
    const int64_t group = i % a.groups, first_block = i / a.groups * blocks, last_block = least(first_block + blocks, a.blocks);
    int32_t ids[kMostWays][kBlock];
    float c[kMostWays][kBlock];
    for (int64_t first = 0; first < most<int64_t>(of_group, 1); first += kMostWays)
      for (int64_t block = first_block; block < last_block; ++block) {
        Ways<W> ways;
        for (int64_t r = first; r < least<int64_t>(first + kMostWays, of_group); ++r) {
          const int64_t t = group * a.each + r / a.valued;
          a.take(block, t, r % a.valued, ids[r - first], c[r - first]);
          ways.add(weights + t * size, ids[r - first], c[r - first]);
        }
        sum_weighted_rows(sums, ways, a.n_outputs, a.samples(block), first == 0,
                          y + (block * kBlock * a.groups + group) * a.n_outputs, stride);
      }
  });
}

// Inputs: weights, index, coefficients, dy. Outputs: for weights, for coefficients; unrequested outputs are empty.
template <class W, class Sums>
void backward(const Call& call, const Reads& a, const Sums& sums, bool of_rows, bool of_read) {
  using T = typename Sums::T;
  const W* weights = data<const W>(call.inputs[0]);
  const float* dy = data<const float>(call.inputs[3]);
  T* total = of_rows ? data<T>(call.outputs[0]) : nullptr;
  float* d_coefficient = of_read ? data<float>(call.outputs[1]) : nullptr;
  const int64_t size = a.n_rows * a.n_outputs, stride = a.groups * a.n_outputs;
  in_parallel(call, a.n_tables, [&](int64_t t) {
    if (of_rows) std::memset(total + t * size, 0, static_cast<size_t>(size) * sizeof(T));
    int32_t ids[kBlock];
    float c[kBlock], products[kBlock];
    const int32_t* index[] = {ids};
    const float* coefficient[] = {c};
    float* product[] = {products};
    for (int64_t block = 0; block < a.blocks; ++block) {
      const float* of_block = dy + (block * kBlock * a.groups + t / a.each) * a.n_outputs;
      const Cotangents cotangents{of_block, of_block, stride};
      const int n = a.samples(block);
      for (int64_t way = 0; way < a.ways; ++way) {
        const bool rows = of_rows && way < a.valued;
        if (!rows && !of_read) continue;
        a.take(block, t, way, ids, c);
        const W* table = weights + t * size;
        T* to = rows ? total + t * size : nullptr;
        if (rows && of_read)
          add_weighted_rows<1, true, true>(sums, table, index, coefficient, cotangents, a.n_outputs, n, to, product);
        else if (rows)
          add_weighted_rows<1, true, false>(sums, table, index, coefficient, cotangents, a.n_outputs, n, to, product);
        else
          add_weighted_rows<1, false, true>(sums, table, index, coefficient, cotangents, a.n_outputs, n, to, product);
        if (of_read)
          for (int b = 0; b < n; ++b) d_coefficient[a.offset(block, t, way) + b * a.stride()] = products[b];
      }
    }
  });
}

}  // namespace
}  // namespace lutjax

// Integers: groups, valued, fixed point. Numbers: its scale. Output: sums.
LUTJAX_KERNEL(weighted_lookup_forward) {
  using namespace lutjax;
  const Reads a(call.inputs[0], call.inputs + 1, call.integers);
  const SumsOfFixed fixed{static_cast<float>(call.numbers[0])};
  const bool is_fixed = call.integers[2] != 0;
  return for_type(call.inputs[0], [&](auto weight) {
    using W = decltype(weight);
    is_fixed ? forward<W>(call, a, fixed) : forward<W>(call, a, SumsOfFloats{});
    return kDone;
  });
}

// Integers from 3: whether to compute the weight and coefficient cotangents.
LUTJAX_KERNEL(weighted_lookup_backward) {
  using namespace lutjax;
  const Reads a(call.inputs[0], call.inputs + 1, call.integers);
  const SumsOfFixed fixed{static_cast<float>(call.numbers[0])};
  const bool is_fixed = call.integers[2] != 0, of_rows = call.integers[3] != 0, of_read = call.integers[4] != 0;
  return for_type(call.inputs[0], [&](auto weight) {
    using W = decltype(weight);
    is_fixed ? backward<W>(call, a, fixed, of_rows, of_read) : backward<W>(call, a, SumsOfFloats{}, of_rows, of_read);
    return kDone;
  });
}

// The inputs for `rules.h`, then index, coefficients and dy.
LUTJAX_KERNEL(weighted_lookup_update) {
  using namespace lutjax;
  const Update update(call);
  const Reads a(update.weights, update.inputs, update.integers);
  const float* dy = data<const float>(update.inputs[2]);
  const int64_t size = a.n_outputs;
  // Hits way after way, as plain JAX visits them.
  const auto place = [=](int64_t t, int64_t i) { return (i % a.n * a.n_tables + t) * a.ways + i / a.n; };
  return move_rows(
      call, update, a.valued * a.n,
      [=](int64_t t, int64_t i) -> int64_t {
        const int64_t at = place(t, i);
        return a.coefficient[at] == 0 ? -1 : clamped<int64_t>(a.index[at], a.n_rows);
      },
      [=](const auto& how, int64_t t, const Hit* hits, int64_t n, auto* sums) {
        for (int64_t i = 0; i < n; ++i)
          add_weighted(how, a.coefficient[place(t, hits[i].number)], dy + (hits[i].number % a.n * a.groups + t / a.each) * size, size,
                       sums);
      });
}
