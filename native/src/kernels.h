// Kernel interface: arrays, numbers and threads. Kernels know neither XLA nor Python.
//
// Files in `kernels/` include only this header, `vectors.h`, <cstdint>, <cstddef>, <cmath> and <cstring>. They are compiled once per
// instruction level, so their definitions have internal linkage (an anonymous namespace). Only kernels have external linkage, in a
// namespace per level, so the linker cannot confuse code from different levels.
#pragma once

#include <cstddef>
#include <cstdint>

#define LUTJAX_JOIN_(a, b) a##b
#define LUTJAX_JOIN(a, b) LUTJAX_JOIN_(a, b)

namespace lutjax {

enum class Type : int32_t { boolean, int8, uint8, int32, uint32, float16, bfloat16, float32, float64 };

struct Array {
  void* data;
  Type type;
  int32_t rank;
  const int64_t* shape;
};

// Threads that share work. `run` calls `body(data, i)` once for each i below n, in any order, on any thread, and returns when all calls
// have returned. It may be called inside a body.
struct Pool {
  void (*run)(void* self, int64_t n, void (*body)(void* data, int64_t i), void* data);
  void* self;
  int64_t n_threads;
};

struct Call {
  const Array* inputs;
  const Array* outputs;  // memory of an output that is made in place is that of its input
  const int64_t* integers;
  const double* numbers;
  Pool pool;
  // Allocates uninitialized memory, aligned to at least 64 bytes, which is freed after the call. Returns null if none is left.
  void* (*allocate)(void* self, size_t bytes);
  void* memory;
};

// Returns null, or an error message.
using Kernel = const char* (*)(const Call&);
constexpr const char* kDone = nullptr;

struct Named {
  const char* name;
  Kernel kernel;
};

}  // namespace lutjax

#ifdef LUTJAX_LEVEL
// Defines a kernel for this instruction level, under its name in Python: LUTJAX_KERNEL(lookup_forward) { use `call` }
#define LUTJAX_KERNEL(name)                                              \
  namespace lutjax {                                                     \
  namespace LUTJAX_LEVEL {                                               \
  const char* name(const Call& call);                                    \
  }                                                                      \
  }                                                                      \
  const char* lutjax::LUTJAX_LEVEL::name(const lutjax::Call& call)

namespace lutjax {
namespace {

template <class T>
T* data(const Array& a) { return static_cast<T*>(a.data); }

template <class T>
T least(T a, T b) { return b < a ? b : a; }

template <class T>
T most(T a, T b) { return a < b ? b : a; }

// Clamps out-of-range ids to the nearest row.
template <class T>
T clamped(T id, T n) { return id < 0 ? 0 : id >= n ? n - 1 : id; }

// Calls body(i) once for each i below n, on any thread. The body must not depend on the number of threads, so that results are
// bit-identical for any number.
template <class Body>
void in_parallel(const Call& call, int64_t n, const Body& body) {
  if (n == 1) {
    body(int64_t{0});
  } else if (n > 0) {
    call.pool.run(call.pool.self, n, [](void* data, int64_t i) { (*static_cast<const Body*>(data))(i); },
                  const_cast<void*>(static_cast<const void*>(&body)));
  }
}

template <class T>
T* allocated(const Call& call, int64_t n) { return static_cast<T*>(call.allocate(call.memory, static_cast<size_t>(n) * sizeof(T))); }

// For functions that only prefetch: GCC treats a non-inlined one as free of side effects and drops its calls.
#if defined(__GNUC__)
#define LUTJAX_INLINE inline __attribute__((always_inline))
#else
#define LUTJAX_INLINE inline
#endif

// For long functions that several template instances call once: otherwise each instance would compile its own copy.
#if defined(__GNUC__)
#define LUTJAX_NOINLINE __attribute__((noinline))
#else
#define LUTJAX_NOINLINE __declspec(noinline)
#endif

// Prefetches a cache line for an upcoming read (or write).
LUTJAX_INLINE void prefetch(const void* p) {
#if defined(__GNUC__)
  __builtin_prefetch(p);
#else
  (void)p;
#endif
}

}  // namespace
}  // namespace lutjax
#endif
