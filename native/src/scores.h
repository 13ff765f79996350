// Reads: from a table's margins to row ids and coefficients, and their derivatives (lutjax/reads.py).
//
// With the margins u_j = x[a_j] - x[b_j] and their distances m_j = |u_j|: bit j of the row c is u_j > 0; j* is the first smallest m, and c' is c with
// that bit flipped. With S = sum m_j, L = sum log sigmoid(beta m_j), E = exp(gamma L), s = S E:
//
//   blend:       c: 1 - U,     c': U      with U = 0.5 / (1 + m*)
//   soft sign:   c: 1 - w,     c': w      with w = sigmoid(-2 rho / T_select), rho = m* / (T_soft + m*)
//   confidence:  c: s (1 - v), c': s v    with v = sigmoid(-2 m* / tau); or only c: s
//   powers:      powers of two near those of confidence; gradients of the exact ones times the quotient
//
// The slope of m_j follows bit j: -1 at 0. Samples are computed in lanes, in blocks stored as
// [inputs, kBlock].
#pragma once

#include "lanes.h"

#ifdef LUTJAX_LEVEL
namespace lutjax {
namespace {

constexpr int kBlock = 64;  // samples
constexpr int kMostBits = 30;
constexpr int kMostScalars = 3;
constexpr float kMostFloat = 3.40282347e38f;

enum class Family : int { blend, soft_sign, confidence, confidence_one_way, powers, powers_one_way };

struct Read {
  Family family;
  bool hard;  // the value is row c alone
  int ways;   // that have a gradient
  int valued;
  int n_scalars;
  int bits;
  int ends;            // 2: pairs; 1: single inputs, compared with 0
  const int32_t* end;  // [T, bits, ends], places of inputs: ids, in a block times kBlock
  float scalar[kMostScalars];  // as the formulas have them: exp of what is learned
  // For powers of two, the constants in lutjax.reads.Rounding.
  int lowest, highest, farthest, negligible, most_shift;
  float least_exact, most_ratio;
};

// Values for one table and a sample block.
struct Scores {
  int32_t index[2][kBlock];
  float coefficient[2][kBlock];  // values, with the factor `keep`
  float keep[kBlock];
  float product[2][kBlock];  // <dy, row>: given for the derivatives

