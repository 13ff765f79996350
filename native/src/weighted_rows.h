// Weighted row sums, and the cotangents of rows and coefficients, for a sample block.
//
//   y[b] += sum_k c_k[b] W_k[i_k[b]];   dc_k[b] = <dy[b], W_k[i_k[b]]>;   dW_k[i_k[b]] += c_k[b] dy[b]
//
// A coefficient of exactly 0 reads and adds nothing. Sums are floats, fixed-point integers, or whole numbers.
#pragma once

#include "lanes.h"

#ifdef LUTJAX_LEVEL
namespace lutjax {
namespace {

// Product accumulation.
struct SumsOfFloats {
  using T = float;
  using V = Floats;
  template <class W>
  V plus(V total, float c, const W* row) const { return total + c * load(row); }
  template <class W>
  V plus_first(V total, float c, const W* row, int n) const { return total + c * load_first(row, n); }
  V plus(V total, Floats a) const { return total + a; }
  V plus_product(V total, Floats a, Floats b) const { return total + a * b; }
  Floats result(V total) const { return total; }
};

// lutjax.FixedPoint: int32 sums of trunc(value * scale).
struct SumsOfFixed {
  using T = int32_t;
  using V = Ints;
  float scale;
  Ints quantized(Floats a) const { return fixed(a * scale); }
  template <class W>
  V plus(V total, float c, const W* row) const { return total + quantized(c * load(row)); }
  template <class W>
  V plus_first(V total, float c, const W* row, int n) const { return total + quantized(c * load_first(row, n)); }
  V plus(V total, Floats a) const { return total + quantized(a); }
  V plus_product(V total, Floats a, Floats b) const { return total + quantized(a * b); }
  Floats result(V total) const { return floats(total) / scale; }
};

// Whole numbers, with integer coefficients.
struct SumsOfIntegers {
  using T = int32_t;
  using V = Ints;
  V plus(V total, float c, const int8_t* row) const { return total + static_cast<int32_t>(c) * load_integers(row); }
  V plus_first(V total, float c, const int8_t* row, int n) const {
    return total + static_cast<int32_t>(c) * load_first_integers(row, n);
  }
};

template <int k>
struct Number {
  static constexpr int n = k;
};

// Calls f(number of vectors, their first output) for parts of the outputs, the number as a constant, then f of the rest: 0. Where
// there are 32 registers a part has eight vectors: every part visits all rows again.
template <class Body>
void for_parts(int64_t n_outputs, const Body& f) {
  int64_t o = 0, vectors = n_outputs / kLanes;
  const auto step = [&](auto n) {
    f(n, o);
    o += n.n * kLanes;
    vectors -= n.n;
  };
  if constexpr (kLanes == 16)
    while (vectors >= 8) step(Number<8>{});
  while (vectors > 4) step(Number<4>{});
  if (vectors == 4) step(Number<4>{});
  if (vectors == 3) step(Number<3>{});
  if (vectors == 2) step(Number<2>{});
  if (vectors == 1) step(Number<1>{});
  if (o < n_outputs) step(Number<0>{});
}

constexpr int kMostWays = 8;

// Ways to read tables, for a block's samples.
template <class W>
struct Ways {
  int n = 0;
  const W* table[kMostWays];
  const int32_t* index[kMostWays];
  const float* coefficient[kMostWays];
  void add(const W* of, const int32_t* i, const float* c) {
    table[n] = of;
    index[n] = i;
    coefficient[n++] = c;
  }
};

// Sums for n samples, at y + b * stride; `first`: they start at 0.
template <class W, class Sums>
void sum_weighted_rows(const Sums& sums, const Ways<W>& ways, int64_t n_outputs, int n, bool first, typename Sums::T* y, int64_t stride) {
  using V = typename Sums::V;
  for_parts(n_outputs, [&](auto size, int64_t o) {
    constexpr int N = decltype(size)::n;
    const int rest = static_cast<int>(n_outputs - o);
    for (int b = 0; b < n; ++b) {
      typename Sums::T* to = y + b * stride + o;
      if constexpr (N == 0) {
        V total = first ? V{} : load_first(to, rest);
        for (int k = 0; k < ways.n; ++k) {
          const float c = ways.coefficient[k][b];
          if (c != 0) total = sums.plus_first(total, c, ways.table[k] + ways.index[k][b] * n_outputs + o, rest);
        }
        store_first(total, to, rest);
      } else {
        V total[N];
        for (int v = 0; v < N; ++v) total[v] = first ? V{} : load(to + v * kLanes);
        for (int k = 0; k < ways.n; ++k) {
          const float c = ways.coefficient[k][b];
          if (c == 0) continue;
          const W* row = ways.table[k] + ways.index[k][b] * n_outputs + o;
          for (int v = 0; v < N; ++v) total[v] = sums.plus(total[v], c, row + v * kLanes);
        }
        for (int v = 0; v < N; ++v) store(total[v], to + v * kLanes);
      }
    }
  });
}

// Output cotangents for rows, and for coefficients (in units of the rows).
struct Cotangents {
  const float* of_rows;
  const float* of_read;
  int64_t stride;
};

// What one table receives in `ways` ways. `total`: of rows; product[k]: of coefficients, 0 for samples beyond n up to whole vectors.
template <int ways, bool of_rows, bool of_read, class W, class Sums>
void add_weighted_rows(const Sums& sums, const W* table, const int32_t* const* index, const float* const* coefficient, const Cotangents& dy,
              int64_t n_outputs, int n, typename Sums::T* total, float* const* product) {
  using V = typename Sums::V;
  using T = typename Sums::T;
  // Products of each sample, whose lanes are added when all outputs are.
  alignas(64) T parts[of_read ? ways : 1][of_read ? 64 : 1][kLanes];
  const int whole_n = (n + kLanes - 1) / kLanes * kLanes;
  if constexpr (of_read)
    for (int k = 0; k < ways; ++k)
      for (int b = n_outputs > 0 ? n : 0; b < whole_n; ++b) store(V{}, parts[k][b]);
  for_parts(n_outputs, [&](auto size, int64_t o) {
    constexpr int N = decltype(size)::n, M = N == 0 ? 1 : N;
    const int rest = static_cast<int>(n_outputs - o);
    const auto part = [&](const auto* p) {
      if constexpr (N == 0)
        return load_first(p, rest);
      else
        return load(p);
    };
    for (int b = 0; b < n; ++b) {
      Floats d[M];
      for (int v = 0; v < M; ++v) d[v] = part(dy.of_rows + b * dy.stride + o + v * kLanes);
      if constexpr (of_read) {
        Floats e[M];
        for (int v = 0; v < M; ++v)
          e[v] = dy.of_read == dy.of_rows ? d[v] : part(dy.of_read + b * dy.stride + o + v * kLanes);
        for (int k = 0; k < ways; ++k) {
          const W* row = table + index[k][b] * n_outputs + o;
          V sum = o == 0 ? V{} : load(parts[k][b]);
          for (int v = 0; v < M; ++v) sum = sums.plus_product(sum, part(row + v * kLanes), e[v]);
          store(sum, parts[k][b]);
        }
      }
      if constexpr (of_rows) {
        for (int k = 0; k < ways; ++k) {
          const float c = coefficient[k][b];
          if (c == 0) continue;
          T* to = total + index[k][b] * n_outputs + o;
          if constexpr (N == 0) {
            store_first(sums.plus(load_first(to, rest), c * d[0]), to, rest);
          } else {
            for (int v = 0; v < M; ++v) store(sums.plus(load(to + v * kLanes), c * d[v]), to + v * kLanes);
          }
        }
      }
    }
  });
  if constexpr (of_read)
    for (int k = 0; k < ways; ++k)
      for (int b = 0; b < whole_n; b += kLanes) store(sums.result(sums_of(parts[k][b])), product[k] + b);
}

// sums[o] += addend(c * from[o])
template <class How>
void add_weighted(const How& how, float c, const float* from, int64_t size, typename How::Sum* sums) {
  int64_t o = 0;
  for (; o + kLanes <= size; o += kLanes) store(read<typename How::Parts>(sums + o) + how.addend(c * load(from + o)), sums + o);
  for (; o < size; ++o)
    sums[o] = static_cast<typename How::Sum>(static_cast<typename How::Part>(sums[o]) + how.addend(c * from[o]));
}

}  // namespace
}  // namespace lutjax
#endif
