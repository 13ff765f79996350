// Tables over bits: y = table[address], where bits may lie between 0 and 1 (soft), are signs (binary), or words of 32 bits (packed).
//
// x: [I, B]. table: [G, 2^n], n from 1 to 8. wires: [G, n], clamped. Threads share the gates, and backward also the inputs.
//
// Soft: y = sum_k table[k] prod_l (x_l if bit l of k else 1 - x_l), by 2^n - 1 interpolations. dtable[k] = sum over samples of dy times that
// product; dx_l = dy times the same of n - 1 inputs, with the table's differences along bit l. Binary: bit l is x_l > 0; dtable[address] += dy;
// dx is half of the soft one at 3/4 in place of bits that are 1, 1/4 of those that are 0. Packed: bitwise.
#include "wires.h"

namespace lutjax {
namespace {

struct Soft {
  static constexpr bool kFetched = false;
  static constexpr float kFactor = 1;
  template <class V>
  static V mix(V zero, V one, V x) { return zero + x * (one - zero); }
  template <class V>
  static V softened(V x) { return x; }
  template <class V>
  static V of_zero(V dy, V x) { return dy * (broadcast<V>(1) - x); }
  template <class V>
  static V of_one(V dy, V x) { return dy * x; }
};

struct Binary {
  static constexpr bool kFetched = true;
  static constexpr float kFactor = 0.5f;
  template <class V>
  static V mix(V zero, V one, V x) { return select(x > 0.0f, one, zero); }
  template <class V>
  static V softened(V x) { return select(x > 0.0f, broadcast<V>(0.75f), broadcast<V>(0.25f)); }
  template <class V>
  static V of_zero(V dy, V x) { return select(x > 0.0f, broadcast<V>(0), dy); }
  template <class V>
  static V of_one(V dy, V x) { return select(x > 0.0f, dy, broadcast<V>(0)); }
};

struct Packed {
  template <class V>
  static V mix(V zero, V one, V x) { return (x & one) | (~x & zero); }
};

// Address bits whose slots are interpolated in registers.
constexpr int kLow = 4;

// The slot that inputs address, or what lies between slots: the lowest bit first.
template <class Kind, int n, class V, class T>
V interpolate(const T* slots, const V* x) {
  if constexpr (n == 0) {
    return broadcast<V>(slots[0]);
  } else if constexpr (n > kLow) {
    V of[1 << (n - kLow)];
    for (int k = 0; k < 1 << (n - kLow); ++k) of[k] = interpolate<Kind, kLow>(slots + (k << kLow), x);
    for (int place = kLow; place < n; ++place)
      for (int k = 0; k < 1 << (n - 1 - place); ++k) of[k] = Kind::mix(of[2 * k], of[2 * k + 1], x[place]);
    return of[0];
  } else {
    V of[1 << (n - 1)];
    for (int k = 0; k < 1 << (n - 1); ++k) of[k] = Kind::mix(broadcast<V>(slots[2 * k]), broadcast<V>(slots[2 * k + 1]), x[0]);
    for (int place = 1; place < n; ++place)
      for (int k = 0; k < 1 << (n - 1 - place); ++k) of[k] = Kind::mix(of[2 * k], of[2 * k + 1], x[place]);
    return of[0];
  }
}

// The slots addressed by several samples: long tables are gathered, short ones selected.
template <int n, class V>
void fetch(const float* slots, const V* x, float* to) {
  Lanes<int32_t, sizeof(V) / 4> address{};
  for (int place = 0; place < n; ++place) address = address | ((x[place] > 0.0f) & (1 << place));
  for (int i = 0; i < static_cast<int>(sizeof(V) / 4); ++i) to[i] = slots[address[i]];
}

template <class X, int n>
struct Tables {
  explicit Tables(const Call& call)
      : n_inputs(call.inputs[0].shape[0]), batch(call.inputs[0].shape[1]), n_gates(call.inputs[2].shape[0]),
        x(data<const X>(call.inputs[0])), wires{data<const int32_t>(call.inputs[2]), n_gates, n, n_inputs} {}

  void rows(int64_t g, const X** of) const {
    for (int place = 0; place < n; ++place) of[place] = x + wires.input(n * g + place) * batch;
  }

  const int64_t n_inputs, batch, n_gates;
  const X* const x;
  const Wires wires;
};

template <int n, class V, class X>
void read_places(const X* const* rows, int64_t j, V* x) {
  for (int place = 0; place < n; ++place) x[place] = read<V>(rows[place] + j);
}

template <class Kind, int n>
const char* forward(const Call& call) {
  const Tables<float, n> of(call);
  const float* table = data<const float>(call.inputs[1]);
  float* y = data<float>(call.outputs[0]);
  for_gates(call, of.wires, of.batch, n > 2 ? 1 << (n - 2) : 1, y, [&](auto past, int64_t g) {
    const float* rows[n];
    of.rows(g, rows);
    const float* slots = table + (g << n);
    float* to = y + g * of.batch;
    in_lanes<float, decltype(past)::value>(0, of.batch, [&](auto lanes, int64_t j) {
      using V = decltype(lanes);
      V x[n];
      read_places<n>(rows, j, x);
      if constexpr (n > kLow && Kind::kFetched)
        fetch<n>(slots, x, to + j);
      else
        put<decltype(past)::value>(interpolate<Kind, n>(slots, x), to + j);
    });
  });
  return nullptr;
}

template <int n>
const char* packed(const Call& call) {
  const Tables<uint32_t, n> of(call);
  const uint8_t* truth = data<const uint8_t>(call.inputs[1]);
  uint32_t* y = data<uint32_t>(call.outputs[0]);
  for_gates(call, of.wires, of.batch, n > 2 ? 1 << (n - 3) : 1, y, [&](auto past, int64_t g) {
    const uint32_t* rows[n];
    of.rows(g, rows);
    uint32_t slots[1 << n];
    for (int k = 0; k < 1 << n; ++k) slots[k] = truth[(g << n) + k] != 0 ? ~uint32_t{0} : 0;
    uint32_t* to = y + g * of.batch;
    in_lanes<uint32_t, decltype(past)::value>(0, of.batch, [&](auto words, int64_t j) {
      using V = decltype(words);
      V x[n];
      read_places<n>(rows, j, x);
      put<decltype(past)::value>(interpolate<Packed, n>(slots, x), to + j);
    });
  });
  return nullptr;
}

// The cotangent of a wire's input.
template <class Kind, int n>
struct Slopes {
  const float* dy;
  const float* others[n];
  float differences[1 << (n - 1)];

