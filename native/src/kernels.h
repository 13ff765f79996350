// What a kernel is given: arrays, numbers and threads. Kernels know neither XLA nor Python.
//
// This header and `vectors.h` are all that files in `kernels/` include, beside <cstdint>, <cstddef>, <cmath>, <cstring>. They are compiled
// once for each level of instructions, so what they define has internal linkage (an anonymous namespace) but for the kernels,
// in a namespace of their level: the linker cannot mistake code of one level for that of another.
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

// Threads that share work. `run` calls `body(data, i)` once for each i below n, in any order, on any thread, and returns when all have
// returned; it may be called from inside of a body.
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
  // Memory of this call, at least 64-byte aligned, not set; freed after it. Null where there is none left.
  void* (*allocate)(void* self, size_t bytes);
  void* memory;
};

// Returns null, or what went wrong.
using Kernel = const char* (*)(const Call&);
constexpr const char* kDone = nullptr;

struct Named {
  const char* name;
  Kernel kernel;
};

}  // namespace lutjax

#ifdef LUTJAX_LEVEL
// Defines a kernel of this level of instructions, by the name by which Python calls it: LUTJAX_KERNEL(lookup_forward) { use `call` }
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

// Ids beyond the rows are those of the nearest row.
template <class T>
T clamped(T id, T n) { return id < 0 ? 0 : id >= n ? n - 1 : id; }

// Calls body(i) once for each i below n, on any thread. What i does must not depend on the number of threads: results are
// then the same bits for any number.
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

// Of functions that do nothing but fetch: GCC takes one that it does not inline for a function without effects, and leaves its calls out.
#if defined(__GNUC__)
#define LUTJAX_INLINE inline __attribute__((always_inline))
#else
#define LUTJAX_INLINE inline
#endif

// Of long functions that several instances of a template call once for much work: each of these would be compiled with a copy of them.
#if defined(__GNUC__)
#define LUTJAX_NOINLINE __attribute__((noinline))
#else
#define LUTJAX_NOINLINE __declspec(noinline)
#endif

// Fetches a cache line that is read (or written) soon.
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
