// Counts threads and nested loop iterations, for tests.
//
// n: integers[0]. Results, int32 [2]: the number of threads; the number of (i, j) below n that a loop in a loop has visited once.
#include "kernels.h"

LUTJAX_KERNEL(threads) {
  using namespace lutjax;
  const int64_t n = call.integers[0];
  int32_t* visits = allocated<int32_t>(call, n * n);
  if (visits == nullptr) return "no memory";
  for (int64_t i = 0; i < n * n; ++i) visits[i] = 0;
  in_parallel(call, n, [&](int64_t i) { in_parallel(call, n, [&](int64_t j) { ++visits[i * n + j]; }); });
  int32_t* results = data<int32_t>(call.outputs[0]);
  results[0] = static_cast<int32_t>(call.pool.n_threads);
  results[1] = 0;
  for (int64_t i = 0; i < n * n; ++i) results[1] += visits[i] == 1;
  return nullptr;
}
