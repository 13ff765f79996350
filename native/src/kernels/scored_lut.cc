// Lookup tables with rows weighted by a score of the comparisons.
//
//   y[b, g] = sum over tables t of g and ways k of keep[b, t] c_k W[t, i_k];   dc_k = keep[b, t] <dy[b, g], W[t, i_k]>
//   dx[b, a] += du;  dx[b, b] -= du;  dW[t, i_k] += keep[b, t] c_k dy[b, g]
//
// with ids and coefficients from `scores.h`. Inputs are first laid out by sample blocks, [inputs, kBlock]. Forward, a task owns some
// samples in one group and visits the group's tables, a few at a time. Backward, a task owns some tables in one group and visits all samples, table
// after table: it computes these tables' gradients, and its own input and scalar sums, which are then added in order. The task
// division depends only on shapes.
#include "rules.h"
#include "scores.h"
#include "weighted_rows.h"

namespace lutjax {
namespace {

constexpr int64_t kTasks = 8;        // as many at least, if there is work for them
constexpr int64_t kFewest = 4;       // tables of a task
constexpr int64_t kWorth = 1 << 15;  // numbers that are worth a task of their own
constexpr int64_t kSuper = 16;       // blocks between two visits of a table
constexpr int kPack = 4;             // tables that are read together

// Number of layer and read options before a kernel's own options.
constexpr int kIntegers = 14, kNumbers = 2;

// Constants for integer tables (lutjax/values/_quantized.py).
struct Integers {
  int32_t shift;        // the least coefficient is 2^-shift, of which all are multiples
  int32_t beyond;       // exponents of scales that are numbers are smaller
  int64_t most_tables;  // whose sums int32 holds
};

struct Layer {
  int64_t n, inputs_of, n_inputs, n_tables, n_rows, n_outputs, groups, each, blocks;
  const float* x;     // [blocks, H, I, kBlock]
  const float* keep;  // [n, T] or null
  Read read;
  Integers integers;

