// Several numbers, or words, at a time: as many as a register of this level holds, four, or one. The same code runs with each.
#pragma once

#include "vectors.h"

#ifdef LUTJAX_LEVEL
namespace lutjax {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#if defined(__GNUC__)
template <int n>
struct Vector {
  typedef float Of __attribute__((vector_size(4 * n)));
  typedef uint32_t Bits __attribute__((vector_size(4 * n)));
  typedef uint16_t Halves __attribute__((vector_size(2 * n)));
};

template <int n>
struct Lanes {
  typename Vector<n>::Of of;

  static Lanes all(float x) { return {x - typename Vector<n>::Of{}}; }
  static Lanes read(const float* from) {
    Lanes y;
    std::memcpy(&y.of, from, sizeof(y.of));
    return y;
  }
  static Lanes read(const bfloat16* from) {
    typename Vector<n>::Halves bits;
    std::memcpy(&bits, from, sizeof(bits));
    const typename Vector<n>::Bits wide = __builtin_convertvector(bits, typename Vector<n>::Bits) << 16;
    Lanes y;
    std::memcpy(&y.of, &wide, sizeof(wide));
    return y;
  }
  void write(float* to) const { std::memcpy(to, &of, sizeof(of)); }
};

template <int n>
Lanes<n> operator+(Lanes<n> a, Lanes<n> b) { return {a.of + b.of}; }
template <int n>
Lanes<n> operator-(Lanes<n> a, Lanes<n> b) { return {a.of - b.of}; }
template <int n>
Lanes<n> operator*(Lanes<n> a, Lanes<n> b) { return {a.of * b.of}; }
// `a` where x is above 0 (NaN is not), else `b`.
template <int n>
Lanes<n> where_positive(Lanes<n> x, Lanes<n> a, Lanes<n> b) { return {x.of > typename Vector<n>::Of{} ? a.of : b.of}; }
template <int n>
float lane(const Lanes<n>& a, int i) { return a.of[i]; }

template <int n>
struct Words {
  typename Vector<n>::Bits of;

  static Words all(uint32_t x) { return {x - typename Vector<n>::Bits{}}; }
  static Words read(const uint32_t* from) {
    Words y;
    std::memcpy(&y.of, from, sizeof(y.of));
    return y;
  }
  void write(uint32_t* to) const { std::memcpy(to, &of, sizeof(of)); }
};

// The bits of `a` where those of x are 1, else those of `b`.
template <int n>
Words<n> where_one(Words<n> x, Words<n> a, Words<n> b) { return {(x.of & a.of) | (~x.of & b.of)}; }
#else
template <int n>
struct Lanes {
  float of[n];

  static Lanes all(float x) { return made([&](int) { return x; }); }
  template <class T>
  static Lanes read(const T* from) { return made([&](int i) { return value(from[i]); }); }
  void write(float* to) const { std::memcpy(to, of, sizeof(of)); }
  template <class F>
  static Lanes made(const F& f) {
    Lanes y;
    for (int i = 0; i < n; ++i) y.of[i] = f(i);
    return y;
  }
};

template <int n>
Lanes<n> operator+(Lanes<n> a, Lanes<n> b) { return Lanes<n>::made([&](int i) { return a.of[i] + b.of[i]; }); }
template <int n>
Lanes<n> operator-(Lanes<n> a, Lanes<n> b) { return Lanes<n>::made([&](int i) { return a.of[i] - b.of[i]; }); }
template <int n>
Lanes<n> operator*(Lanes<n> a, Lanes<n> b) { return Lanes<n>::made([&](int i) { return a.of[i] * b.of[i]; }); }
template <int n>
Lanes<n> where_positive(Lanes<n> x, Lanes<n> a, Lanes<n> b) {
  return Lanes<n>::made([&](int i) { return x.of[i] > 0 ? a.of[i] : b.of[i]; });
}
template <int n>
float lane(const Lanes<n>& a, int i) { return a.of[i]; }

template <int n>
struct Words {
  uint32_t of[n];

  static Words all(uint32_t x) {
    Words y;
    for (int i = 0; i < n; ++i) y.of[i] = x;
    return y;
  }
  static Words read(const uint32_t* from) {
    Words y;
    std::memcpy(y.of, from, sizeof(y.of));
    return y;
  }
  void write(uint32_t* to) const { std::memcpy(to, of, sizeof(of)); }
};

template <int n>
Words<n> where_one(Words<n> x, Words<n> a, Words<n> b) {
  Words<n> y;
  for (int i = 0; i < n; ++i) y.of[i] = (x.of[i] & a.of[i]) | (~x.of[i] & b.of[i]);
  return y;
}
#endif

template <int n>
void write(const Lanes<n>& a, float* to) { a.write(to); }
template <int n>
void write(const Lanes<n>& a, bfloat16* to) {
  for (int i = 0; i < n; ++i) store(lane(a, i), to + i);
}

// Halves are added to halves: the order is fixed.
template <int n>
float sum(const Lanes<n>& a) {
  float x[n];
  a.write(x);
  for (int half = n / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}

// A sum over lanes of any number, in a fixed order.
struct Sum {
  Lanes<kLanes> of_most = Lanes<kLanes>::all(0);
  Lanes<4> of_four = Lanes<4>::all(0);
  Lanes<1> of_one = Lanes<1>::all(0);

  template <int n>
  void add(Lanes<n> a) {
    if constexpr (n == kLanes) of_most = of_most + a;
    else if constexpr (n == 4) of_four = of_four + a;
    else of_one = of_one + a;
  }
  float total() const { return sum(of_most) + (sum(of_four) + sum(of_one)); }
};

// Calls body(several, i) for elements i, i + 1, ... from `first` to `last`; the type of `several` says how many: `Lanes` or `Words`.
template <template <int> class Several = Lanes, class Body>
void in_lanes(int64_t first, int64_t last, const Body& body) {
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) body(Several<kLanes>{}, i);
  if constexpr (kLanes > 4)
    for (; i + 4 <= last; i += 4) body(Several<4>{}, i);
  for (; i < last; ++i) body(Several<1>{}, i);
}

}  // namespace
}  // namespace lutjax
#endif
