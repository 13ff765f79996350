// Vector types and their operations, used by every kernel.
//
// `Lanes<T, n>` holds n elements of a 4-byte type. `Floats`, `Ints` and `Words` fill one register at this instruction level: wider types
// would spill to memory. Lanes are summed in a documented order. Compilers without vector extensions use arrays and loops
// instead; LUTJAX_ARRAYS selects them explicitly.
#pragma once

#include <cmath>

#include "vectors.h"

#if defined(__SSE4_1__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
#define LUTJAX_LANES 16
#elif defined(__AVX2__)
#define LUTJAX_LANES 8
#else
#define LUTJAX_LANES 4
#endif

#ifdef LUTJAX_LEVEL
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // no lanes pass between object files
#endif
namespace lutjax {
namespace {

constexpr int kLanes = LUTJAX_LANES;

#if defined(__GNUC__) && !defined(LUTJAX_ARRAYS)
template <class T, int n>
struct Vector {
  typedef T Of __attribute__((vector_size(n * sizeof(T))));
};
template <class T, int n = kLanes>
using Lanes = typename Vector<T, n>::Of;

template <class To, class V>
To converted(const V& a) { return __builtin_convertvector(a, To); }
template <class M, class V>
V select(const M& m, const V& a, const V& b) { return m ? a : b; }
#else
template <class T, int n = kLanes>
struct Lanes {
  T v[n];
  T operator[](int i) const { return v[i]; }
  T& operator[](int i) { return v[i]; }
  static Lanes broadcast(T x) {
    Lanes y;
    for (T& of : y.v) of = x;
    return y;
  }
};

#define LUTJAX_OPERATOR(op)                                                                    \
  template <class T, int n>                                                                    \
  Lanes<T, n> operator op(Lanes<T, n> a, Lanes<T, n> b) {                                      \
    for (int i = 0; i < n; ++i) a.v[i] = a.v[i] op b.v[i];                                     \
    return a;                                                                                  \
  }                                                                                            \
  template <class T, int n, class S>                                                           \
  Lanes<T, n> operator op(Lanes<T, n> a, S b) { return a op Lanes<T, n>::broadcast(static_cast<T>(b)); } \
  template <class T, int n, class S>                                                           \
  Lanes<T, n> operator op(S a, Lanes<T, n> b) { return Lanes<T, n>::broadcast(static_cast<T>(a)) op b; } \
  template <class T, int n, class S>                                                           \
  Lanes<T, n>& operator op##=(Lanes<T, n>& a, S b) { return a = a op b; }
#define LUTJAX_COMPARISON(op)                                              \
  template <class T, int n>                                                \
  Lanes<int32_t, n> operator op(Lanes<T, n> a, Lanes<T, n> b) {            \
    Lanes<int32_t, n> y;                                                   \
    for (int i = 0; i < n; ++i) y.v[i] = -(a.v[i] op b.v[i]);              \
    return y;                                                              \
  }                                                                        \
  template <class T, int n, class S>                                       \
  Lanes<int32_t, n> operator op(Lanes<T, n> a, S b) { return a op Lanes<T, n>::broadcast(static_cast<T>(b)); }
LUTJAX_OPERATOR(+)
LUTJAX_OPERATOR(-)
LUTJAX_OPERATOR(*)
LUTJAX_OPERATOR(/)
LUTJAX_OPERATOR(&)
LUTJAX_OPERATOR(|)
LUTJAX_OPERATOR(^)
LUTJAX_COMPARISON(<)
LUTJAX_COMPARISON(<=)
LUTJAX_COMPARISON(>)
LUTJAX_COMPARISON(>=)
LUTJAX_COMPARISON(==)
LUTJAX_COMPARISON(!=)
#undef LUTJAX_OPERATOR
#undef LUTJAX_COMPARISON
template <int n>
Lanes<float, n> operator-(Lanes<float, n> a) { return -1.0f * a; }
template <class T, int n>
Lanes<T, n> operator~(Lanes<T, n> a) { return a ^ -1; }
template <class T, int n>
Lanes<T, n> operator<<(Lanes<T, n> a, int places) {
  for (T& x : a.v) x = static_cast<T>(static_cast<uint32_t>(x) << places);
  return a;
}
template <class T, int n>
Lanes<T, n> operator>>(Lanes<T, n> a, int places) {
  for (T& x : a.v) x >>= places;
  return a;
}

template <class To, class T, int n>
To converted(const Lanes<T, n>& a) {
  To y;
  for (int i = 0; i < n; ++i) y.v[i] = static_cast<decltype(y[0] + 0)>(a.v[i]);
  return y;
}
template <class T, int n>
Lanes<T, n> select(const Lanes<int32_t, n>& m, Lanes<T, n> a, const Lanes<T, n>& b) {
  for (int i = 0; i < n; ++i) a.v[i] = m.v[i] ? a.v[i] : b.v[i];
  return a;
}
#endif

template <class T>
struct Plain {
  using Of = T;
};
template <class T>
struct Plain<T&> {
  using Of = T;
};
template <class T>
struct Plain<const T&> {
  using Of = T;
};
template <class T>
struct Plain<T&&> {  // Clang's type of an element of a temporary
  using Of = T;
};
template <class V>
using Element = typename Plain<decltype(V{}[0])>::Of;

using Floats = Lanes<float>;
using Ints = Lanes<int32_t>;
using Words = Lanes<uint32_t>;  // sums of int32, which wrap
using Mask = Ints;              // -1 where it holds

// All lanes the same; -0 stays what it is.
template <class V>
V broadcast(Element<V> x) { return x - V{}; }
inline Floats splat(float x) { return broadcast<Floats>(x); }
inline Ints splat(int32_t x) { return broadcast<Ints>(x); }

inline Floats floats(Ints a) { return converted<Floats>(a); }
inline Ints truncated(Floats a) { return converted<Ints>(a); }  // toward 0; a must fit

// ------------------------------------------------------------------------------------- memory
template <class V>
V from_memory(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
Lanes<int32_t, sizeof(V) / 4> bits(const V& a) { return from_memory<Lanes<int32_t, sizeof(V) / 4>>(&a); }
template <class V>
Lanes<float, sizeof(V) / 4> as_float(const V& a) { return from_memory<Lanes<float, sizeof(V) / 4>>(&a); }

// Consecutive elements, as many as V holds.
template <class V, class T>
V read(const T* p) { return from_memory<V>(p); }
template <class V>
V read(const bfloat16* p) {
  constexpr int n = sizeof(V) / 4;
  return as_float(converted<Lanes<uint32_t, n>>(from_memory<Lanes<uint16_t, n>>(p)) << 16);
}
inline Floats load(const float* p) { return read<Floats>(p); }
inline Floats load(const bfloat16* p) { return read<Floats>(p); }
inline Ints load(const int32_t* p) { return from_memory<Ints>(p); }
#if defined(__SSE4_1__) && !defined(LUTJAX_ARRAYS)
// GCC converts bytes one at a time.
inline Ints load_integers(const int8_t* p) {
#if LUTJAX_LANES == 16
  const __m512i y = _mm512_maskz_cvtepi8_epi32(0xffff, from_memory<__m128i>(p));  // the plain one makes GCC 12 warn
#elif LUTJAX_LANES == 8
  const __m256i y = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  const __m128i y = _mm_cvtepi8_epi32(_mm_cvtsi32_si128(from_memory<int32_t>(p)));
#endif
  return from_memory<Ints>(&y);
}
#else
inline Ints load_integers(const int8_t* p) { return converted<Ints>(from_memory<Lanes<int8_t>>(p)); }
#endif
inline Floats load(const int8_t* p) { return floats(load_integers(p)); }

// Lanes have elements, unlike the numbers that `vectors.h` stores.
template <class V, class T, class = decltype(V{}[0])>
void store(const V& a, T* to) {
  static_assert(sizeof(T) == 4, "of the type of the lanes");
  std::memcpy(to, &a, sizeof a);
}
template <class V, class = decltype(V{}[0])>
void store(const V& a, bfloat16* to) {  // as `store` of one number
  constexpr int n = sizeof(V) / 4;
  using Of = Lanes<uint32_t, n>;
  const Of of = from_memory<Of>(&a), odd = (of >> 16) & 1, rounded = (of + 0x7fff + odd) >> 16, of_nan = (of >> 16) | 0x40;
  const Lanes<uint16_t, n> halves = converted<Lanes<uint16_t, n>>(select(a == a, rounded, of_nan));
  std::memcpy(to, &halves, sizeof halves);
}

// The first n < kLanes elements; other lanes load 0 and are not stored.
template <class T>
Floats load_first(const T* p, int n) {
  T copy[kLanes] = {};
  for (int i = 0; i < n; ++i) copy[i] = p[i];
  return load(copy);
}
#if defined(__AVX512F__)
inline Floats load_first(const float* p, int n) {
  const __m512 v = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
  return from_memory<Floats>(&v);
}
inline Ints load_first(const int32_t* p, int n) {
  const __m512i v = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << n) - 1), p);
  return from_memory<Ints>(&v);
}
inline void store_first(Floats v, float* p, int n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), from_memory<__m512>(&v));
}
inline void store_first(Ints v, int32_t* p, int n) {
  _mm512_mask_storeu_epi32(p, static_cast<__mmask16>((1u << n) - 1), from_memory<__m512i>(&v));
}
#elif defined(__AVX2__)
inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Floats load_first(const float* p, int n) {
  const __m256 v = _mm256_maskload_ps(p, first_lanes(n));
  return from_memory<Floats>(&v);
}
inline Ints load_first(const int32_t* p, int n) {
  const __m256i v = _mm256_maskload_epi32(reinterpret_cast<const int*>(p), first_lanes(n));
  return from_memory<Ints>(&v);
}
inline void store_first(Floats v, float* p, int n) { _mm256_maskstore_ps(p, first_lanes(n), from_memory<__m256>(&v)); }
inline void store_first(Ints v, int32_t* p, int n) {
  _mm256_maskstore_epi32(reinterpret_cast<int*>(p), first_lanes(n), from_memory<__m256i>(&v));
}
#else
inline Ints load_first(const int32_t* p, int n) {
  int32_t copy[kLanes] = {};
  for (int i = 0; i < n; ++i) copy[i] = p[i];
  return load(copy);
}
inline void store_first(Floats v, float* p, int n) {
  for (int i = 0; i < n; ++i) p[i] = v[i];
}
inline void store_first(Ints v, int32_t* p, int n) {
  for (int i = 0; i < n; ++i) p[i] = v[i];
}
#endif
inline Ints load_first_integers(const int8_t* p, int n) {
  int8_t copy[kLanes] = {};
  for (int i = 0; i < n; ++i) copy[i] = p[i];
  return load_integers(copy);
}

