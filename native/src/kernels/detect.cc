// Detection, section 1 of the semantics: delta[r] = x[a[r]] - x[b[r]] for each anchor pair, or given deltas; index bit r is
// delta[r] > 0, the margin is the first delta with the smallest magnitude (NaN counts as smallest), and `flip` its bit.
//
// Samples are the lanes: each block is transposed once, then each end of a comparison is a contiguous read.
#include "rules.h"

namespace lutjax {
namespace {

constexpr int64_t kMostPairs = 32;
constexpr int64_t kTile = 16;       // detectors whose results are turned together
constexpr int64_t kFew = 4;          // samples that are computed one after the other
constexpr int64_t kWorth = 1 << 14;  // comparisons that are worth a second thread

struct Closest {
  Floats margin;
  Ints index, flip, best;

  // Magnitudes as integers in the same order, with NaN as -1, below all others.
  static Ints key(const Floats& delta) {
    const Words size = (from_memory<Words>(&delta) & 0x7fffffffu) + 0x007fffffu;  // NaN alone passes 2^31
    const Ints order = bits(size);
    return select(order < 0, splat(-1), order);
  }

  static Ints bit(const Floats& delta, float epsilon, int32_t r) {
    const Mask above = (delta > 0.0f) & ~(select(delta < 0.0f, -delta, delta) < epsilon);
    return above & static_cast<int32_t>(uint32_t{1} << r);
  }

  void start(const Floats& delta, float epsilon) {
    margin = delta;
    best = key(delta);
    flip = splat(1);
    index = bit(delta, epsilon, 0);
  }

