// Vectors of numbers as wide as the instructions of the level: lanes are computed side by side, in an order that is written down.
//
// GCC and Clang have such types; for other compilers they are arrays with loops.
#pragma once

#include <cmath>

#include "vectors.h"

#if defined(__SSE4_1__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
#define LUTJAX_WIDE 16
#elif defined(__AVX2__)
#define LUTJAX_WIDE 8
#else
#define LUTJAX_WIDE 4
#endif

#ifdef LUTJAX_LEVEL
namespace lutjax {
namespace {

constexpr int kWide = LUTJAX_WIDE;

#if defined(__GNUC__) && !defined(LUTJAX_ARRAYS)

typedef float F __attribute__((vector_size(4 * LUTJAX_WIDE)));
typedef int32_t I __attribute__((vector_size(4 * LUTJAX_WIDE)));
typedef I Mask;  // -1 where it holds

inline F select(Mask m, F a, F b) { return m ? a : b; }
inline I select(Mask m, I a, I b) { return m ? a : b; }
inline F floats(I a) { return __builtin_convertvector(a, F); }
inline I whole(F a) { return __builtin_convertvector(a, I); }  // towards 0; a must fit
inline F splat(float x) { return F{} + x; }
inline I splat(int32_t x) { return I{} + x; }
inline float at(F a, int i) { return a[i]; }
inline int32_t at(I a, int i) { return a[i]; }

#else

template <class T>
struct Lanes {
  T v[kWide];
  T operator[](int i) const { return v[i]; }
};
typedef Lanes<float> F;
typedef Lanes<int32_t> I;
typedef I Mask;

template <class T>
Lanes<T> splat(T x) {
  Lanes<T> y;
  for (int i = 0; i < kWide; ++i) y.v[i] = x;
  return y;
}
#define LUTJAX_OPERATOR(op)                                         \
  template <class T>                                                \
  Lanes<T> operator op(Lanes<T> a, Lanes<T> b) {                    \
    for (int i = 0; i < kWide; ++i) a.v[i] = a.v[i] op b.v[i];     \
    return a;                                                       \
  }                                                                 \
  template <class T>                                                \
  Lanes<T> operator op(Lanes<T> a, T b) { return a op splat(b); }   \
  template <class T>                                                \
  Lanes<T> operator op(T a, Lanes<T> b) { return splat(a) op b; }   \
  template <class T, class U>                                       \
  Lanes<T>& operator op##=(Lanes<T>& a, U b) { return a = a op b; }
LUTJAX_OPERATOR(+)
LUTJAX_OPERATOR(-)
LUTJAX_OPERATOR(*)
LUTJAX_OPERATOR(/)
LUTJAX_OPERATOR(&)
LUTJAX_OPERATOR(|)
LUTJAX_OPERATOR(^)
#undef LUTJAX_OPERATOR
#define LUTJAX_COMPARISON(op)                                        \
  template <class T>                                                 \
  Mask operator op(Lanes<T> a, Lanes<T> b) {                         \
    Mask y;                                                          \
    for (int i = 0; i < kWide; ++i) y.v[i] = -(a.v[i] op b.v[i]);   \
    return y;                                                        \
  }                                                                  \
  template <class T>                                                 \
  Mask operator op(Lanes<T> a, T b) { return a op splat(b); }
LUTJAX_COMPARISON(<)
LUTJAX_COMPARISON(<=)
LUTJAX_COMPARISON(>)
LUTJAX_COMPARISON(>=)
LUTJAX_COMPARISON(==)
LUTJAX_COMPARISON(!=)
#undef LUTJAX_COMPARISON
inline F operator-(F a) { return -1.0f * a; }
inline I operator~(I a) { return a ^ -1; }
inline I operator<<(I a, int n) {
  for (int i = 0; i < kWide; ++i) a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << n);
  return a;
}
inline I operator>>(I a, int n) {
  for (int i = 0; i < kWide; ++i) a.v[i] >>= n;
  return a;
}
template <class T>
Lanes<T> select(Mask m, Lanes<T> a, Lanes<T> b) {
  for (int i = 0; i < kWide; ++i) a.v[i] = m.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline F floats(I a) {
  F y;
  for (int i = 0; i < kWide; ++i) y.v[i] = static_cast<float>(a.v[i]);
  return y;
}
inline I whole(F a) {
  I y;
  for (int i = 0; i < kWide; ++i) y.v[i] = static_cast<int32_t>(a.v[i]);
  return y;
}
inline float at(F a, int i) { return a.v[i]; }
inline int32_t at(I a, int i) { return a.v[i]; }

#endif

// ------------------------------------------------------------------------------------- memory
template <class V>
V from_memory(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline F get(const float* p) { return from_memory<F>(p); }
inline I get(const int32_t* p) { return from_memory<I>(p); }
inline void put(float* p, F v) { std::memcpy(p, &v, sizeof v); }
inline void put(int32_t* p, I v) { std::memcpy(p, &v, sizeof v); }

inline I bits(F a) { return from_memory<I>(&a); }
inline F as_float(I a) { return from_memory<F>(&a); }

#if defined(__GNUC__) && !defined(LUTJAX_ARRAYS)
inline F get(const bfloat16* p) {
  typedef uint16_t Halves __attribute__((vector_size(2 * LUTJAX_WIDE)));
  return as_float(__builtin_convertvector(from_memory<Halves>(p), I) << 16);
}
#if defined(__SSE4_1__)
// GCC converts bytes one after the other.
inline I get_integers(const int8_t* p) {
#if LUTJAX_WIDE == 16
  const __m512i y = _mm512_maskz_cvtepi8_epi32(0xffff, from_memory<__m128i>(p));  // the plain one makes GCC 12 warn
#elif LUTJAX_WIDE == 8
  const __m256i y = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  const __m128i y = _mm_cvtepi8_epi32(_mm_cvtsi32_si128(from_memory<int32_t>(p)));
#endif
  return from_memory<I>(&y);
}
#else
inline I get_integers(const int8_t* p) {
  typedef int8_t Bytes __attribute__((vector_size(LUTJAX_WIDE)));
  return __builtin_convertvector(from_memory<Bytes>(p), I);
}
#endif
#else
inline F get(const bfloat16* p) {
  F y;
  for (int i = 0; i < kWide; ++i) y.v[i] = value(p[i]);
  return y;
}
inline I get_integers(const int8_t* p) {
  I y;
  for (int i = 0; i < kWide; ++i) y.v[i] = p[i];
  return y;
}
#endif
inline F get(const int8_t* p) { return floats(get_integers(p)); }

// The first n < kWide numbers; the others are 0, and are not stored.
template <class T>
F get_first(const T* p, int n) {
  T copy[kWide] = {};
  for (int i = 0; i < n; ++i) copy[i] = p[i];
  return get(copy);
}
#if defined(__AVX512F__)
inline F get_first(const float* p, int n) {
  const __m512 v = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
  return from_memory<F>(&v);
}
inline I get_first(const int32_t* p, int n) {
  const __m512i v = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << n) - 1), p);
  return from_memory<I>(&v);
}
inline void put_first(float* p, F v, int n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), from_memory<__m512>(&v));
}
inline void put_first(int32_t* p, I v, int n) {
  _mm512_mask_storeu_epi32(p, static_cast<__mmask16>((1u << n) - 1), from_memory<__m512i>(&v));
}
#elif defined(__AVX2__)
inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline F get_first(const float* p, int n) {
  const __m256 v = _mm256_maskload_ps(p, first_lanes(n));
  return from_memory<F>(&v);
}
inline I get_first(const int32_t* p, int n) {
  const __m256i v = _mm256_maskload_epi32(reinterpret_cast<const int*>(p), first_lanes(n));
  return from_memory<I>(&v);
}
inline void put_first(float* p, F v, int n) { _mm256_maskstore_ps(p, first_lanes(n), from_memory<__m256>(&v)); }
inline void put_first(int32_t* p, I v, int n) {
  _mm256_maskstore_epi32(reinterpret_cast<int*>(p), first_lanes(n), from_memory<__m256i>(&v));
}
#else
inline I get_first(const int32_t* p, int n) {
  int32_t copy[kWide] = {};
  for (int i = 0; i < n; ++i) copy[i] = p[i];
  return get(copy);
}
inline void put_first(float* p, F v, int n) {
  for (int i = 0; i < n; ++i) p[i] = at(v, i);
}
inline void put_first(int32_t* p, I v, int n) {
  for (int i = 0; i < n; ++i) p[i] = at(v, i);
}
#endif
inline I get_first_integers(const int8_t* p, int n) {
  int8_t copy[kWide] = {};
  for (int i = 0; i < n; ++i) copy[i] = p[i];
  return get_integers(copy);
}