  int samples(int64_t block) const { return static_cast<int>(most<int64_t>(least<int64_t>(n - block * kBlock, kBlock), 0)); }
  int64_t block_size() const { return n_inputs * kBlock; }
  const float* inputs(int64_t block, int64_t group) const {
    return x + (block * inputs_of + (inputs_of == 1 ? 0 : group)) * block_size();
  }
  bool worth_threads(int64_t least_work = kWorth) const { return n * n_tables * (n_outputs + read.bits) > least_work; }
};

template <class Body>
void shared(const Call& call, bool worth_threads, int64_t n, const Body& body) {
  if (worth_threads)
    in_parallel(call, n, body);
  else
    for (int64_t i = 0; i < n; ++i) body(i);
}

// inputs: x, anchors, scalars, keep. integers: groups, family, hard, ways, whether there is `keep`, valued, then those of `Read` and of `Integers`;
// numbers: those of `Read`. in_blocks: whether inputs are laid out for lanes of samples; else ends of comparisons are ids.
const char* prepared(const Call& call, const Array& weights, const Array* inputs, const int64_t* integers, const double* numbers, Layer* of,
                     bool in_blocks = true) {
  const Array &x = inputs[0], &anchors = inputs[1], &scalars = inputs[2];
  Layer& a = *of;
  a.n = x.shape[0];
  a.inputs_of = x.shape[1];
  const int64_t n_inputs = x.shape[2];
  a.n_inputs = most<int64_t>(n_inputs, 1);
  a.n_tables = weights.shape[0];
  a.n_rows = weights.shape[1];
  a.n_outputs = weights.shape[2];
  a.groups = integers[0];
  a.each = a.n_tables / most<int64_t>(a.groups, 1);
  a.blocks = most<int64_t>((a.n + kBlock - 1) / kBlock, 1);
  a.keep = integers[4] != 0 ? data<const float>(inputs[3]) : nullptr;
  Read& read = a.read;
  read.family = static_cast<Family>(integers[1]);
  read.hard = integers[2] != 0;
  read.ways = static_cast<int>(integers[3]);
  read.valued = static_cast<int>(integers[5]);
  read.lowest = static_cast<int>(integers[6]);
  read.highest = static_cast<int>(integers[7]);
  read.farthest = static_cast<int>(integers[8]);
  read.negligible = static_cast<int>(integers[9]);
  read.most_shift = static_cast<int>(integers[10]);
  read.least_exact = static_cast<float>(numbers[0]);
  read.most_ratio = static_cast<float>(numbers[1]);
  a.integers = {static_cast<int32_t>(integers[11]), static_cast<int32_t>(integers[12]), integers[13]};
  read.bits = static_cast<int>(anchors.shape[1]);
  read.ends = anchors.rank == 3 ? 2 : 1;
  read.n_scalars = static_cast<int>(scalars.shape[0]);
  if (read.bits > kMostBits || read.n_scalars > kMostScalars) return "a table has too many bits, or a read too many scalars";
  if (a.n_rows != int64_t{1} << read.bits) return "a table must have a row for each address";
  if (a.inputs_of != 1 && a.inputs_of != a.groups) return "inputs must be shared, or one for each group";
  for (int i = 0; i < read.n_scalars; ++i) read.scalar[i] = expf(data<const float>(scalars)[i]);
  const int64_t n_ends = a.n_tables * read.bits * read.ends;
  int32_t* end = allocated<int32_t>(call, n_ends);
  if (end == nullptr) return "no memory is left";
  const int32_t step = in_blocks ? kBlock : 1, most_inputs = static_cast<int32_t>(a.n_inputs);
  for (int64_t i = 0; i < n_ends; ++i) end[i] = step * clamped<int32_t>(data<const int32_t>(anchors)[i], most_inputs);
  read.end = end;
  a.x = nullptr;
  if (!in_blocks) return nullptr;
  float* blocks = allocated<float>(call, a.blocks * a.inputs_of * a.block_size());
  if (blocks == nullptr) return "no memory is left";
  a.x = blocks;
  const float* from = data<const float>(x);
  shared(call, a.n * a.inputs_of * a.n_inputs > kWorth, a.blocks, [&](int64_t block) {
    const int n = a.samples(block), lanes = (n + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = 0; i < a.inputs_of * a.n_inputs; ++i) {
      float* to = blocks + (block * a.inputs_of * a.n_inputs + i) * kBlock;
      for (int b = 0; b < lanes; ++b) to[b] = 0;
      if (n_inputs > 0)
        for (int b = 0; b < n; ++b) to[b] = from[(block * kBlock + b) * a.inputs_of * n_inputs + i];
    }
  });
  return nullptr;
}

template <bool for_gradient, class Margin>
void score_in(const Read& read, const Margin& margin, bool keep, int n, Scores& s) {
  switch (read.family) {
    case Family::blend: return score<Family::blend, for_gradient>(read, margin, keep, n, s);
    case Family::soft_sign: return score<Family::soft_sign, for_gradient>(read, margin, keep, n, s);
    case Family::confidence: return score<Family::confidence, for_gradient>(read, margin, keep, n, s);
    case Family::confidence_one_way: return score<Family::confidence_one_way, for_gradient>(read, margin, keep, n, s);
    case Family::powers: return score<Family::powers, for_gradient>(read, margin, keep, n, s);
    case Family::powers_one_way: return score<Family::powers_one_way, for_gradient>(read, margin, keep, n, s);
  }
}

// Scores for a table and a block.
template <bool for_gradient>
void scores_of(const Layer& a, int64_t t, int64_t group, int64_t block, Scores& s) {
  const int n = a.samples(block);
  const bool keep = a.keep != nullptr;
  if (keep) {
    for (int b = 0; b < n; ++b) s.keep[b] = a.keep[(block * kBlock + b) * a.n_tables + t];
    for (int b = n; b % kLanes != 0; ++b) s.keep[b] = 0;
  }
  score_in<for_gradient>(a.read, OfSamples(a.read, t, a.inputs(block, group)), keep, n, s);
}

// ------------------------------------------------------------------------------------- forward
// Divides each group's samples into enough tasks.
int64_t blocks_of_part(const Layer& a) {
  const int64_t parts = most<int64_t>(kTasks / most<int64_t>(a.groups, 1), 1);
  return least<int64_t>(most<int64_t>((a.blocks + parts - 1) / parts, 1), kSuper);
}

// Coefficients in units of an integer read's least coefficient, and where they are NaN.
void in_units(float* coefficient, int n, const Integers& of, bool* unknown) {
  const float units = static_cast<float>(1 << of.shift);
  for (int b = 0; b < n; ++b) {
    const float c = coefficient[b];
    unknown[b] |= c != c;
    coefficient[b] = c == c ? c * units : 0;
  }
}

// Prefetches part i of n of some tables, line by line: later row reads have no order, which is slow from memory.
template <class W>
LUTJAX_INLINE void ask_for(const W* tables, int64_t size, int64_t i, int64_t n) {
  const char* from = reinterpret_cast<const char*>(tables);
  const int64_t bytes = size * static_cast<int64_t>(sizeof(W));
  for (int64_t at = bytes * i / n / 64 * 64; at < bytes * (i + 1) / n; at += 64) prefetch(from + at);
}

// Whether the samples in some blocks read most rows of a table.
bool reads_most(const Layer& a, int64_t blocks) { return least(blocks * kBlock, a.n) * a.read.ways >= a.n_rows; }

// Sums of some blocks over tables `from` to `to` of a group, at `y` of all samples; unknown: null, or of every sample of the blocks.
template <class W, class Sums>
void sum_group(const Layer& a, const W* weights, const Sums& sums, int64_t group, int64_t from, int64_t to, int64_t first_block,
               int64_t last_block, typename Sums::T* y, bool* unknown) {
  const int64_t size = a.n_rows * a.n_outputs, stride = a.groups * a.n_outputs;
  Scores s[kPack];
  for (int64_t t0 = from; t0 < most<int64_t>(to, 1); t0 += kPack)
    for (int64_t block = first_block; block < last_block; ++block) {
      const int n = a.samples(block);
      Ways<W> ways;
      if (reads_most(a, last_block - first_block) && t0 + kPack < to)
        ask_for(weights + (group * a.each + t0 + kPack) * size, least<int64_t>(kPack, to - t0 - kPack) * size, block - first_block,
                last_block - first_block);
      for (int64_t t = group * a.each + t0, last = group * a.each + least(t0 + kPack, to), i = 0; t < last; ++t, ++i) {
        scores_of<false>(a, t, group, block, s[i]);
        for (int k = 0; k < a.read.valued; ++k) {
          if (unknown != nullptr) in_units(s[i].coefficient[k], n, a.integers, unknown + (block - first_block) * kBlock);
          ways.add(weights + t * size, s[i].index[k], s[i].coefficient[k]);
        }
      }
      sum_weighted_rows(sums, ways, a.n_outputs, n, t0 == from, y + (block * kBlock * a.groups + group) * a.n_outputs, stride);
    }
}

template <class W, class Sums>
void forward(const Call& call, const Layer& a, const Sums& sums) {
  const int64_t each = blocks_of_part(a), parts = (a.blocks + each - 1) / each;
  shared(call, a.worth_threads(), parts * a.groups, [&](int64_t i) {
    const int64_t first = i / a.groups * each, last = least(first + each, a.blocks);
    sum_group(a, data<const W>(call.inputs[0]), sums, i % a.groups, 0, a.each, first, last, data<typename Sums::T>(call.outputs[0]), nullptr);
  });
}

// The scales of sums: powers of two; NaN where an entry of the tables was no finite number (lutjax/values/_quantized.py).
void scales_of(const int32_t* exponents, int64_t size, const Integers& of, float* scale) {
  for (int64_t o = 0; o < size; ++o) {
    const int32_t n = exponents[o] - of.shift;
    const int32_t bits = (n + 127) << 23;
    if (n >= -126 && n <= 127)
      std::memcpy(scale + o, &bits, sizeof bits);
    else
      scale[o] = n < of.beyond && n > -of.beyond ? ldexpf(1.0f, n) : NAN;
  }
}

// Sums of integers as numbers, perhaps in their memory; NaN where a score is.
template <class T>
void in_floats(const T* sums, const float* scale, int64_t size, bool is_nan, float* y) {
  constexpr int64_t part = 64;
  for (int64_t from = 0; from < size; from += part) {
    const int64_t n = least(part, size - from);
    T sum[part];
    std::memcpy(sum, sums + from, static_cast<size_t>(n) * sizeof(T));
    for (int64_t o = 0; o < n; ++o) y[from + o] = is_nan ? NAN : static_cast<float>(sum[o]) * scale[from + o];
  }
}

// Tables of integers: sums of integers times a power of two; NaN where a score is.
const char* forward_of_integers(const Call& call, const Layer& a) {
  const int64_t each = blocks_of_part(a), parts = (a.blocks + each - 1) / each;
  const int32_t* exponents = data<const int32_t>(call.inputs[5]);
  float* y = data<float>(call.outputs[0]);
  int32_t* sums = data<int32_t>(call.outputs[0]);  // until they are numbers
  int64_t* totals = nullptr;  // of more tables
  if (a.each > a.integers.most_tables) {
    totals = allocated<int64_t>(call, a.n * a.groups * a.n_outputs);
    if (totals == nullptr) return "no memory is left";
  }
  shared(call, a.worth_threads(), parts * a.groups, [&](int64_t i) {
    const int64_t group = i % a.groups, first = i / a.groups * each, last = least(first + each, a.blocks);
    const int64_t first_sample = first * kBlock, last_sample = least(last * kBlock, a.n);
    const auto sample_row = [&](auto* of_all, int64_t b) { return of_all + (b * a.groups + group) * a.n_outputs; };
    bool unknown[kSuper * kBlock] = {};
    for (int64_t t = 0; t < most<int64_t>(a.each, 1); t += a.integers.most_tables) {
      sum_group(a, data<const int8_t>(call.inputs[0]), SumsOfIntegers{}, group, t, least(t + a.integers.most_tables, a.each), first, last, sums, unknown);
      if (totals != nullptr)
        for (int64_t b = first_sample; b < last_sample; ++b)
          for (int64_t o = 0; o < a.n_outputs; ++o) sample_row(totals, b)[o] = (t == 0 ? 0 : sample_row(totals, b)[o]) + sample_row(sums, b)[o];
    }
    constexpr int64_t part = 64;  // outputs whose scales are made together
    for (int64_t from = 0; from < a.n_outputs; from += part) {
      const int64_t size = least(part, a.n_outputs - from);
      float scale[part];
      scales_of(exponents + group * a.n_outputs + from, size, a.integers, scale);
      for (int64_t b = first_sample; b < last_sample; ++b) {
        const bool is_nan = unknown[b - first_sample];
        if (totals != nullptr)
          in_floats(sample_row(totals, b) + from, scale, size, is_nan, sample_row(y, b) + from);
        else
          in_floats(sample_row(sums, b) + from, scale, size, is_nan, sample_row(y, b) + from);
      }
    }
  });
  return nullptr;
}

// ------------------------------------------------------------------------------------- few samples, forward
// Tables are in the lanes: first all that a sample reads is found, then its rows are added, in the order of tables.
constexpr int64_t kFew = kLanes > 4 ? kLanes / 2 : 2;  // samples
constexpr int64_t kFewOutputs = 64;                  // of a task
constexpr int64_t kWorthOfFew = 1 << 16;             // no thread is asked for less: it takes some microseconds to come

// One sample's reads from some tables: row addresses, and their coefficients.
struct Reads {
  int64_t row[2 * kBlock];
  float coefficient[2 * kBlock];
  int n;
  bool unknown;
};

// The scores of `n` tables for one sample, whose comparisons are u[comparison * kBlock + table].
LUTJAX_NOINLINE void scores_of_tables(const Read& read, const float* u, bool keep, int n, Scores& s) {
  score_in<false>(read, [&](int j, int i) { return load(u + j * kBlock + i); }, keep, n, s);
}

// Finds it for tables from `first` on, `n` of them, and asks for the rows. units: coefficients are those of integers.
template <class W>
void find_reads(const Layer& a, const W* weights, const float* x, const float* keep, int64_t first, int n, bool units, Reads& found) {
  const Read& read = a.read;
  float u[kMostBits * kBlock];
  Scores s;
  const int lanes = (n + kLanes - 1) / kLanes * kLanes;
  for (int i = 0; i < n; ++i) {
    const int32_t* end = read.end + (first + i) * read.bits * read.ends;
    if (read.ends == 1)
      for (int j = 0; j < read.bits; ++j) u[j * kBlock + i] = x[end[j]];
    else
      for (int j = 0; j < read.bits; ++j) u[j * kBlock + i] = x[end[2 * j]] - x[end[2 * j + 1]];
    s.keep[i] = keep != nullptr ? keep[first + i] : 1;
  }
  for (int i = n; i < lanes; ++i) {
    for (int j = 0; j < read.bits; ++j) u[j * kBlock + i] = 0;
    s.keep[i] = 0;
  }
  scores_of_tables(read, u, keep != nullptr, n, s);
  found.unknown = false;
  if (units)
    for (int k = 0; k < read.valued; ++k)
      for (int i = 0; i < n; ++i) in_units(s.coefficient[k] + i, 1, a.integers, &found.unknown);
  int m = 0;
  const int64_t asked = least<int64_t>(a.n_outputs * static_cast<int64_t>(sizeof(W)), 1024);
  for (int i = 0; i < n; ++i)
    for (int k = 0; k < read.valued; ++k) {
      found.row[m] = ((first + i) * a.n_rows + s.index[k][i]) * a.n_outputs;
      found.coefficient[m] = s.coefficient[k][i];
      ask_for(weights + found.row[m], asked);
      m += found.coefficient[m] != 0;
    }
  found.n = m;
}

// Adds what `n_parts` parts of the tables of a group read.
template <class W, class Sums>
void sum_reads(const Sums& sums, const W* weights, const Reads* parts, int64_t n_parts, int64_t n_outputs, typename Sums::T* y) {
  using V = typename Sums::V;
  for_parts(n_outputs, [&](auto size, int64_t o) {
    constexpr int N = decltype(size)::n, M = N == 0 ? 1 : N;
    const int rest = static_cast<int>(n_outputs - o);
    V total[M] = {};
    for (int64_t p = 0; p < n_parts; ++p)
      for (int i = 0; i < parts[p].n; ++i) {
        const W* row = weights + parts[p].row[i] + o;
        const float c = parts[p].coefficient[i];
        if constexpr (N == 0)
          total[0] = sums.plus_first(total[0], c, row, rest);
        else
          for (int v = 0; v < N; ++v) total[v] = sums.plus(total[v], c, row + v * kLanes);
      }
    if constexpr (N == 0)
      store_first(total[0], y + o, rest);
    else
      for (int v = 0; v < N; ++v) store(total[v], y + o + v * kLanes);
  });
}

// finish(sample, group, first output, how many, whether a score is NaN) follows the sums of some outputs.
template <class W, class Sums, class Finish>
const char* forward_of_few(const Call& call, const Layer& a, const Sums& sums, bool units, const Finish& finish) {
  const float* x = data<const float>(call.inputs[1]);
  const int64_t n_inputs = call.inputs[1].shape[2], parts = (a.each + kBlock - 1) / kBlock;
  const int64_t n_sums = a.n * a.groups, of_outputs = (a.n_outputs + kFewOutputs - 1) / kFewOutputs;
  Reads* reads = allocated<Reads>(call, n_sums * parts);
  float* nothing = allocated<float>(call, a.n_inputs);
  if (reads == nullptr || nothing == nullptr) return "no memory is left";
  nothing[0] = 0;  // what ids of no inputs find
  const bool worth = a.worth_threads(kWorthOfFew);
  shared(call, worth, n_sums * parts, [&](int64_t i) {
    const int64_t of = i / parts, b = of / a.groups, group = of % a.groups, t = i % parts * kBlock;
    const float* from = n_inputs == 0 ? nothing : x + (b * a.inputs_of + (a.inputs_of == 1 ? 0 : group)) * n_inputs;
    find_reads(a, data<const W>(call.inputs[0]), from, a.keep == nullptr ? nullptr : a.keep + b * a.n_tables, group * a.each + t,
               static_cast<int>(least<int64_t>(a.each - t, kBlock)), units, reads[i]);
  });
  // Outputs are divided where samples and groups are few, into parts that shapes alone decide.
  const int64_t pieces = worth ? most<int64_t>(least<int64_t>(of_outputs, kTasks / most<int64_t>(n_sums, 1)), 1) : 1;
  shared(call, worth, n_sums * pieces, [&](int64_t i) {
    const int64_t of = i / pieces, piece = i % pieces;
    const int64_t first = of_outputs * piece / pieces * kFewOutputs;
    const int64_t size = least(of_outputs * (piece + 1) / pieces * kFewOutputs, a.n_outputs) - first;
    bool unknown = false;
    for (int64_t p = 0; p < parts; ++p) unknown |= reads[of * parts + p].unknown;
    sum_reads(sums, data<const W>(call.inputs[0]) + first, reads + of * parts, parts, size,
              data<typename Sums::T>(call.outputs[0]) + of * a.n_outputs + first);
    finish(of, first, size, unknown);
  });
  return nullptr;
}

// ------------------------------------------------------------------------------------- backward
struct Wanted {
  bool of_rows, of_read;
  int64_t chunks;     // of the tables of a group
  const float* dy;    // [n, G, O], or [n, 1, O]
  const float* dy_of_read;
  int64_t dy_stride, dy_of_group;
  float* d_keep;  // [n, T] or null
};

// A task's results besides rows.
template <class T>
struct Own {
  T* dx;              // [blocks, I, kBlock]
  double* d_scalars;  // sums; whole numbers of fixed point
};

inline float add_wrapping(float a, float b) { return a + b; }
inline int32_t add_wrapping(int32_t a, int32_t b) { return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b)); }
inline float from_sum(double sum, float) { return static_cast<float>(sum); }
inline int32_t from_sum(double sum, int32_t) { return static_cast<int32_t>(static_cast<int64_t>(sum)); }

