#include "levels.h"

#include <atomic>

#include "exported.h"

#if defined(LUTJAX_X86) && defined(_MSC_VER)
#include <intrin.h>
#include <immintrin.h>
#elif defined(LUTJAX_X86)
#include <cpuid.h>
#endif

namespace lutjax {

#define KERNEL(name) const char* name(const Call& call);
#ifdef LUTJAX_X86
namespace v2 {
#include "kernels.def"
}
namespace v3 {
#include "kernels.def"
}
namespace v4 {
#include "kernels.def"
}
#else
namespace base {
#include "kernels.def"
}
#endif
#undef KERNEL

namespace {

struct Entry {
  std::string_view name;
  Kernel kernel;
};

#ifdef LUTJAX_X86
#define KERNEL(name) {#name, v2::name},
constexpr Entry kOfV2[] = {
#include "kernels.def"
};
#undef KERNEL
#define KERNEL(name) {#name, v3::name},
constexpr Entry kOfV3[] = {
#include "kernels.def"
};
#undef KERNEL
#define KERNEL(name) {#name, v4::name},
constexpr Entry kOfV4[] = {
#include "kernels.def"
};
#undef KERNEL
constexpr const Entry* kLevels[] = {kOfV2, kOfV3, kOfV4};
constexpr size_t kKernels = sizeof(kOfV2) / sizeof(Entry);
#else
#define KERNEL(name) {#name, base::name},
constexpr Entry kOfBase[] = {
#include "kernels.def"
};
#undef KERNEL
constexpr const Entry* kLevels[] = {kOfBase};
constexpr size_t kKernels = sizeof(kOfBase) / sizeof(Entry);
#endif
constexpr int kCount = sizeof(kLevels) / sizeof(kLevels[0]);

#ifdef LUTJAX_X86
struct Registers {
  unsigned a, b, c, d;
};

// What the processor says of itself; zeros beyond what it knows.
Registers asked(unsigned leaf) {
  Registers r{0, 0, 0, 0};
#ifdef _MSC_VER
  int of[4];
  __cpuid(of, static_cast<int>(leaf & 0x80000000u));
  if (static_cast<unsigned>(of[0]) < leaf) return r;
  __cpuidex(of, static_cast<int>(leaf), 0);
  r = {static_cast<unsigned>(of[0]), static_cast<unsigned>(of[1]), static_cast<unsigned>(of[2]), static_cast<unsigned>(of[3])};
#else
  __get_cpuid_count(leaf, 0, &r.a, &r.b, &r.c, &r.d);
#endif
  return r;
}

// The vector registers that the operating system keeps when it changes threads.
unsigned kept() {
#ifdef _MSC_VER
  return static_cast<unsigned>(_xgetbv(0));
#else
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
#endif
}
#endif

// The highest level that this machine can run; -1: not even the first. The instructions of the levels are those of the System V ABI.
int highest() {
#ifndef LUTJAX_X86
  return 0;
#else
  const Registers one = asked(1), seven = asked(7), extended = asked(0x80000001u);
  // CMPXCHG16B, SSE3, SSSE3, SSE4.1, SSE4.2, POPCNT; LAHF
  constexpr unsigned v2 = 1u << 13 | 1u << 0 | 1u << 9 | 1u << 19 | 1u << 20 | 1u << 23;
  if ((one.c & v2) != v2 || !(extended.c & 1)) return -1;
  // FMA, MOVBE, OSXSAVE, AVX, F16C; BMI1, AVX2, BMI2; LZCNT
  constexpr unsigned v3 = 1u << 12 | 1u << 22 | 1u << 27 | 1u << 28 | 1u << 29, v3_too = 1u << 3 | 1u << 5 | 1u << 8;
  if ((one.c & v3) != v3 || (seven.b & v3_too) != v3_too || !(extended.c & (1u << 5)) || (kept() & 0x6) != 0x6) return 0;
  // AVX-512: F, DQ, CD, BW, VL
  constexpr unsigned v4 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;
  return (seven.b & v4) == v4 && (kept() & 0xe6) == 0xe6 ? 2 : 1;
#endif
}

std::atomic<int>& level() {
  static std::atomic<int> used{highest()};
  return used;
}

}  // namespace

Kernel find(std::string_view name) {
  const int used = level();
  if (used < 0) return nullptr;
  for (size_t i = 0; i < kKernels; ++i)
    if (kLevels[used][i].name == name) return kLevels[used][i].kernel;
  return nullptr;
}

}  // namespace lutjax

// The highest level that this machine runs, from 0; -1: none.
LUTJAX_EXPORT int lutjax_cpu_highest_level() { return lutjax::highest(); }

// Uses another level from now on, for tests; returns the one used before, or -2 if this machine cannot run it.
LUTJAX_EXPORT int lutjax_cpu_use_level(int wanted) {
  return wanted < 0 || wanted >= lutjax::kCount || wanted > lutjax::highest() ? -2 : lutjax::level().exchange(wanted);
}