// ------------------------------------------------------------------------------------- sums of lanes
#if defined(__GNUC__) && !defined(LUTJAX_ARRAYS)
#if LUTJAX_WIDE == 16
#define LUTJAX_EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define LUTJAX_ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif LUTJAX_WIDE == 8
#define LUTJAX_EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define LUTJAX_ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define LUTJAX_EVEN 0, 2, 4, 6
#define LUTJAX_ODD 1, 3, 5, 7
#endif
// Sums of neighbouring lanes of a, then of b.
template <class V>
V pairs(V a, V b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, LUTJAX_EVEN) + __builtin_shufflevector(a, b, LUTJAX_ODD);
#else
  return __builtin_shuffle(a, b, I{LUTJAX_EVEN}) + __builtin_shuffle(a, b, I{LUTJAX_ODD});
#endif
}
#undef LUTJAX_EVEN
#undef LUTJAX_ODD
#else
template <class V>
V pairs(V a, V b) {
  V y;
  for (int i = 0; i < kWide / 2; ++i) {
    y.v[i] = a.v[2 * i] + a.v[2 * i + 1];
    y.v[kWide / 2 + i] = b.v[2 * i] + b.v[2 * i + 1];
  }
  return y;
}
#endif

// The sum of vector i in lane i, of kWide vectors that follow each other.
template <class T, int n = kWide>
auto sums_of(const T* vectors) -> decltype(get(vectors)) {
  if constexpr (n == 1)
    return get(vectors);
  else
    return pairs(sums_of<T, n / 2>(vectors), sums_of<T, n / 2>(vectors + n / 2 * kWide));
}