template <class Sums>
struct AddMargin {
  const Sums& sums;
  typename Sums::T* dx;
  int ends;
  void operator()(const int32_t* end, int j, int i, Floats d) const {
    using V = typename Sums::V;
    auto* to = dx + end[ends * j] + i;
    const V addend = sums.plus(V{}, d);
    store(load(to) + addend, to);
    if (ends == 2) {
      to = dx + end[ends * j + 1] + i;
      store(load(to) - addend, to);
    }
  }
};

template <Family family, class Sums>
void differentiate_in(const Layer& a, const Sums& sums, int64_t t, int64_t group, int64_t block, Scores& s, const Own<typename Sums::T>& own,
                      int64_t first_block) {
  const AddMargin<Sums> add{sums, own.dx + (block - first_block) * a.block_size(), a.read.ends};
  const int n = a.samples(block);
  typename Sums::V total[kMostScalars] = {};
  differentiate<family>(a.read, t, a.inputs(block, group), a.keep != nullptr, n, s, add,
                        [&](int i, Floats v) { total[i] = sums.plus(total[i], v); });
  for (int i = 0; i < a.read.n_scalars; ++i) own.d_scalars[i] += sum_of(total[i]);
}

template <class Sums>
LUTJAX_NOINLINE void differentiate_read(const Layer& a, const Sums& sums, int64_t t, int64_t group, int64_t block, Scores& s,
                                        const Own<typename Sums::T>& own, int64_t first_block) {
  switch (a.read.family) {
#define LUTJAX_FAMILY(name) \
    case Family::name: return differentiate_in<Family::name>(a, sums, t, group, block, s, own, first_block);
    LUTJAX_FAMILY(blend)
    LUTJAX_FAMILY(soft_sign)
    LUTJAX_FAMILY(confidence)
    LUTJAX_FAMILY(confidence_one_way)
    LUTJAX_FAMILY(powers)
    LUTJAX_FAMILY(powers_one_way)
#undef LUTJAX_FAMILY
  }
}

