// Slot outputs: targets [T or 1, R or 1, K]; negative targets mark unused slots, and other targets are clamped.
#pragma once

#include "kernels.h"

#ifdef LUTJAX_LEVEL
namespace lutjax {
namespace {

struct Slots {
  const int32_t* targets;
  int64_t of_table, of_row, n_slots, n_outputs;

  Slots(const Array& a, int64_t n_outputs)
      : targets(data<const int32_t>(a)),
        of_table(a.shape[0] > 1 ? a.shape[1] * a.shape[2] : 0),
        of_row(a.shape[1] > 1 ? a.shape[2] : 0),
        n_slots(a.shape[2]),
        n_outputs(n_outputs) {}

  const int32_t* row_targets(int64_t t, int64_t row) const { return targets + t * of_table + row * of_row; }

  // Returns a target's output; n_outputs for an unused slot.
  int64_t output(int32_t target) const {
    return target < 0 || n_outputs == 0 ? n_outputs : target < n_outputs ? target : n_outputs - 1;
  }

  // <dy, row - other> for rows with these targets, as a sum of addends. If slot k has the same target in both rows, its values are subtracted
  // before the product.
  template <class How, class W>
  typename How::Part difference(const How& how, const float* dy, const W* row, const W* other, const int32_t* to, const int32_t* other_to) const {
    typename How::Part sum = 0;
    for (int64_t k = 0; k < n_slots; ++k) {
      const int64_t o = output(to[k]), p = output(other_to[k]);
      if (o == p) {
        if (o < n_outputs) sum += how.addend((value(row[k]) - value(other[k])) * dy[o]);
      } else {
        typename How::Part apart = 0;
        if (o < n_outputs) apart = how.addend(value(row[k]) * dy[o]);
        if (p < n_outputs) apart -= how.addend(value(other[k]) * dy[p]);
        sum += apart;
      }
    }
    return sum;
  }
};

}  // namespace
}  // namespace lutjax
#endif
