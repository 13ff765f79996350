// Row ids of detections.
#pragma once

#include <cmath>

#include "lanes.h"

#ifdef LUTJAX_LEVEL
namespace lutjax {
namespace {

// Transposes ids [B, T] to [T, B], clamped to existing rows, for tasks that own a table. Returns null if no memory is left.
inline const int32_t* ids_by_table(const Call& call, const Array& index, int64_t n_rows) {
  const int64_t n_samples = index.shape[0], n_tables = index.shape[1], block = 256;
  const int32_t* ids = data<const int32_t>(index);
  int32_t* found = allocated<int32_t>(call, n_samples * n_tables);
  if (found == nullptr || n_tables == 0) return found;
  const int32_t last = static_cast<int32_t>(n_rows - 1);
  in_parallel(call, (n_samples + block - 1) / block, [&](int64_t i) {
    const int64_t first = i * block, n = least(block, n_samples - first);
    transpose(ids + first * n_tables, n_tables, n, n_tables, found + first, n_samples);
    for (int64_t t = 0; t < n_tables; ++t) {
      int32_t* of = found + t * n_samples + first;
      for (int64_t b = 0; b < n; ++b) of[b] = of[b] < 0 ? 0 : of[b] > last ? last : of[b];
    }
  });
  return found;
}

// Samples per block: `wanted`, or fewer for small batches, so that threads share them.
inline int64_t samples_of_block(int64_t n_samples, int64_t wanted) { return most<int64_t>(least(n_samples / 16, wanted), 1); }

// Surrogate gradient, section 2 of the semantics.
inline float slope(float margin) {
  const float size = 1 + fabsf(margin);
  return (margin > 0 ? 0.5f : -0.5f) / (size * size);
}

// Margin cotangent from the difference between both rows; the caller scales integers.
inline void store_slope(float margin, float difference, float* to) { *to = slope(margin) * difference; }
inline void store_slope(float, int32_t difference, int32_t* to) { *to = difference; }

}  // namespace
}  // namespace lutjax
#endif