template <int ways, bool of_rows, bool of_read, class W, class Sums>
void table_of(const Layer& a, const Sums& sums, const Wanted& wanted, const W* weights, typename Sums::T* total, int64_t t,
              int64_t group, int64_t block, int64_t first_block, const Own<typename Sums::T>& own) {
  Scores s;
  scores_of<true>(a, t, group, block, s);
  const int n = a.samples(block);
  const int32_t* index[] = {s.index[0], s.index[1]};
  const float* coefficient[] = {s.coefficient[0], s.coefficient[1]};
  float* product[] = {s.product[0], s.product[1]};
  const int64_t at = block * kBlock * wanted.dy_stride + group * wanted.dy_of_group, size = a.n_rows * a.n_outputs;
  const Cotangents dy{wanted.dy + at, wanted.dy_of_read + at, wanted.dy_stride};
  add_weighted_rows<ways, of_rows, of_read>(sums, weights + t * size, index, coefficient, dy, a.n_outputs, n,
                                   of_rows ? total + t * size : nullptr, product);
  if constexpr (of_read) {
    differentiate_read(a, sums, t, group, block, s, own, first_block);
    if (wanted.d_keep != nullptr)
      for (int b = 0; b < n; ++b) wanted.d_keep[(block * kBlock + b) * a.n_tables + t] = s.keep[b];
  }
}

