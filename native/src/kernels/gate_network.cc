// Gate networks: each gate reads inputs or earlier gates, y = c0 + c1 a + c2 b + c3 a b, and the last gates are the outputs.
//
// x: [I, B]. coefficients: [4, G]. wires: [G, 2], rows of inputs and then of gates: gate g reads rows below I + g; others are clamped.
// Outputs: [O, B].
//
// All gates are evaluated for one sample block, whose values stay in the cache; backward evaluates them again, and then visits the
// gates from last to first. Threads share blocks. Tasks sum over the samples of some blocks; the batch size determines their number,
// and their sums are added in order.
#include "rules.h"

namespace lutjax {
namespace {

constexpr int kBlock = 64;  // samples; several vectors, so that coefficients are not read for each
constexpr int64_t kMostSums = 64;  // tasks that have sums of their own

struct Network {
  explicit Network(const Call& call)
      : n_inputs(call.inputs[0].shape[0]), batch(call.inputs[0].shape[1]), n_gates(call.inputs[2].shape[0]),
        n_outputs(call.outputs[0].shape[0]), x(data<const float>(call.inputs[0])), c(data<const float>(call.inputs[1])),
        wires(data<const int32_t>(call.inputs[2])) {}

  int64_t n_blocks() const { return (batch + kBlock - 1) / kBlock; }
  int64_t n_rows() const { return n_inputs + n_gates; }
  int64_t source(int64_t wire) const { return clamped<int64_t>(wires[wire], n_inputs + wire / 2); }
  int64_t samples(int64_t block) const { return least<int64_t>(kBlock, batch - block * kBlock); }

  // Copies a block's rows [n, B] to [n, kBlock], with zeros for missing samples; and back.
  void gather(const float* from, int64_t n, int64_t block, float* to) const {
    const int64_t there = samples(block);
    for (int64_t i = 0; i < n; ++i) {
      std::memcpy(to + i * kBlock, from + i * batch + block * kBlock, static_cast<size_t>(there) * sizeof(float));
      for (int64_t j = there; j < kBlock; ++j) to[i * kBlock + j] = 0;
    }
  }
  void scatter(const float* from, int64_t n, int64_t block, float* to) const {
    for (int64_t i = 0; i < n; ++i)
      std::memcpy(to + i * batch + block * kBlock, from + i * kBlock, static_cast<size_t>(samples(block)) * sizeof(float));
  }

  // Input and gate values, [I + G, kBlock].
  void evaluate(int64_t block, float* values) const {
    gather(x, n_inputs, block, values);
    float* to = values + n_inputs * kBlock;
    for (int64_t g = 0; g < n_gates; ++g, to += kBlock) {
      const float *a = values + source(2 * g) * kBlock, *b = values + source(2 * g + 1) * kBlock;
      const Floats c0 = splat(c[g]), c1 = splat(c[n_gates + g]), c2 = splat(c[2 * n_gates + g]), c3 = splat(c[3 * n_gates + g]);
      for (int j = 0; j < kBlock; j += kLanes) {
        const Floats of_a = load(a + j), of_b = load(b + j);
        store(c0 + c1 * of_a + (c2 + c3 * of_a) * of_b, to + j);
      }
    }
  }

  int64_t n_inputs, batch, n_gates, n_outputs;
  const float *x, *c;
  const int32_t* wires;
};

// Backward step per gate, the same for all blocks.
struct Way {
  uint8_t* reached;  // [I + G], whether a row has a cotangent
  uint8_t* adds;     // [2 G], whether a wire adds to the cotangent of its row: the first one that comes there sets it