  // For the derivatives.
  int32_t flip[kBlock];
  float closest[kBlock], share[kBlock], score[kBlock], power[kBlock], logs[kBlock];
  float value[2][kBlock];  // without `keep`
  float ratio[2][kBlock];
  float near[kMostBits][kBlock];  // exp(-beta m_j)
};

// One table's margins in sample lanes, at x: a block's inputs.
struct OfSamples {
  const int32_t* end;
  int ends;
  const float* x;
  OfSamples(const Read& read, int64_t t, const float* x) : end(read.end + t * read.bits * read.ends), ends(read.ends), x(x) {}
  Floats operator()(int j, int i) const {
    if (ends == 1) return load(x + end[j] + i);
    return load(x + end[2 * j] + i) - load(x + end[2 * j + 1] + i);
  }
};

// Values of n lanes: samples of a table, or tables of a sample. margin(j, i): those of comparison j from lane i on; keep: whether `Scores` has it.
template <Family family, bool for_gradient, class Margin>
void score(const Read& read, const Margin& margin, bool keep, int n, Scores& s) {
  constexpr bool scored = family >= Family::confidence;
  constexpr bool powers = family >= Family::powers;
  constexpr bool one_way = family == Family::confidence_one_way || family == Family::powers_one_way;
  const Floats one = splat(1.0f), zero = splat(0.0f);
  const float beta = scored ? read.scalar[0] * 1.44269504f : 0;  // of powers of two
  for (int i = 0; i < n; i += kLanes) {
    Ints index = splat(0), flip = splat(1);
    Floats closest = zero, total = zero, product = zero;
    for (int j = 0; j < read.bits; ++j) {
      const Floats u = margin(j, i), m = absolute(u);
      index = index | ((u > zero) & (1 << j));
      if (j == 0) {
        closest = m;
      } else {
        const Mask closer = ~(m >= closest) & (closest == closest);  // the first NaN comes before any number
        closest = select(closer, m, closest);
        flip = select(closer, splat(1 << j), flip);
      }
      if constexpr (scored) {
        const Floats near = half_to(m * beta);
        total = j == 0 ? m : total + m;
        product = product + near * (product + 1.0f);
        if constexpr (for_gradient) store(near, s.near[j] + i);
      }
    }
    Floats first, second = zero, share = zero;
    if constexpr (family == Family::blend || family == Family::soft_sign) {
      if constexpr (family == Family::blend) {
        share = 0.5f / (closest + 1.0f);
      } else {
        const Floats e = exp_of_negative(closest / (closest + read.scalar[0]) * (-2.0f / read.scalar[1]));
        share = e / (e + 1.0f);
      }
      first = one - share;
      second = share;
      if (read.hard) {
        first = select(share == share, one, share);
        second = zero;
      }
    } else {
      total = select(total <= kMostFloat, total, splat(NAN));  // a sum without a bound is no score
      const Floats logs = zero - log1p_of(product), exponent = logs * read.scalar[1];
      const Floats power = exp_of_negative(exponent), whole_score = total * power;
      first = whole_score;
      Floats e = zero;
      if constexpr (!one_way) {
        e = exp_of_negative(closest * (-2.0f / read.scalar[2]));
        share = e / (e + 1.0f);
        first = whole_score * (one - share);
        second = whole_score * share;
      }
      if constexpr (for_gradient) {
        store(logs, s.logs + i);
        store(power, s.power + i);
        store(whole_score, s.score + i);
      }
      if constexpr (powers) {
        constexpr float ln2 = 0.69314718056f;
        const float low = static_cast<float>(read.lowest), high = static_cast<float>(read.highest), most = static_cast<float>(read.most_shift);
        // Half up.
        const auto rounded = [](Floats a) {
          a = a + 0.5f;
          const Floats cut = floats(truncated(a));
          return select(cut > a, cut - 1.0f, cut);
        };
        const Mask positive = (total >= 1.17549435e-38f) & (total <= kMostFloat);
        Floats k = log_of_normal(select(positive, total, one)) / ln2 + exponent / ln2;
        Ints q = splat(0);
        if constexpr (!one_way) {
          const Floats distance = closest * (2.0f / read.scalar[2]) / ln2;
          const Floats near = select(distance < most, distance, splat(most));  // also NaN's
          q = truncated(rounded(near));
          const Floats weight = power_of_two(splat(0) - q) + 1.0f;
          k = k - select(q < read.negligible, log_of_normal(weight) / ln2, zero);
        }
        k = select(positive, k, splat(2 * low));  // nothing is read of 0, and NaN is seen below
        k = select(k > 2 * high, splat(2 * high), select(k > 2 * low, k, splat(2 * low)));
        const Ints exact = truncated(rounded(k));
        const Mask reads = exact >= read.lowest;
        const Ints clipped = select(reads, select(exact > read.highest, splat(read.highest), exact), splat(read.lowest));
        const auto way = [&](Floats coefficient, Ints shift, Mask exists, float* ratio) {
          const Floats of = power_of_two(clipped - shift);
          if constexpr (for_gradient) {
            const Floats quotient = of / select(coefficient < read.least_exact, splat(read.least_exact), coefficient);
            store(select(quotient > read.most_ratio, splat(read.most_ratio), quotient), ratio);
          }
          return select(coefficient == coefficient, select(exists, of, zero), coefficient);
        };
        first = way(first, splat(0), reads, s.ratio[0] + i);
        if constexpr (!one_way) second = way(second, q, reads & (q <= read.farthest), s.ratio[1] + i);
      }
    }
    if constexpr (for_gradient) {
      store(flip, s.flip + i);
      store(closest, s.closest + i);
      store(share, s.share + i);
      store(first, s.value[0] + i);
      store(second, s.value[1] + i);
    }
    if (keep) {
      first = load(s.keep + i) * first;
      if (!read.hard) second = load(s.keep + i) * second;  // else 0, whatever the factor
    }
    store(index, s.index[0] + i);
    store(index ^ flip, s.index[1] + i);
    store(first, s.coefficient[0] + i);
    store(second, s.coefficient[1] + i);
  }
}

// Calls add_margin(end, j, i, du_j) and add_scalar(number, its cotangent) for the samples of a table; sets s.keep to its cotangent. The products of lanes without a
// sample are 0.
template <Family family, class AddMargin, class AddScalar>
void differentiate(const Read& read, int64_t t, const float* x, bool keep, int n, Scores& s, const AddMargin& add_margin,
                   const AddScalar& add_scalar) {
  constexpr bool scored = family >= Family::confidence;
  constexpr bool powers = family >= Family::powers;
  constexpr bool one_way = family == Family::confidence_one_way || family == Family::powers_one_way;
  const OfSamples margin(read, t, x);
  const Floats one = splat(1.0f), zero = splat(0.0f);
  for (int i = 0; i < n; i += kLanes) {
    Floats r = load(s.product[0] + i), q = one_way ? zero : load(s.product[1] + i);
    if (keep) {
      const Floats factor = load(s.keep + i);
      Floats of_keep = r * load(s.value[0] + i);
      if constexpr (!one_way) of_keep = of_keep + q * load(s.value[1] + i);
      store(of_keep, s.keep + i);
      r = r * factor;
      q = q * factor;
    }
    const Ints flip = load(s.flip + i);
    const Floats m = load(s.closest + i), share = load(s.share + i);
    Floats of_closest = zero, of_score = zero, of_total = zero, of_near = zero, sum = zero;
    if constexpr (family == Family::blend) {
      of_closest = (q - r) * (-0.5f / ((m + 1.0f) * (m + 1.0f)));
    } else if constexpr (family == Family::soft_sign) {
      const Floats soft = m + read.scalar[0];
      const Floats slope = (q - r) * (2.0f / read.scalar[1]) * share * (one - share) / soft;
      const Floats by_soft = slope * read.scalar[0] / soft;
      of_closest = zero - by_soft;
      add_scalar(0, by_soft * m);
      add_scalar(1, slope * m);
    } else {
      if constexpr (powers) {
        r = r * load(s.ratio[0] + i);
        if constexpr (!one_way) q = q * load(s.ratio[1] + i);
      }
      const Floats score = load(s.score + i);
      of_score = r;
      if constexpr (!one_way) {
        of_score = r * (one - share) + q * share;
        of_closest = score * (q - r) * (-2.0f / read.scalar[2]) * share * (one - share);
        add_scalar(2, zero - of_closest * m);
      }
      of_total = of_score * load(s.power + i);
      of_near = of_score * score * (read.scalar[0] * read.scalar[1]);
      add_scalar(1, of_score * score * read.scalar[1] * load(s.logs + i));
    }
    for (int j = 0; j < read.bits; ++j) {
      const Floats u = margin(j, i);
      Floats d = select(flip == (1 << j), of_closest, zero);
      if constexpr (scored) {
        const Floats near = load(s.near[j] + i), part = near / (near + 1.0f);
        sum = sum + absolute(u) * part;
        d = d + of_total + of_near * part;
      }
      add_margin(margin.end, j, i, select(u > zero, d, zero - d));
    }
    if constexpr (scored) add_scalar(0, of_near * sum);
  }
}

}  // namespace
}  // namespace lutjax
#endif
