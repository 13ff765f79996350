// Row copies by id, from tables of any size.
//
// Inputs: tables [T, R, O] of any type, ids int32 [B, T, K]. Output [T, B * K, O]: for each table the first element's rows, then the next one's.
#include <cstring>

#include "kernels.h"

namespace {

constexpr int64_t kBlock = 256;  // reads of a task
constexpr int64_t kAhead = 16;   // rows that are asked for before they are copied

int64_t bytes_of(lutjax::Type type) {
  using lutjax::Type;
  switch (type) {
    case Type::float64: return 8;
    case Type::int32: case Type::uint32: case Type::float32: return 4;
    case Type::float16: case Type::bfloat16: return 2;
    default: return 1;
  }
}

}  // namespace

LUTJAX_KERNEL(gather_rows) {
  using namespace lutjax;
  const Array &tables = call.inputs[0], &ids = call.inputs[1];
  const int64_t n_tables = tables.shape[0], n_rows = tables.shape[1], bytes = tables.shape[2] * bytes_of(tables.type);
  const int64_t n = ids.shape[0], ways = ids.shape[2], reads = n * ways, blocks = (reads + kBlock - 1) / kBlock;
  const int32_t* index = data<const int32_t>(ids);
  const char* from = data<const char>(tables);
  char* to = data<char>(call.outputs[0]);
  in_parallel(call, n_tables * blocks, [&](int64_t task) {
    const int64_t t = task / blocks, first = task % blocks * kBlock, last = least(reads, first + kBlock);
    const auto row = [&](int64_t i) {
      const int64_t id = clamped<int64_t>(index[(i / ways * n_tables + t) * ways + i % ways], n_rows);
      return from + (t * n_rows + id) * bytes;
    };
    for (int64_t i = first; i < least(last, first + kAhead); ++i)
      for (int64_t at = 0; at < bytes; at += 64) prefetch(row(i) + at);
    for (int64_t i = first; i < last; ++i) {
      if (i + kAhead < last)
        for (int64_t at = 0; at < bytes; at += 64) prefetch(row(i + kAhead) + at);
      std::memcpy(to + (t * reads + i) * bytes, row(i), static_cast<size_t>(bytes));
    }
  });
  return nullptr;
}
