// Sixteen numbers side by side, and rows of numbers made of them.
//
// Where the compiler has vectors of its own (GCC, Clang) lanes are one: they stay in registers, of whatever width the level has. Elsewhere
// they are an array and plain loops.
#pragma once

#include "vectors.h"

#ifdef LUTJAX_LEVEL
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // no lanes pass between object files
#endif
namespace lutjax {
namespace {

constexpr int64_t kLanes = 16;

#if defined(__GNUC__)
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));  // sums of int32, which wrap
typedef uint16_t Halves __attribute__((vector_size(32)));

inline Floats same(float x) { return Floats{} + x; }
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
inline float lane(const Floats& x, int64_t i) { return x[i]; }
inline uint32_t lane(const Words& x, int64_t i) { return x[i]; }
#else
template <class T>
struct Lanes {
  T of[kLanes];
};
using Floats = Lanes<float>;
using Words = Lanes<uint32_t>;

#define LUTJAX_LANES(op)                                                \
  template <class T>                                                    \
  inline Lanes<T> operator op(Lanes<T> a, const Lanes<T>& b) {          \
    for (int64_t i = 0; i < kLanes; ++i) a.of[i] = a.of[i] op b.of[i];  \
    return a;                                                           \
  }                                                                     \
  template <class T>                                                    \
  inline Lanes<T>& operator op##=(Lanes<T>& a, const Lanes<T>& b) {     \
    for (int64_t i = 0; i < kLanes; ++i) a.of[i] = a.of[i] op b.of[i];  \
    return a;                                                           \
  }
LUTJAX_LANES(+)
LUTJAX_LANES(-)
LUTJAX_LANES(*)
#undef LUTJAX_LANES

inline Floats same(float x) {
  Floats y;
  for (float& of : y.of) of = x;
  return y;
}
template <class W>
inline Floats load(const W* from) {
  Floats x;
  for (int64_t i = 0; i < kLanes; ++i) x.of[i] = value(from[i]);
  return x;
}
inline Words load(const int32_t* from) {
  Words x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline void store(const Floats& x, float* to) { std::memcpy(to, &x, sizeof x); }
inline void store(const Words& x, int32_t* to) { std::memcpy(to, &x, sizeof x); }
inline float lane(const Floats& x, int64_t i) { return x.of[i]; }
inline uint32_t lane(const Words& x, int64_t i) { return x.of[i]; }
#endif

inline void store(const Floats& x, bfloat16* to) {
  for (int64_t i = 0; i < kLanes; ++i) store(lane(x, i), to + i);
}

// The sum of all lanes, always in the same order.
template <class V>
inline auto total(const V& x) {
  auto a = lane(x, 0), b = lane(x, 1), c = lane(x, 2), d = lane(x, 3);
  for (int64_t i = 4; i < kLanes; i += 4) {
    a += lane(x, i);
    b += lane(x, i + 1);
    c += lane(x, i + 2);
    d += lane(x, i + 3);
  }
  return (a + b) + (c + d);
}

// ------------------------------------------------------------------------------------- addends
// How sums are made, as `lutjax/_fixed_point.py` says: of floats, or of int32 addends trunc(v * scale). `Sum` is what a sum is kept as, `Part`
// what is added (unsigned, because sums that do not fit wrap), `Parts` lanes of it.
struct InFloats {
  using Sum = float;
  using Part = float;
  using Parts = Floats;
  Part addend(float x) const { return x; }
  Parts addend(const Floats& x) const { return x; }
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
  Parts addend(const Floats& x) const {
    Words y;
    for (int64_t i = 0; i < kLanes; ++i) y.of[i] = addend(x.of[i]);
    return y;
  }
  static Parts none() {
    Words y;
    for (uint32_t& of : y.of) of = 0;
    return y;
  }
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

}  // namespace
}  // namespace lutjax
#endif