// ------------------------------------------------------------------------------------- sums of lanes
// Sums all lanes: halves are added until one element is left.
template <class V>
Element<V> sum_of(const V& a) {
  using T = Element<V>;
  constexpr int n = sizeof(V) / 4;
  if constexpr (n == 1) {
    return a[0];
  } else if constexpr (n == 4) {
    return (a[0] + a[2]) + (a[1] + a[3]);
  } else {
    Lanes<T, n / 2> half[2];
    std::memcpy(half, &a, sizeof half);
    return sum_of(half[0] + half[1]);
  }
}

#if defined(__GNUC__) && !defined(LUTJAX_ARRAYS)
#if LUTJAX_LANES == 16
#define LUTJAX_EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define LUTJAX_ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif LUTJAX_LANES == 8
#define LUTJAX_EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define LUTJAX_ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define LUTJAX_EVEN 0, 2, 4, 6
#define LUTJAX_ODD 1, 3, 5, 7
#endif
// Sums neighboring lanes in a, then in b.
template <class V>
V pairs(V a, V b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, LUTJAX_EVEN) + __builtin_shufflevector(a, b, LUTJAX_ODD);
#else
  return __builtin_shuffle(a, b, Ints{LUTJAX_EVEN}) + __builtin_shuffle(a, b, Ints{LUTJAX_ODD});
