// Two-input gates: y = c0 + c1 a + c2 b + c3 a b, with a, b = x[wires].
//
// x: [I, B]. coefficients: [4, G]. wires: [G, 2], clamped. Threads share the gates, and backward also the inputs.
//
// dcoefficients = dy, dy a, dy b, dy a b, summed over samples; dx[i] = sum over the wires that read i: dy (c1 + c3 b) or dy (c2 + c3 a).
#include "wires.h"

namespace lutjax {
namespace {

template <class X>
struct Gates {
  explicit Gates(const Call& call)
      : n_inputs(call.inputs[0].shape[0]), batch(call.inputs[0].shape[1]), n_gates(call.inputs[2].shape[0]),
        x(data<const X>(call.inputs[0])), c(data<const float>(call.inputs[1])), wires{data<const int32_t>(call.inputs[2]), n_gates, 2, n_inputs} {}

  const X* row(int64_t wire) const { return x + wires.input(wire) * batch; }

  const int64_t n_inputs, batch, n_gates;
  const X* const x;
  const float* const c;
  const Wires wires;
};

template <class X>
const char* forward(const Call& call) {
  const Gates<X> of(call);
  X* y = data<X>(call.outputs[0]);
  for_gates(call, of.wires, of.batch, 1, y, [&](auto past, int64_t g) {
    const X *a = of.row(2 * g), *b = of.row(2 * g + 1);
    X* to = y + g * of.batch;
    const float c0 = of.c[g], c1 = of.c[of.n_gates + g], c2 = of.c[2 * of.n_gates + g], c3 = of.c[3 * of.n_gates + g];
    in_lanes(0, of.batch, [&](auto lanes, int64_t j) {
      using V = decltype(lanes);
      const V of_a = read<V>(a + j), of_b = read<V>(b + j);
      put<decltype(past)::value>(broadcast<V>(c0) + broadcast<V>(c1) * of_a + (broadcast<V>(c2) + broadcast<V>(c3) * of_a) * of_b, to + j);
    });
  });
  return nullptr;
}

// integers: whether to compute dx and dcoefficients; outputs: the requested ones, in this order.
template <class X>
const char* backward(const Call& call) {
  const Gates<X> of(call);
  const float* dy = data<const float>(call.inputs[3]);
  const bool of_x = call.integers[0] != 0, of_c = call.integers[1] != 0;
  float* dx = of_x ? data<float>(call.outputs[0]) : nullptr;
  float* dc = of_c ? data<float>(call.outputs[of_x]) : nullptr;
  const auto sums = [&](int64_t g) {
    const X *a = of.row(2 * g), *b = of.row(2 * g + 1);
    const float* d = dy + g * of.batch;
    Sum s0, s1, s2, s3;
    in_lanes(0, of.batch, [&](auto lanes, int64_t j) {
      using V = decltype(lanes);
      const V of_b = read<V>(b + j), of_y = read<V>(d + j), with_a = of_y * read<V>(a + j);
      s0.add(of_y);
      s1.add(with_a);
      s2.add(of_y * of_b);
      s3.add(with_a * of_b);
    });
    dc[g] = s0.total(), dc[of.n_gates + g] = s1.total(), dc[2 * of.n_gates + g] = s2.total(), dc[3 * of.n_gates + g] = s3.total();
  };
  const auto addend = [&](int64_t wire) {
    const int64_t g = wire / 2;
    const float slope = of.c[(1 + wire % 2) * of.n_gates + g], c3 = of.c[3 * of.n_gates + g];
    return [=, d = dy + g * of.batch, other = of.row(wire ^ 1)](auto lanes, int64_t j) {
      using V = decltype(lanes);
      return read<V>(d + j) * (broadcast<V>(slope) + broadcast<V>(c3) * read<V>(other + j));
    };
  };
  return cotangents<X>(call, of.wires, dx, of.batch, of_c, 2, addend, sums);
}

}  // namespace
}  // namespace lutjax

LUTJAX_KERNEL(bilinear_gates_forward) {
  using namespace lutjax;
  return call.inputs[0].type == Type::bfloat16 ? forward<bfloat16>(call) : forward<float>(call);
}

LUTJAX_KERNEL(bilinear_gates_backward) {
  using namespace lutjax;
  return call.inputs[0].type == Type::bfloat16 ? backward<bfloat16>(call) : backward<float>(call);
}