  void next(const Floats& delta, float epsilon, int32_t r) {
    const Ints order = key(delta);
    const Mask closer = order < best;
    margin = select(closer, delta, margin);
    flip = select(closer, splat(static_cast<int32_t>(uint32_t{1} << r)), flip);
    best = select(closer, order, best);
    index = index | bit(delta, epsilon, r);
  }
};

inline int64_t pair_of(int32_t flip, int64_t n_pairs) {
#if defined(__GNUC__)
  const int64_t r = flip == 0 ? 0 : 31 - __builtin_clz(static_cast<uint32_t>(flip));
#else
  int64_t r = 0;
  for (uint32_t rest = static_cast<uint32_t>(flip) >> 1; rest != 0; rest >>= 1) ++r;
#endif
  return least(r, n_pairs - 1);
}

// Detectors are the lanes, for one sample.
template <class X>
void detect_sample(const X* x, int64_t n_inputs, const int32_t* ids, int64_t n_detectors, int64_t n_pairs, float epsilon, int32_t* index,
                   int32_t* flip, float* margin) {
  for (int64_t t0 = 0; t0 < n_detectors; t0 += kLanes) {
    const int64_t n = least<int64_t>(kLanes, n_detectors - t0);
    float delta[kMostPairs][kLanes];
    for (int64_t i = 0; i < kLanes; ++i)
      for (int64_t r = 0; r < n_pairs; ++r) {
        const int32_t* pair = ids + ((t0 + least(i, n - 1)) * n_pairs + r) * 2;
        delta[r][i] = value(x[clamped<int64_t>(pair[0], n_inputs)]) - value(x[clamped<int64_t>(pair[1], n_inputs)]);
      }
    Closest found;
    found.start(load(delta[0]), epsilon);
    for (int64_t r = 1; r < n_pairs; ++r) found.next(load(delta[r]), epsilon, static_cast<int32_t>(r));
    const size_t bytes = static_cast<size_t>(n) * 4;
    std::memcpy(index + t0, &found.index, bytes);
    std::memcpy(flip + t0, &found.flip, bytes);
    std::memcpy(margin + t0, &found.margin, bytes);
  }
}

template <class X>
const char* forward(const Call& call) {
  const Array &inputs = call.inputs[0], &anchors = call.inputs[1];
  const int64_t n_samples = inputs.shape[0], n_inputs = inputs.shape[1];
  const int64_t n_detectors = anchors.shape[0], n_pairs = anchors.shape[1];
  const float epsilon = static_cast<float>(call.numbers[0]);
  const X* x = data<const X>(inputs);
  const int32_t* ids = data<const int32_t>(anchors);
  int32_t *index = data<int32_t>(call.outputs[0]), *flip = data<int32_t>(call.outputs[1]);
  float* margin = data<float>(call.outputs[2]);
  if (n_pairs > kMostPairs) return "too many pairs";
  if (n_pairs == 0) {
    for (int64_t i = 0; i < n_samples * n_detectors; ++i) {
      index[i] = flip[i] = 0;
      margin[i] = INFINITY;
    }
    return nullptr;
  }
  if (n_samples <= kFew && n_samples * n_detectors * n_pairs <= kWorth && n_inputs > 0) {
    for (int64_t b = 0, at = 0; b < n_samples; ++b, at += n_detectors)
      detect_sample(x + b * n_inputs, n_inputs, ids, n_detectors, n_pairs, epsilon, index + at, flip + at, margin + at);
    return nullptr;
  }
  const int64_t samples = n_inputs > 1024 || n_samples <= 16 ? 16 : 64;
  const int64_t n_blocks = (n_samples + samples - 1) / samples;
  // Few samples: also divide the detectors.
  const int64_t n_parts = n_blocks >= 8 ? 1 : least<int64_t>((n_detectors + kTile - 1) / kTile, 8);
  const int64_t per_part = n_parts == 0 ? 0 : ((n_detectors + n_parts - 1) / n_parts + kTile - 1) / kTile * kTile;
  const int64_t bytes = (n_inputs * samples + n_inputs * 4 + 3 * kTile * samples) * 4 + 256;
  const bool done = in_parallel_with(call, n_blocks * n_parts, bytes, [&](int64_t i, char* scratch) {
    const int64_t first = i / n_parts * samples, n = least(samples, n_samples - first);
    float* by_input = reinterpret_cast<float*>(scratch);
    float* of_tile = by_input + n_inputs * samples;
    float* rows = of_tile + 3 * kTile * samples;
    for (int64_t s = 0; s < n; s += 4) {
      const int64_t m = least<int64_t>(4, n - s);
      if (sizeof(X) == 4) {
        transpose(reinterpret_cast<const float*>(x + (first + s) * n_inputs), n_inputs, m, n_inputs, by_input + s, samples);
      } else {
        for (int64_t k = 0; k < m; ++k)
          for (int64_t j = 0; j < n_inputs; ++j) rows[k * n_inputs + j] = value(x[(first + s + k) * n_inputs + j]);
        transpose(rows, n_inputs, m, n_inputs, by_input + s, samples);
      }
    }
    for (int64_t s = n; s < samples; ++s)
      for (int64_t j = 0; j < n_inputs; ++j) by_input[j * samples + s] = 0;
    const int64_t used = (n + kLanes - 1) / kLanes * kLanes;
    float* margins = of_tile;
    int32_t *indices = reinterpret_cast<int32_t*>(of_tile + kTile * samples), *flips = indices + kTile * samples;
    const int64_t last = least(n_detectors, (i % n_parts + 1) * per_part);
    for (int64_t t0 = i % n_parts * per_part; t0 < last; t0 += kTile) {
      const int64_t of = least(kTile, last - t0);
      for (int64_t t = t0; t < t0 + of; ++t) {
        const float *a[kMostPairs], *b[kMostPairs];
        for (int64_t r = 0; r < n_pairs; ++r) {
          const int32_t* pair = ids + (t * n_pairs + r) * 2;
          a[r] = by_input + clamped<int64_t>(pair[0], n_inputs) * samples;
          b[r] = by_input + clamped<int64_t>(pair[1], n_inputs) * samples;
        }
        const int64_t at = (t - t0) * samples;
        for (int64_t s = 0; s < used; s += kLanes) {
          Closest found;
          found.start(load(a[0] + s) - load(b[0] + s), epsilon);
          for (int64_t r = 1; r < n_pairs; ++r) found.next(load(a[r] + s) - load(b[r] + s), epsilon, static_cast<int32_t>(r));
          store(found.margin, margins + at + s);
          store(found.index, indices + at + s);
          store(found.flip, flips + at + s);
        }
      }
      const int64_t to = first * n_detectors + t0;
      transpose(margins, samples, of, n, margin + to, n_detectors);
      transpose(indices, samples, of, n, index + to, n_detectors);
      transpose(flips, samples, of, n, flip + to, n_detectors);
    }
  }, n_samples * n_detectors * n_pairs > kWorth);
  return done ? nullptr : "no memory for a block of samples";
}

template <class How>
void backward(const Call& call, const How& how) {
  using Sum = typename How::Sum;
  using Part = typename How::Part;
  const Array &anchors = call.inputs[0], &flips = call.inputs[1];
  const int64_t n_samples = flips.shape[0], n_detectors = anchors.shape[0], n_pairs = anchors.shape[1];
  const int64_t n_inputs = call.outputs[0].shape[1];
  const int32_t *ids = data<const int32_t>(anchors), *flip = data<const int32_t>(flips);
  const float* d_margin = data<const float>(call.inputs[2]);
  Sum* dx = data<Sum>(call.outputs[0]);
  const int64_t samples = 32;
  in_parallel(call, (n_samples + samples - 1) / samples, [&](int64_t i) {
    const int64_t last = least((i + 1) * samples, n_samples);
    for (int64_t b = i * samples; b < last; ++b) {
      Sum* to = dx + b * n_inputs;
      for (int64_t j = 0; j < n_inputs; ++j) to[j] = 0;
      if (n_pairs == 0) continue;  // no comparison, no gradient
      for (int64_t t = 0; t < n_detectors; ++t) {
        const int32_t* pair = ids + (t * n_pairs + pair_of(flip[b * n_detectors + t], n_pairs)) * 2;
        const Part addend = how.addend(d_margin[b * n_detectors + t]);
        Sum *above = to + clamped<int64_t>(pair[0], n_inputs), *below = to + clamped<int64_t>(pair[1], n_inputs);
        *above = static_cast<Sum>(static_cast<Part>(*above) + addend);
        *below = static_cast<Sum>(static_cast<Part>(*below) - addend);
      }
    }
  });
}

// ------------------------------------------------------------------------------------- signs
constexpr int64_t kOfSigns = 1024;  // rows of values that are one task

template <class X>
void signs(const Call& call) {
  const int64_t n = call.inputs[0].shape[0], n_bits = call.inputs[0].shape[1];
  const float epsilon = static_cast<float>(call.numbers[0]);
  const X* positions = data<const X>(call.inputs[0]);
  int32_t *index = data<int32_t>(call.outputs[0]), *flip = data<int32_t>(call.outputs[1]);
  float* margin = data<float>(call.outputs[2]);
  in_parallel(call, (n + kOfSigns - 1) / kOfSigns, [&](int64_t i) {
    for (int64_t b = i * kOfSigns, last = least(b + kOfSigns, n); b < last; ++b) {
      float closest = n_bits == 0 ? INFINITY : value(positions[b * n_bits]);
      uint32_t bits = 0, of = n_bits == 0 ? 0 : 1;
      for (int64_t r = 0; r < n_bits; ++r) {
        const float delta = value(positions[b * n_bits + r]), size = fabsf(delta);
        if (delta > 0 && !(size < epsilon)) bits |= uint32_t{1} << r;
        if (size < fabsf(closest) || (delta != delta && closest == closest)) {
          closest = delta;
          of = uint32_t{1} << r;
        }
      }
      index[b] = static_cast<int32_t>(bits);
      flip[b] = static_cast<int32_t>(of);
      margin[b] = closest;
    }
  });
}

void signs_backward(const Call& call) {
  const int64_t n = call.outputs[0].shape[0], n_bits = call.outputs[0].shape[1];
  const int32_t* flip = data<const int32_t>(call.inputs[0]);
  const float* d_margin = data<const float>(call.inputs[1]);
  float* d_positions = data<float>(call.outputs[0]);
  in_parallel(call, n_bits == 0 ? 0 : (n + kOfSigns - 1) / kOfSigns, [&](int64_t i) {
    for (int64_t b = i * kOfSigns, last = least(b + kOfSigns, n); b < last; ++b) {
      for (int64_t r = 0; r < n_bits; ++r) d_positions[b * n_bits + r] = 0;
      d_positions[b * n_bits + pair_of(flip[b], n_bits)] = d_margin[b];
    }
  });
}

}  // namespace
}  // namespace lutjax

LUTJAX_KERNEL(detect_forward) {
  using namespace lutjax;
  return for_type(call.inputs[0], [&](auto x) { return forward<decltype(x)>(call); });
}

LUTJAX_KERNEL(detect_backward) {
  using namespace lutjax;
  if (call.integers[0])
    backward(call, InIntegers{static_cast<float>(call.numbers[0])});
  else
    backward(call, InFloats{});
  return nullptr;
}

LUTJAX_KERNEL(detect_signs_forward) {
  using namespace lutjax;
  return for_type(call.inputs[0], [&](auto x) {
    signs<decltype(x)>(call);
    return kDone;
  });
}

LUTJAX_KERNEL(detect_signs_backward) {
  lutjax::signs_backward(call);
  return nullptr;
}
