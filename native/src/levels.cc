#include "levels.h"

#include <atomic>

#include "exported.h"
#include "machine.h"

namespace lutjax {

#ifdef LUTJAX_X86
namespace v2 {
extern const Named by_name[];
}
namespace v3 {
extern const Named by_name[];
}
namespace v4 {
extern const Named by_name[];
}
#else
namespace base {
extern const Named by_name[];
}
#endif

namespace {

// Null if the library was built without this level.
#ifdef LUTJAX_X86
constexpr const Named* kLevels[] = {LUTJAX_V2, LUTJAX_V3, LUTJAX_V4};
constexpr const char* kNames[] = {"x86-64-v2 (SSE4.2, POPCNT)", "x86-64-v3 (AVX2, FMA)", "x86-64-v4 (AVX-512)"};
#else
constexpr const Named* kLevels[] = {LUTJAX_BASE};
constexpr const char* kNames[] = {"that of every such CPU"};
#endif
constexpr int kCount = sizeof(kLevels) / sizeof(kLevels[0]);

bool has(int level) { return level >= 0 && level < kCount && kLevels[level] != nullptr; }

// The highest level supported by both the machine and the library; -1: none.
int highest() {
  int found = highest_level();
  while (found >= 0 && !has(found)) --found;
  return found;
}

std::atomic<int>& level() {
  static std::atomic<int> used{highest()};
  return used;
}

}  // namespace

Kernel find(std::string_view name) {
  const int used = level();
  if (used < 0) return nullptr;
  for (const Named* one = kLevels[used]; one->name != nullptr; ++one)
    if (one->name == name) return one->kernel;
  return nullptr;
}

}  // namespace lutjax

// Bit i: the library contains instruction level i.
LUTJAX_EXPORT int lutjax_cpu_levels() {
  int found = 0;
  for (int i = 0; i < lutjax::kCount; ++i) found |= lutjax::has(i) << i;
  return found;
}

// The level's name, with some of its instructions; null beyond the last level.
LUTJAX_EXPORT const char* lutjax_cpu_level_name(int level) {
  return level >= 0 && level < lutjax::kCount ? lutjax::kNames[level] : nullptr;
}

// The machine's highest instruction level, from 0; -1: none.
LUTJAX_EXPORT int lutjax_cpu_highest_level() { return lutjax::highest_level(); }

// Selects another level, for tests; returns the previous one, or -2 if the machine or the library lacks it.
LUTJAX_EXPORT int lutjax_cpu_use_level(int wanted) {
  return !lutjax::has(wanted) || wanted > lutjax::highest_level() ? -2 : lutjax::level().exchange(wanted);
}