#endif
}
#undef LUTJAX_EVEN
#undef LUTJAX_ODD
#else
template <class V>
V pairs(V a, V b) {
  V y;
  for (int i = 0; i < kLanes / 2; ++i) {
    y.v[i] = a.v[2 * i] + a.v[2 * i + 1];
    y.v[kLanes / 2 + i] = b.v[2 * i] + b.v[2 * i + 1];
  }
  return y;
}
#endif

// Lane i gets the sum of vector i, for kLanes consecutive vectors.
template <class T, int n = kLanes>
auto sums_of(const T* vectors) -> decltype(load(vectors)) {
  if constexpr (n == 1)
    return load(vectors);
  else
    return pairs(sums_of<T, n / 2>(vectors), sums_of<T, n / 2>(vectors + n / 2 * kLanes));
}

// ------------------------------------------------------------------------------------- functions
inline Floats absolute(Floats x) { return as_float(bits(x) & 0x7fffffff); }

// 2**n, for n from -126 to 127.
inline Floats power_of_two(Ints n) { return as_float((n + 127) << 23); }

// exp(x) for x <= 0, to two units in the last place; 0 below the normal numbers; NaN stays NaN.
inline Floats exp_of_negative(Floats x) {
  const Mask tiny = x < -87.3f;
  const Floats within = select(tiny, splat(-87.3f), x);
  const Floats shifted = within * 1.44269504f + 12582912.0f;  // rounds to a whole number in the last bits
  const Floats n = shifted - 12582912.0f;
  const Floats r = (within - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return select(tiny, splat(0.0f), p * as_float((bits(shifted) << 23) + 0x3f800000));
}

// 2**-x for x >= 0, to a relative 3e-7 for small x; 0 below 2**-126, and for NaN.
inline Floats half_to(Floats x) {
  const Mask normal = x < 126.0f;
  const Floats t = select(normal, x, splat(126.0f));
  const Floats shifted = 12582912.0f - t;
  const Floats f = (12582912.0f - shifted) - t;
  Floats p = f * 1.339086681e-3f + 9.666373953e-3f;
  p = p * f + 5.550356954e-2f;
  p = p * f + 2.402234823e-1f;
  p = p * f + 6.931471825e-1f;
  p = p * f + 1.0f;
  return as_float((bits(p) + (bits(shifted) << 23)) & normal);
}

// log(x) for normal x > 0, to two units in the last place; undefined for other x.
inline Floats log_of_normal(Floats x) {
  Ints of = bits(x);
  // x = m * 2**e with m from sqrt(1/2) to sqrt(2).
  const Ints e = (of - 0x3f3504f3) >> 23;
  const Floats m = as_float(of - (e << 23)) - 1.0f, f = floats(e), z = m * m;
  Floats p = m * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  return (m + (m * z * p - f * 2.12194440e-4f - 0.5f * z)) + f * 0.693359375f;
}

// log(1 + x) for finite x >= 0; NaN stays NaN.
inline Floats log1p_of(Floats x) {
  const Floats w = x + 1.0f;
  return select(x == x, log_of_normal(w) + (x - (w - 1.0f)) / w, x);
}

// ------------------------------------------------------------------------------------- rows
// Calls body(lanes, i) for i, i + 1, ... from `first` to `last`; the type of `lanes`, `Lanes` of T, determines the step. `whole`: the count
// is a multiple of kLanes, and the body is not compiled for fewer.
template <class T = float, bool whole = false, class Body>
void in_lanes(int64_t first, int64_t last, const Body& body) {
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) body(Lanes<T, kLanes>{}, i);
  if constexpr (whole) return;
  if constexpr (kLanes > 4)
    for (; i + 4 <= last; i += 4) body(Lanes<T, 4>{}, i);
  for (; i < last; ++i) body(Lanes<T, 1>{}, i);
}