  bool make(const Call& call, const Network& of) {
    reached = allocated<uint8_t>(call, of.n_rows());
    adds = allocated<uint8_t>(call, 2 * of.n_gates);
    if (reached == nullptr || adds == nullptr) return false;
    const int64_t n_silent = of.n_rows() - of.n_outputs;
    std::memset(reached, 0, static_cast<size_t>(n_silent));
    std::memset(reached + n_silent, 1, static_cast<size_t>(of.n_outputs));
    for (int64_t g = of.n_gates - 1; g >= 0; --g) {
      if (reached[of.n_inputs + g] == 0) continue;
      for (int64_t wire = 2 * g; wire < 2 * g + 2; ++wire) {
        const int64_t row = of.source(wire);
        adds[wire] = reached[row];
        reached[row] = 1;
      }
    }
    return true;
  }
};

// Cotangents of the rows of a block, [I + G, kBlock], of which the outputs have theirs; sums over its samples are added to
// `sums`, [G, 4] up to whole vectors, or are put there.
inline void go_back(const Network& of, const Way& way, const float* values, float* cotangents, bool first, float* sums) {
  constexpr int together = kLanes / 4;
  alignas(64) float parts[kLanes][kLanes] = {};
  for (int64_t g = of.n_gates - 1; g >= 0; --g) {
    float(*part)[kLanes] = parts + g % together * 4;
    Floats s0{}, s1{}, s2{}, s3{};
    if (way.reached[of.n_inputs + g] != 0) {
      const int64_t row_a = of.source(2 * g) * kBlock, row_b = of.source(2 * g + 1) * kBlock;
      const float *a = values + row_a, *b = values + row_b, *dy = cotangents + (of.n_inputs + g) * kBlock;
      float *da = cotangents + row_a, *db = cotangents + row_b;
      const Ints keep_a = splat(-static_cast<int32_t>(way.adds[2 * g])), keep_b = splat(-static_cast<int32_t>(way.adds[2 * g + 1]));
      const Floats c1 = splat(of.c[of.n_gates + g]), c2 = splat(of.c[2 * of.n_gates + g]), c3 = splat(of.c[3 * of.n_gates + g]);
      for (int j = 0; j < kBlock; j += kLanes) {
        const Floats of_a = load(a + j), of_b = load(b + j), of_y = load(dy + j), with_a = of_y * of_a;
        s0 += of_y;
        s1 += with_a;
        s2 += of_y * of_b;
        s3 += with_a * of_b;
        store(as_float(bits(load(da + j)) & keep_a) + of_y * (c1 + c3 * of_b), da + j);
        store(as_float(bits(load(db + j)) & keep_b) + of_y * (c2 + c3 * of_a), db + j);
      }
    }
    store(s0, part[0]), store(s1, part[1]), store(s2, part[2]), store(s3, part[3]);
    if (g % together == 0) {
      float* to = sums + 4 * g;
      const Floats of_block = sums_of(parts[0]);
      store(first ? of_block : load(to) + of_block, to);
    }
  }
}

const char* backward(const Call& call) {
  Network of(call);
  if (of.n_inputs == 0) return "gates without inputs";
  const float* dy = data<const float>(call.inputs[3]);
  of.n_outputs = call.inputs[3].shape[0];
  float *dx = data<float>(call.outputs[0]), *dc = data<float>(call.outputs[1]);
  Way way{};
  const int64_t n_blocks = of.n_blocks(), each = (n_blocks + kMostSums - 1) / kMostSums, n_tasks = each > 0 ? (n_blocks + each - 1) / each : 0;
  const int64_t size = (4 * of.n_gates + kLanes - 1) / kLanes * kLanes;
  float* sums = allocated<float>(call, most<int64_t>(n_tasks, 1) * size);
  if (sums == nullptr || !way.make(call, of)) return "no memory is left";
  const bool done = in_parallel_with(call, n_tasks, 2 * of.n_rows() * kBlock * static_cast<int64_t>(sizeof(float)), [&](int64_t task, char* scratch) {
    float *values = reinterpret_cast<float*>(scratch), *cotangents = values + of.n_rows() * kBlock;
    for (int64_t block = task * each; block < least(task * each + each, n_blocks); ++block) {
      of.evaluate(block, values);
      of.gather(dy, of.n_outputs, block, cotangents + (of.n_rows() - of.n_outputs) * kBlock);
      go_back(of, way, values, cotangents, block == task * each, sums + task * size);
      for (int64_t i = 0; i < of.n_inputs; ++i)
        if (way.reached[i] == 0) std::memset(cotangents + i * kBlock, 0, kBlock * sizeof(float));
      of.scatter(cotangents, of.n_inputs, block, dx);
    }
  });
  if (!done) return "no memory is left";
  for (int64_t g = 0; g < of.n_gates; ++g)
    for (int64_t k = 0; k < 4; ++k) {
      float sum = 0;
      for (int64_t task = 0; task < n_tasks; ++task) sum += sums[task * size + 4 * g + k];
      dc[k * of.n_gates + g] = sum;
    }
  return nullptr;
}

}  // namespace
}  // namespace lutjax

LUTJAX_KERNEL(gate_network_forward) {
  using namespace lutjax;
  const Network of(call);
  if (of.n_inputs == 0) return "gates without inputs";
  float* y = data<float>(call.outputs[0]);
  const int64_t bytes = of.n_rows() * kBlock * static_cast<int64_t>(sizeof(float));
  const bool done = in_parallel_with(call, of.n_blocks(), bytes, [&](int64_t block, char* scratch) {
    float* values = reinterpret_cast<float*>(scratch);
    of.evaluate(block, values);
    of.scatter(values + (of.n_rows() - of.n_outputs) * kBlock, of.n_outputs, block, y);
  });
  return done ? nullptr : "no memory is left";
}

LUTJAX_KERNEL(gate_network_backward) { return lutjax::backward(call); }
