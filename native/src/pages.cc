#include "pages.h"

#include <cstdint>
#include <mutex>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace lutjax {

#ifdef __linux__
namespace {

constexpr size_t kLarge = size_t{64} << 20;    // smaller tables need few pages
constexpr uintptr_t kPage = uintptr_t{2} << 20;
constexpr int kSteps = 3;                      // after which memory is taken to stay: a copy for each step moves on
constexpr int kTables = 1024;                  // that are remembered; later ones stay as they are
#ifndef MADV_COLLAPSE
constexpr int MADV_COLLAPSE = 25;  // Linux 6.1; an older one refuses it
#endif

struct Table {
  uintptr_t at;
  size_t bytes;
  int steps;
};

}  // namespace

void updated_in_place(void* table, size_t bytes) {
  if (bytes < kLarge) return;
  static std::mutex mutex;
  static Table tables[kTables];
  static int n = 0;
  const uintptr_t at = reinterpret_cast<uintptr_t>(table);
  {
    std::lock_guard<std::mutex> lock(mutex);
    int i = 0;
    while (i < n && (tables[i].at != at || tables[i].bytes != bytes)) ++i;
    if (i == kTables) return;
    if (i == n) tables[n++] = Table{at, bytes, 0};
    if (tables[i].steps >= kSteps || ++tables[i].steps < kSteps) return;  // once
  }
  const uintptr_t first = (at + kPage - 1) / kPage * kPage, end = (at + bytes) / kPage * kPage;
  void* const pages = reinterpret_cast<void*>(first);
  // If the system refuses, the memory stays unchanged.
  if (madvise(pages, end - first, MADV_HUGEPAGE) == 0) madvise(pages, end - first, MADV_COLLAPSE);
}
#else
void updated_in_place(void*, size_t) {}
#endif

}  // namespace lutjax