template <class W, class Sums>
void visit(const Layer& a, const Sums& sums, const Wanted& wanted, const W* weights, typename Sums::T* total, int64_t t, int64_t group,
           int64_t block, int64_t first_block, const Own<typename Sums::T>& own) {
  const auto run = [&](auto ways, auto of_rows, auto of_read) {
    table_of<ways.n, of_rows.n != 0, of_read.n != 0>(a, sums, wanted, weights, total, t, group, block, first_block, own);
  };
  if (wanted.of_read) {
    if (a.read.ways == 1)
      wanted.of_rows ? run(Number<1>{}, Number<1>{}, Number<1>{}) : run(Number<1>{}, Number<0>{}, Number<1>{});
    else
      wanted.of_rows ? run(Number<2>{}, Number<1>{}, Number<1>{}) : run(Number<2>{}, Number<0>{}, Number<1>{});
  } else if (a.read.valued == 1) {
    run(Number<1>{}, Number<1>{}, Number<0>{});
  } else {
    run(Number<2>{}, Number<1>{}, Number<0>{});
  }
}

int64_t chunks_of(const Layer& a) {
  const int64_t wanted = (kTasks + most<int64_t>(a.groups, 1) - 1) / most<int64_t>(a.groups, 1);
  return most<int64_t>(least(wanted, a.each / kFewest), 1);
}