// Transposes [n, m] 4-byte elements with row distance `stride` to [m, n].
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
  [[maybe_unused]] typedef int32_t Ids __attribute__((vector_size(16)));
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
// Summation methods, see `lutjax/values/_fixed_point.py`: floats, or int32 addends trunc(v * scale). `Sum` is the type of a sum, `Part`
// the type of an addend (unsigned, because overflowing sums wrap), `Parts` its lanes.
struct InFloats {
  using Sum = float;
  using Part = float;
  using Parts = Floats;
  template <class W>
  using Output = W;  // of tables of W
  Part addend(float x) const { return x; }
  Parts addend(const Floats& x) const { return x; }
};

constexpr float kFixedLimit = 2147483520.0f;  // the largest float32 below 2^31: others saturate

inline Ints fixed(Floats x) {
  x = select(x == x, x, splat(0.0f));
  x = select(x > kFixedLimit, splat(kFixedLimit), x);
  return truncated(select(x < -kFixedLimit, splat(-kFixedLimit), x));
}

struct InIntegers {
  using Sum = int32_t;
  using Part = uint32_t;
  using Parts = Words;
  template <class W>
  using Output = Sum;
  float scale;

  Part addend(float x) const {
    x *= scale;
    if (x != x) return 0;
    return static_cast<uint32_t>(static_cast<int32_t>(x > kFixedLimit ? kFixedLimit : x < -kFixedLimit ? -kFixedLimit : x));
  }
  Parts addend(const Floats& x) const {
    const Ints addend = fixed(x * scale);
    return from_memory<Words>(&addend);
  }
};

