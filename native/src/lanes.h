// Numbers side by side, and rows of numbers made of them.
//
// Lanes are vectors of the compiler (GCC, Clang), as wide as the registers of the level: wider ones would live in memory. Where it has
// none there is one lane.
#pragma once

#include "vectors.h"

#ifdef LUTJAX_LEVEL
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // no lanes pass between object files
#endif
namespace lutjax {
namespace {

#if defined(__GNUC__)
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));  // sums of int32, which wrap
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

inline Floats same(float x) { return x - Floats{}; }
inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Floats load(const bfloat16* from) {
  Halves bits;
  std::memcpy(&bits, from, sizeof bits);
  const Words wide = __builtin_convertvector(bits, Words) << 16;
  Floats x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}
inline Words load(const int32_t* from) {
  Words x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline void store(const Floats& x, float* to) { std::memcpy(to, &x, sizeof x); }
inline void store(const Words& x, int32_t* to) { std::memcpy(to, &x, sizeof x); }
inline void store(const Floats& x, bfloat16* to) {  // as `store` of one number
  Words bits;
  std::memcpy(&bits, &x, sizeof bits);
  const Words odd = (bits >> 16) & 1, rounded = (bits + 0x7fff + odd) >> 16, of_nan = (bits >> 16) | 0x40;
  const Words chosen = x == x ? rounded : of_nan;
  const Halves halves = __builtin_convertvector(chosen, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

// The sum of all lanes, always in the same order: halves are added until one number is left.
template <class T, int64_t n, class V>
inline T total_of(const V& x) {
  if constexpr (n == 4) {
    return (x[0] + x[2]) + (x[1] + x[3]);
  } else {
    typedef T Half __attribute__((vector_size(2 * n)));
    Half half[2];
    std::memcpy(half, &x, sizeof half);
    return total_of<T, n / 2, Half>(half[0] + half[1]);
  }
}
inline float total(const Floats& x) { return total_of<float, kLanes>(x); }
inline uint32_t total(const Words& x) { return total_of<uint32_t, kLanes>(x); }
#else
constexpr int64_t kLanes = 1;
using Floats = float;
using Ints = int32_t;
using Words = uint32_t;

inline Floats same(float x) { return x; }
template <class W>
inline Floats load(const W* from) { return value(*from); }
inline Words load(const int32_t* from) { return static_cast<uint32_t>(*from); }
inline void store(Words x, int32_t* to) { *to = static_cast<int32_t>(x); }
inline float total(float x) { return x; }
inline uint32_t total(uint32_t x) { return x; }
#endif

// [n, m] numbers of 4 bytes, whose rows lie `stride` apart, as [m, n].
template <class T>
inline void transpose(const T* from, int64_t stride, int64_t n, int64_t m, T* to, int64_t to_stride) {
  int64_t i = 0;
#if defined(__GNUC__)
#if defined(__clang__)
#define LUTJAX_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LUTJAX_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ids{__VA_ARGS__})
#endif
  typedef T Four __attribute__((vector_size(16)));
  typedef int32_t Ids __attribute__((vector_size(16)));
  for (; i + 4 <= n; i += 4) {
    int64_t j = 0;
    for (; j + 4 <= m; j += 4) {
      Four row[4];
      for (int64_t k = 0; k < 4; ++k) std::memcpy(&row[k], from + (i + k) * stride + j, sizeof row[k]);
      const Four a = LUTJAX_SHUFFLE(row[0], row[1], 0, 4, 1, 5), b = LUTJAX_SHUFFLE(row[2], row[3], 0, 4, 1, 5);
      const Four c = LUTJAX_SHUFFLE(row[0], row[1], 2, 6, 3, 7), d = LUTJAX_SHUFFLE(row[2], row[3], 2, 6, 3, 7);
      row[0] = LUTJAX_SHUFFLE(a, b, 0, 1, 4, 5);
      row[1] = LUTJAX_SHUFFLE(a, b, 2, 3, 6, 7);
      row[2] = LUTJAX_SHUFFLE(c, d, 0, 1, 4, 5);
      row[3] = LUTJAX_SHUFFLE(c, d, 2, 3, 6, 7);
      for (int64_t k = 0; k < 4; ++k) std::memcpy(to + (j + k) * to_stride + i, &row[k], sizeof row[k]);
    }
    for (; j < m; ++j)
      for (int64_t k = 0; k < 4; ++k) to[j * to_stride + i + k] = from[(i + k) * stride + j];
  }
#undef LUTJAX_SHUFFLE
#endif
  for (; i < n; ++i)
    for (int64_t j = 0; j < m; ++j) to[j * to_stride + i] = from[i * stride + j];
}

// ------------------------------------------------------------------------------------- addends
// How sums are made, as `lutjax/_fixed_point.py` says: of floats, or of int32 addends trunc(v * scale). `Sum` is what a sum is kept as, `Part`
// what is added (unsigned, because sums that do not fit wrap), `Parts` lanes of it.
struct InFloats {
  using Sum = float;
  using Part = float;
  using Parts = Floats;
  Part addend(float x) const { return x; }
#if defined(__GNUC__)
  Parts addend(const Floats& x) const { return x; }
#endif
  static Parts none() { return same(0); }
};

struct InIntegers {
  using Sum = int32_t;
  using Part = uint32_t;
  using Parts = Words;
  float scale;

  Part addend(float x) const {
    constexpr float limit = 2147483520.0f;  // the largest float32 below 2^31: others saturate
    x *= scale;
    if (x != x) return 0;
    return static_cast<uint32_t>(static_cast<int32_t>(x > limit ? limit : x < -limit ? -limit : x));
  }
#if defined(__GNUC__)
  Parts addend(const Floats& v) const {
    const Floats limit = same(2147483520.0f);
    Floats x = v * scale;
    const Ints number = x == x;  // all bits, or none for NaN
    x = x > limit ? limit : x;
    x = x < -limit ? -limit : x;
    return (Words)(__builtin_convertvector((Floats)((Ints)x & number), Ints));
  }
  static Parts none() { return Words{}; }
#else
  static Parts none() { return 0; }
#endif
};

// sums[o] += addend(from(i)[o]) for i = 0..n-1 one after the other, o below size: `from(i)` is where row i lies. The sums of an output
// are made in registers.
template <class How, class From>
inline void add_rows(const How& how, int64_t n, const From& from, int64_t size, typename How::Sum* sums) {
  int64_t o = 0;
  for (; o + 4 * kLanes <= size; o += 4 * kLanes) {
    auto a = load(sums + o), b = load(sums + o + kLanes), c = load(sums + o + 2 * kLanes), d = load(sums + o + 3 * kLanes);
    for (int64_t i = 0; i < n; ++i) {
      const auto* row = from(i) + o;
      a += how.addend(load(row));
      b += how.addend(load(row + kLanes));
      c += how.addend(load(row + 2 * kLanes));
      d += how.addend(load(row + 3 * kLanes));
    }
    store(a, sums + o);
    store(b, sums + o + kLanes);
    store(c, sums + o + 2 * kLanes);
    store(d, sums + o + 3 * kLanes);
  }
  for (; o + 2 * kLanes <= size; o += 2 * kLanes) {
    auto a = load(sums + o), b = load(sums + o + kLanes);
    for (int64_t i = 0; i < n; ++i) {
      const auto* row = from(i) + o;
      a += how.addend(load(row));
      b += how.addend(load(row + kLanes));
    }
    store(a, sums + o);
    store(b, sums + o + kLanes);
  }
  for (; o + kLanes <= size; o += kLanes) {
    auto a = load(sums + o);
    for (int64_t i = 0; i < n; ++i) a += how.addend(load(from(i) + o));
    store(a, sums + o);
  }
  if (o < size)
    for (int64_t i = 0; i < n; ++i) {
      const auto* row = from(i);
      for (int64_t k = o; k < size; ++k)
        sums[k] = static_cast<typename How::Sum>(static_cast<typename How::Part>(sums[k]) + how.addend(value(row[k])));
    }
}

// sums[o] += addend(from[o]).
template <class How, class W>
inline void add_row(const How& how, const W* from, int64_t size, typename How::Sum* sums) {
  int64_t o = 0;
  for (; o + kLanes <= size; o += kLanes) store(load(sums + o) + how.addend(load(from + o)), sums + o);
  for (; o < size; ++o)
    sums[o] = static_cast<typename How::Sum>(static_cast<typename How::Part>(sums[o]) + how.addend(value(from[o])));
}

// A sum as it leaves a kernel: rounded once, or the integers.
template <class T>
inline void store_sum(float sum, T* to) { store(sum, to); }
inline void store_sum(int32_t sum, int32_t* to) { *to = sum; }

}  // namespace
}  // namespace lutjax
#endif