// Outputs: for weights, x, scalars, keep; unrequested outputs are empty.
template <class W, class Sums>
const char* backward(const Call& call, const Layer& a, const Sums& sums, const Wanted& wanted) {
  using T = typename Sums::T;
  const W* weights = data<const W>(call.inputs[0]);
  T* total = wanted.of_rows ? data<T>(call.outputs[0]) : nullptr;
  const int64_t chunks = wanted.chunks, tasks = a.groups * chunks, size = a.n_rows * a.n_outputs;
  const int64_t super = least(kSuper, a.blocks), own_size = super * a.block_size();
  T* own = wanted.of_read ? allocated<T>(call, tasks * own_size) : nullptr;
  double* d_scalars = allocated<double>(call, tasks * kMostScalars);
  if ((wanted.of_read && own == nullptr) || d_scalars == nullptr) return "no memory is left";
  for (int64_t i = 0; i < tasks * kMostScalars; ++i) d_scalars[i] = 0;
  const bool worth = a.worth_threads();
  for (int64_t first = 0; first < a.blocks; first += super) {
    const int64_t last = least(first + super, a.blocks);
    shared(call, worth, tasks, [&](int64_t i) {
      const int64_t group = i / chunks, chunk = i % chunks;
      const Own<T> mine{own + i * own_size, d_scalars + i * kMostScalars};
      if (wanted.of_read) std::memset(mine.dx, 0, static_cast<size_t>((last - first) * a.block_size()) * sizeof(T));
      for (int64_t t = group * a.each + a.each * chunk / chunks; t < group * a.each + a.each * (chunk + 1) / chunks; ++t) {
        if (wanted.of_rows && first == 0) std::memset(total + t * size, 0, static_cast<size_t>(size) * sizeof(T));
        for (int64_t block = first; block < last; ++block) {
          if (wanted.of_read && reads_most(a, last - first) && t + 1 < a.n_tables)
            ask_for(weights + (t + 1) * size, size, block - first, last - first);
          visit(a, sums, wanted, weights, total, t, group, block, first, mine);
        }
      }
    });
    if (!wanted.of_read) continue;
    // Inputs: the tasks' sums, sample by sample.
    const int64_t n_inputs = call.inputs[1].shape[2], parts = a.inputs_of == 1 ? tasks : chunks;
    T* dx = data<T>(call.outputs[1]);
    if (n_inputs == 0) continue;
    shared(call, worth, (last - first) * a.inputs_of, [&](int64_t i) {
      const int64_t block = i / a.inputs_of, h = i % a.inputs_of;
      const int n = a.samples(first + block);
      for (int64_t input = 0; input < n_inputs; ++input) {
        T sum[kBlock];
        const T* part = own + h * chunks * own_size + block * a.block_size() + input * kBlock;
        for (int b = 0; b < n; ++b) sum[b] = part[b];
        for (int64_t p = 1; p < parts; ++p)
          for (int b = 0; b < n; ++b) sum[b] = add_wrapping(sum[b], part[p * own_size + b]);
        T* to = dx + ((first + block) * kBlock * a.inputs_of + h) * n_inputs + input;
        for (int b = 0; b < n; ++b) to[b * a.inputs_of * n_inputs] = sum[b];
      }
    });
  }
  if (wanted.of_read)
    for (int s = 0; s < a.read.n_scalars; ++s) {
      double sum = 0;
      for (int64_t i = 0; i < tasks; ++i) sum += d_scalars[i * kMostScalars + s];
      data<T>(call.outputs[2])[s] = from_sum(sum, T{});
    }
  return nullptr;
}

