#include "levels.h"

#include <atomic>

#if defined(LUTJAX_X86) && defined(_MSC_VER)
#include <intrin.h>
#include <immintrin.h>
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

// The highest level that this machine can run; -1: not even the first.
int highest() {
#if !defined(LUTJAX_X86)
  return 0;
#elif defined(_MSC_VER)
  int of[4];
  __cpuid(of, 1);
  const bool saves = of[2] & (1 << 27);
  const bool v2 = (of[2] & (1 << 20)) && (of[2] & (1 << 23));  // SSE4.2, POPCNT
  const bool fma = of[2] & (1 << 12), f16c = of[2] & (1 << 29);
  __cpuidex(of, 7, 0);
  const bool avx2 = (of[1] & (1 << 5)) && (of[1] & (1 << 3)) && (of[1] & (1 << 8));  // AVX2, BMI1, BMI2
  const unsigned wide = (1u << 16) | (1u << 17) | (1u << 28) | (1u << 30) | (1u << 31);  // AVX-512 F, DQ, CD, BW, VL
  const bool avx512 = (static_cast<unsigned>(of[1]) & wide) == wide;
  const unsigned long long kept = saves ? _xgetbv(0) : 0;
  if (!v2) return -1;
  if (!(avx2 && fma && f16c && (kept & 6) == 6)) return 0;
  return avx512 && (kept & 0xe6) == 0xe6 ? 2 : 1;
#else
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt"))) return -1;
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
        __builtin_cpu_supports("bmi2")))
    return 0;
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
             ? 2
             : 1;
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

#ifdef _WIN32
#define LUTJAX_EXPORT extern "C" __declspec(dllexport)
#else
#define LUTJAX_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// The highest level that this machine runs, from 0; -1: none.
LUTJAX_EXPORT int lutjax_cpu_highest_level() { return lutjax::highest(); }

// Uses another level from now on, for tests; returns the one used before, or -2 if this machine cannot run it.
LUTJAX_EXPORT int lutjax_cpu_use_level(int wanted) {
  return wanted < 0 || wanted >= lutjax::kCount || wanted > lutjax::highest() ? -2 : lutjax::level().exchange(wanted);
}