  template <class V>
  V operator()(V, int64_t j) const {
    V x[n];
    for (int place = 0; place + 1 < n; ++place) x[place] = Kind::softened(read<V>(others[place] + j));
    return broadcast<V>(Kind::kFactor) * read<V>(dy + j) * interpolate<Soft, n - 1>(differences, x);
  }
};

// integers: n, whether to compute dx and dtable; outputs: the requested ones, in this order.
template <class Kind, int n>
const char* backward(const Call& call) {
  const Tables<float, n> of(call);
  const float *table = data<const float>(call.inputs[1]), *dy = data<const float>(call.inputs[3]);
  const bool of_x = call.integers[1] != 0, of_table = call.integers[2] != 0;
  float* dx = of_x ? data<float>(call.outputs[0]) : nullptr;
  float* dtable = of_table ? data<float>(call.outputs[of_x]) : nullptr;
  const auto of_gate = [&](int64_t g) {
    const float* rows[n];
    of.rows(g, rows);
    const float* d = dy + g * of.batch;
    Sum sums[1 << n];
    in_lanes(0, of.batch, [&](auto lanes, int64_t j) {
      using V = decltype(lanes);
      V x[n], shares[1 << n];
      read_places<n>(rows, j, x);
      shares[0] = read<V>(d + j);
      for (int place = n - 1; place >= 0; --place)
        for (int k = (1 << (n - 1 - place)) - 1; k >= 0; --k) {
          const V share = shares[k];
          shares[2 * k] = Kind::of_zero(share, x[place]);
          shares[2 * k + 1] = Kind::of_one(share, x[place]);
        }
      for (int k = 0; k < 1 << n; ++k) sums[k].add(shares[k]);
    });
    for (int k = 0; k < 1 << n; ++k) dtable[(g << n) + k] = sums[k].total();
  };
  const auto addend = [&](int64_t wire) {
    Slopes<Kind, n> slopes;
    const int64_t g = wire / n, bit = int64_t{1} << wire % n;
    slopes.dy = dy + g * of.batch;
    of.rows(g, slopes.others);
    for (int64_t place = wire % n; place + 1 < n; ++place) slopes.others[place] = slopes.others[place + 1];
    int64_t found = 0;
    for (int64_t k = 0; k < 1 << n; ++k)
      if ((k & bit) == 0) slopes.differences[found++] = table[(g << n) + k + bit] - table[(g << n) + k];
    return slopes;
  };
  const int64_t cost = n << (n > 2 ? n - 2 : 0);
  return cotangents<float>(call, of.wires, dx, of.batch, of_table, cost, addend, of_gate);
}

}  // namespace
}  // namespace lutjax

// integers[0]: n.
#define LUTJAX_BY_BITS(of)                          \
  using namespace lutjax;                           \
  switch (call.integers[0]) {                       \
    case 1: return of(1);                           \
    case 2: return of(2);                           \
    case 3: return of(3);                           \
    case 4: return of(4);                           \
    case 5: return of(5);                           \
    case 6: return of(6);                           \
    case 7: return of(7);                           \
    case 8: return of(8);                           \
    default: return "tables must be of 1 to 8 bits"; \
  }
#define LUTJAX_SOFT_FORWARD(n) forward<Soft, n>(call)
#define LUTJAX_SOFT_BACKWARD(n) backward<Soft, n>(call)
#define LUTJAX_BINARY_FORWARD(n) forward<Binary, n>(call)
#define LUTJAX_BINARY_BACKWARD(n) backward<Binary, n>(call)
#define LUTJAX_PACKED(n) packed<n>(call)

LUTJAX_KERNEL(soft_lut_forward) { LUTJAX_BY_BITS(LUTJAX_SOFT_FORWARD) }
LUTJAX_KERNEL(soft_lut_backward) { LUTJAX_BY_BITS(LUTJAX_SOFT_BACKWARD) }
LUTJAX_KERNEL(binary_lut_forward) { LUTJAX_BY_BITS(LUTJAX_BINARY_FORWARD) }
LUTJAX_KERNEL(binary_lut_backward) { LUTJAX_BY_BITS(LUTJAX_BINARY_BACKWARD) }
LUTJAX_KERNEL(packed_lut_forward) { LUTJAX_BY_BITS(LUTJAX_PACKED) }