// Calls body(value with the element type of `array`), which returns a kernel result.
template <class Body>
const char* for_type(const Array& array, const Body& body) {
  switch (array.type) {
    case Type::float32: return body(float{});
    case Type::bfloat16: return body(bfloat16{});
    default: return "arrays must be float32 or bfloat16";
  }
}

// Calls body(value with the table type, summation method).
template <class Body>
const char* for_type(const Array& weights, bool fixed, double scale, const Body& body) {
  const InIntegers in_integers{static_cast<float>(scale)};
  return for_type(weights, [&](auto weight) { return fixed ? body(weight, in_integers) : body(weight, InFloats{}); });
}

// sums[o] += addend(from(i)[o]) for i = 0..n-1 in order and o below size; `from(i)` is the address of row i. Each output is summed
// in registers.
template <class How, class From>
inline void add_rows(const How& how, int64_t n, const From& from, int64_t size, typename How::Sum* sums) {
  using Parts = typename How::Parts;
  int64_t o = 0;
  for (; o + 4 * kLanes <= size; o += 4 * kLanes) {
    auto a = read<Parts>(sums + o), b = read<Parts>(sums + o + kLanes), c = read<Parts>(sums + o + 2 * kLanes), d = read<Parts>(sums + o + 3 * kLanes);
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
    auto a = read<Parts>(sums + o), b = read<Parts>(sums + o + kLanes);
    for (int64_t i = 0; i < n; ++i) {
      const auto* row = from(i) + o;
      a += how.addend(load(row));
      b += how.addend(load(row + kLanes));
    }
    store(a, sums + o);
    store(b, sums + o + kLanes);
  }
  for (; o + kLanes <= size; o += kLanes) {
    auto a = read<Parts>(sums + o);
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
  using Parts = typename How::Parts;
  int64_t o = 0;
  for (; o + kLanes <= size; o += kLanes) store(read<Parts>(sums + o) + how.addend(load(from + o)), sums + o);
  for (; o < size; ++o)
    sums[o] = static_cast<typename How::Sum>(static_cast<typename How::Part>(sums[o]) + how.addend(value(from[o])));
}

// Converts a sum to a kernel output: rounds once, or keeps the integer.
template <class T>
inline void store_sum(float sum, T* to) { store(sum, to); }
inline void store_sum(int32_t sum, int32_t* to) { *to = sum; }

}  // namespace
}  // namespace lutjax
#endif
