/* Comparators and row sums of look-up tables, all in whole numbers. */
#ifndef LUTJAX_DETECTORS_H
#define LUTJAX_DETECTORS_H

#include <stdint.h>

/* The row that comparisons address: bit r is x[pairs[2 r]] - x[pairs[2 r + 1]] >= least, where least is at least 1. */
static inline uint32_t lutjax_row(const int32_t *x, const uint16_t *pairs, int n_pairs, int64_t least)
{
    uint32_t row = 0;
    for (int r = 0; r < n_pairs; r++) {
        int32_t a = x[pairs[2 * r]], b = x[pairs[2 * r + 1]];
        row |= (uint32_t)(a > b && (least == 1 || (int64_t)a - b >= least)) << r;
    }
    return row;
}

#endif
