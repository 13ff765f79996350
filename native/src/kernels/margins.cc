// All pairwise input differences.
//
//   u[b, t, c] = x[b, g, a[t, c]] - x[b, g, b[t, c]];   dx[a] += du;   dx[b] -= du
//
// x: [n, H, I], u: [n, T, C]; anchors: [T, C, 2], or [T, C] for single inputs. A task owns some samples.
#include "lanes.h"

namespace lutjax {
namespace {

constexpr int64_t kSamples = 16;

struct Comparisons {
  int64_t n, width, per_sample, n_inputs;  // width: H * I
  bool pairs;
  const int32_t* end;  // places in a sample's inputs
};

// integers: groups. x_shape: shape of x.
const char* prepared(const Call& call, const int64_t* x_shape, const Array& anchors, Comparisons* of) {
  const int64_t groups = call.integers[0], ends = anchors.rank == 3 ? 2 : 1;
  const int64_t n_inputs = x_shape[2], each = anchors.shape[0] / most<int64_t>(groups, 1), per_table = anchors.shape[1] * ends;
  const int64_t count = anchors.shape[0] * per_table;
  int32_t* end = allocated<int32_t>(call, count);
  if (end == nullptr) return "no memory is left";
  for (int64_t i = 0; i < count; ++i) {
    const int64_t group = x_shape[1] == 1 ? 0 : i / per_table / each;
    const int64_t id = clamped<int64_t>(data<const int32_t>(anchors)[i], most<int64_t>(n_inputs, 1));
    end[i] = static_cast<int32_t>(group * n_inputs + id);
  }
  *of = {x_shape[0], x_shape[1] * n_inputs, anchors.shape[0] * anchors.shape[1], n_inputs, ends == 2, end};
  return nullptr;
}

template <class Body>
void for_samples(const Call& call, const Comparisons& c, const Body& body) {
  in_parallel(call, (c.n + kSamples - 1) / kSamples, [&](int64_t i) {
    for (int64_t b = i * kSamples; b < least((i + 1) * kSamples, c.n); ++b) body(b);
  });
}

template <class How>
void backward(const Call& call, const Comparisons& c, const How& how) {
  using Sum = typename How::Sum;
  using Part = typename How::Part;
  const float* of = data<const float>(call.inputs[1]);
  Sum* to = data<Sum>(call.outputs[0]);
  for_samples(call, c, [&](int64_t b) {
    const float* du = of + b * c.per_sample;
    Sum* dx = to + b * c.width;
    for (int64_t i = 0; i < c.width; ++i) dx[i] = 0;
    if (c.n_inputs == 0) return;
    for (int64_t i = 0; i < c.per_sample; ++i) {
      const Part addend = how.addend(du[i]);
      Sum& first = dx[c.end[c.pairs ? 2 * i : i]];
      first = static_cast<Sum>(static_cast<Part>(first) + addend);
      if (c.pairs) {
        Sum& second = dx[c.end[2 * i + 1]];
        second = static_cast<Sum>(static_cast<Part>(second) - addend);
      }
    }
  });
}

}  // namespace
}  // namespace lutjax

LUTJAX_KERNEL(margins_forward) {
  using namespace lutjax;
  Comparisons c;
  if (const char* wrong = prepared(call, call.inputs[0].shape, call.inputs[1], &c)) return wrong;
  const float* inputs = data<const float>(call.inputs[0]);
  float* outputs = data<float>(call.outputs[0]);
  for_samples(call, c, [&](int64_t b) {
    const float* x = inputs + b * c.width;
    float* u = outputs + b * c.per_sample;
    if (c.n_inputs == 0)
      for (int64_t i = 0; i < c.per_sample; ++i) u[i] = 0;
    else if (c.pairs)
      for (int64_t i = 0; i < c.per_sample; ++i) u[i] = x[c.end[2 * i]] - x[c.end[2 * i + 1]];
    else
      for (int64_t i = 0; i < c.per_sample; ++i) u[i] = x[c.end[i]];
  });
  return nullptr;
}

// Inputs: anchors, and the cotangent of u. Integers: groups, fixed point. Numbers: its scale.
LUTJAX_KERNEL(margins_backward) {
  using namespace lutjax;
  Comparisons c;
  if (const char* wrong = prepared(call, call.outputs[0].shape, call.inputs[0], &c)) return wrong;
  if (call.integers[1] != 0)
    backward(call, c, InIntegers{static_cast<float>(call.numbers[0])});
  else
    backward(call, c, InFloats{});
  return nullptr;
}
