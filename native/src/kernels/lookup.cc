// Sums of rows that detectors address.
//
// index: ids [B, T], clamped. weights: [T, R, O]. groups: G. Samples and outputs are divided into blocks, which threads share.
#include "rules.h"

namespace lutjax {
namespace {

constexpr int64_t kSamples = 64;  // of a block: its ids and sums stay in the cache

template <class W>
void forward(const Call& call) {
  const Array &weights = call.inputs[0], &index = call.inputs[1];
  const int64_t n_tables = weights.shape[0], n_rows = weights.shape[1], n_outputs = weights.shape[2];
  const int64_t n_samples = index.shape[0], groups = call.integers[0], each = n_tables / groups;
  const W* w = data<const W>(weights);
  const int32_t* ids = data<const int32_t>(index);
  float* y = data<float>(call.outputs[0]);
  const int64_t n_blocks = (n_samples + kSamples - 1) / kSamples;
  in_parallel(call, n_blocks * groups, [&](int64_t i) {
    const int64_t g = i % groups, first = i / groups * kSamples, last = least(first + kSamples, n_samples);
    for (int64_t b = first; b < last; ++b) {
      float* sums = y + (b * groups + g) * n_outputs;
      for (int64_t o = 0; o < n_outputs; ++o) sums[o] = 0;
    }
    for (int64_t t = g * each; t < (g + 1) * each; ++t)
      for (int64_t b = first; b < last; ++b) {
        const int64_t row = clamped<int64_t>(ids[b * n_tables + t], n_rows);
        const W* from = w + (t * n_rows + row) * n_outputs;
        float* sums = y + (b * groups + g) * n_outputs;
        for (int64_t o = 0; o < n_outputs; ++o) sums[o] += value(from[o]);
      }
  });
}

template <class D>
const char* update(const Call& call) {
  const Update u(call);
  const Array &index = u.inputs[0], &cotangent = u.inputs[1];
  const int64_t n_tables = u.weights.shape[0], n_rows = u.weights.shape[1], n_outputs = u.weights.shape[2];
  const int64_t n_samples = index.shape[0], groups = u.integers[0], each = n_tables / groups, width = groups * n_outputs;
  const int32_t* ids = data<const int32_t>(index);
  const D* dy = data<const D>(cotangent);
  return move_rows(
      call, u, n_samples, [=](int64_t t, int64_t b) -> int64_t { return clamped<int64_t>(ids[b * n_tables + t], n_rows); },
      [=](const auto& how, int64_t t, const Hit* hits, int64_t n, auto* sums) {
        const D* of_group = dy + t / each * n_outputs;
        add_rows(how, n, [=](int64_t i) { return of_group + hits[i].number * width; }, n_outputs, sums);
      });
}

}  // namespace
}  // namespace lutjax

LUTJAX_KERNEL(lookup_forward) {
  using namespace lutjax;
  switch (call.inputs[0].type) {
    case Type::float32: forward<float>(call); return nullptr;
    case Type::bfloat16: forward<bfloat16>(call); return nullptr;
    default: return "weights must be float32 or bfloat16";
  }
}

LUTJAX_KERNEL(lookup_update) {
  using namespace lutjax;
  switch (Update(call).inputs[1].type) {
    case Type::float32: return update<float>(call);
    case Type::bfloat16: return update<bfloat16>(call);
    default: return "cotangents must be float32 or bfloat16";
  }
}