Wanted requested_outputs(const Call& call, const Layer& a, bool of_rows, bool of_read, bool of_keep) {
  const Array& dy = call.inputs[5];
  const int64_t groups = dy.shape[1];
  return {of_rows,
          of_read,
          chunks_of(a),
          data<const float>(dy),
          of_read ? data<const float>(call.inputs[6]) : data<const float>(dy),
          groups * a.n_outputs,
          groups == 1 ? 0 : a.n_outputs,
          of_keep ? data<float>(call.outputs[3]) : nullptr};
}

}  // namespace
}  // namespace lutjax

// Integers from kIntegers: fixed point. Numbers from kNumbers: its scale. Output: [n, G, O], sums.
LUTJAX_KERNEL(scored_lut_forward) {
  using namespace lutjax;
  Layer a;
  const bool few = call.inputs[1].shape[0] <= kFew;
  if (const char* wrong = prepared(call, call.inputs[0], call.inputs + 1, call.integers, call.numbers, &a, !few)) return wrong;
  const auto run = [&](auto of, const auto& sums) -> const char* {
    using W = decltype(of);
    if (few) return forward_of_few<W>(call, a, sums, false, [](int64_t, int64_t, int64_t, bool) {});
    forward<W>(call, a, sums);
    return nullptr;
  };
  const SumsOfFixed fixed{static_cast<float>(call.numbers[kNumbers])};
  const bool is_fixed = call.integers[kIntegers] != 0;
  if (call.inputs[0].type == Type::int8) return run(int8_t{}, SumsOfFloats{});
  return for_type(call.inputs[0], [&](auto weight) { return is_fixed ? run(weight, fixed) : run(weight, SumsOfFloats{}); });
}