template <class V>
auto sum_of(V a) -> decltype(at(a, 0)) {
  for (int n = kWide; n > 1; n /= 2) a = pairs(a, a);
  return at(a, 0);
}

// ------------------------------------------------------------------------------------- functions
inline F absolute(F x) { return as_float(bits(x) & 0x7fffffff); }
inline F smaller(F a, F b) { return select(b < a, b, a); }  // a if it is NaN
inline F larger(F a, F b) { return select(b > a, b, a); }

// 2**n, for n from -126 to 127.
inline F power_of_two(I n) { return as_float((n + 127) << 23); }

// exp(x) of x <= 0 to two units in the last place; 0 below the normal numbers, NaN of NaN.
inline F exp_of_negative(F x) {
  const Mask tiny = x < -87.3f;
  const F within = select(tiny, splat(-87.3f), x);
  const F shifted = within * 1.44269504f + 12582912.0f;  // rounds to a whole number in the last bits
  const F n = shifted - 12582912.0f;
  const F r = (within - n * 0.693359375f) + n * 2.12194440e-4f;
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return select(tiny, splat(0.0f), p * as_float((bits(shifted) << 23) + 0x3f800000));
}

// 2**-x of x >= 0 to a relative 3e-7 where x is small, and at least 2**-126; a number for NaN.
inline F half_to(F x) {
  const F t = select(x < 126.0f, x, splat(126.0f));
  const F shifted = 12582912.0f - t;
  const F f = (12582912.0f - shifted) - t;
  F p = f * 1.339086681e-3f + 9.666373953e-3f;
  p = p * f + 5.550356954e-2f;
  p = p * f + 2.402234823e-1f;
  p = p * f + 6.931471825e-1f;
  p = p * f + 1.0f;
  return as_float(bits(p) + (bits(shifted) << 23));
}

// log(x) of normal numbers x > 0 to two units in the last place; what it is of others is not said.
inline F log_of_normal(F x) {
  I of = bits(x);
  // x = m * 2**e with m from sqrt(1/2) to sqrt(2).
  const I e = (of - 0x3f3504f3) >> 23;
  const F m = as_float(of - (e << 23)) - 1.0f, f = floats(e), z = m * m;
  F p = m * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  return (m + (m * z * p - f * 2.12194440e-4f - 0.5f * z)) + f * 0.693359375f;
}

// log(1 + x) of finite x >= 0; NaN of NaN.
inline F log1p_of(F x) {
  const F w = x + 1.0f;
  return select(x == x, log_of_normal(w) + (x - (w - 1.0f)) / w, x);
}

}  // namespace
}  // namespace lutjax
#endif
