#include "machine.h"

#if defined(LUTJAX_X86) && defined(_MSC_VER)
#include <intrin.h>
#include <immintrin.h>
#elif defined(LUTJAX_X86)
#include <cpuid.h>
#endif

namespace lutjax {
namespace {

#ifdef LUTJAX_X86
struct Registers {
  unsigned a, b, c, d;
};

// CPUID results; zeros for unknown leaves.
Registers cpuid_leaf(unsigned leaf) {
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

// Vector registers that the operating system saves on a context switch.
unsigned saved_registers() {
#ifdef _MSC_VER
  return static_cast<unsigned>(_xgetbv(0));
#else
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
#endif
}
#endif

}  // namespace

// Instruction levels as defined by the System V ABI.
int highest_level() {
#ifndef LUTJAX_X86
  return 0;
#else
  const Registers one = cpuid_leaf(1), seven = cpuid_leaf(7), extended = cpuid_leaf(0x80000001u);
  // CMPXCHG16B, SSE3, SSSE3, SSE4.1, SSE4.2, POPCNT; LAHF
  constexpr unsigned v2 = 1u << 13 | 1u << 0 | 1u << 9 | 1u << 19 | 1u << 20 | 1u << 23;
  if ((one.c & v2) != v2 || !(extended.c & 1)) return -1;
  // FMA, MOVBE, OSXSAVE, AVX, F16C; BMI1, AVX2, BMI2; LZCNT
  constexpr unsigned v3 = 1u << 12 | 1u << 22 | 1u << 27 | 1u << 28 | 1u << 29, v3_too = 1u << 3 | 1u << 5 | 1u << 8;
  if ((one.c & v3) != v3 || (seven.b & v3_too) != v3_too || !(extended.c & (1u << 5)) || (saved_registers() & 0x6) != 0x6) return 0;
  // AVX-512: F, DQ, CD, BW, VL
  constexpr unsigned v4 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;
  return (seven.b & v4) == v4 && (saved_registers() & 0xe6) == 0xe6 ? 2 : 1;
#endif
}

}  // namespace lutjax