// Inputs: int8 tables, and their exponents.
LUTJAX_KERNEL(scored_lut_integers) {
  using namespace lutjax;
  Layer a;
  const bool few = call.inputs[1].shape[0] <= kFew && call.inputs[0].shape[0] / most<int64_t>(call.integers[0], 1) <= call.integers[13];
  if (const char* wrong = prepared(call, call.inputs[0], call.inputs + 1, call.integers, call.numbers, &a, !few)) return wrong;
  if (!few) return forward_of_integers(call, a);
  const int32_t* exponents = data<const int32_t>(call.inputs[5]);
  float* scale = allocated<float>(call, a.groups * a.n_outputs);
  if (scale == nullptr) return "no memory is left";
  scales_of(exponents, a.groups * a.n_outputs, a.integers, scale);
  return forward_of_few<int8_t>(call, a, SumsOfIntegers{}, true, [&](int64_t of, int64_t first, int64_t size, bool is_nan) {
    const int64_t at = of * a.n_outputs + first;
    in_floats(data<const int32_t>(call.outputs[0]) + at, scale + of % a.groups * a.n_outputs + first, size, is_nan, data<float>(call.outputs[0]) + at);
  });
}

// Inputs from 5: cotangents as rows receive them, and in units of the rows. Integers from kIntegers: fixed point, then whether the cotangents of
// rows, of the read (x, scalars, keep), and of keep are wanted.
LUTJAX_KERNEL(scored_lut_backward) {
  using namespace lutjax;
  Layer a;
  if (const char* wrong = prepared(call, call.inputs[0], call.inputs + 1, call.integers, call.numbers, &a)) return wrong;
  const SumsOfFixed fixed{static_cast<float>(call.numbers[kNumbers])};
  const bool is_fixed = call.integers[kIntegers] != 0;
  const Wanted wanted =
      requested_outputs(call, a, call.integers[kIntegers + 1] != 0, call.integers[kIntegers + 2] != 0, call.integers[kIntegers + 3] != 0);
  if (call.inputs[0].type == Type::int8) return backward<int8_t>(call, a, SumsOfFloats{}, wanted);
  return for_type(call.inputs[0], [&](auto weight) {
    using W = decltype(weight);
    return is_fixed ? backward<W>(call, a, fixed, wanted) : backward<W>(call, a, SumsOfFloats{}, wanted);
  });
}

// What `rules.h` needs, then x, anchors, scalars, keep, and the cotangent of outputs.
LUTJAX_KERNEL(scored_lut_update) {
  using namespace lutjax;
  const Update update(call);
  Layer a;
  if (const char* wrong = prepared(call, update.weights, update.inputs, update.integers, update.numbers, &a)) return wrong;
  const Array& cotangent = update.inputs[4];
  const int64_t valued = a.read.valued, n_hits = valued * a.n, groups = cotangent.shape[1];
  int32_t* ids = allocated<int32_t>(call, a.n_tables * n_hits);
  float* coefficients = allocated<float>(call, a.n_tables * n_hits);
  if (ids == nullptr || coefficients == nullptr) return "no memory is left";
  shared(call, a.worth_threads(), a.n > 0 ? a.n_tables : 0, [&](int64_t t) {
    Scores s;
    for (int64_t block = 0; block < a.blocks; ++block) {
      scores_of<false>(a, t, t / a.each, block, s);
      for (int64_t k = 0; k < valued; ++k) {
        const int64_t at = (t * valued + k) * a.n + block * kBlock;
        for (int b = 0; b < a.samples(block); ++b) {
          ids[at + b] = s.index[k][b];
          coefficients[at + b] = s.coefficient[k][b];
        }
      }
    }
  });
  const float* dy = data<const float>(cotangent);
  const int64_t size = a.n_outputs;
  return move_rows(
      call, update, n_hits,
      [=](int64_t t, int64_t i) -> int64_t { return coefficients[t * n_hits + i] == 0 ? -1 : ids[t * n_hits + i]; },
      [=](const auto& how, int64_t t, const Hit* hits, int64_t n, auto* sums) {
        const float* of_group = dy + (groups == 1 ? 0 : t / a.each * size);
        for (int64_t i = 0; i < n; ++i)
          add_weighted(how, coefficients[t * n_hits + hits[i].number], of_group + hits[i].number % a.n * groups * size, size, sums);
      });
}
