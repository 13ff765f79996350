static const uint@bits@_t operands[] = { /* for each operation the places that it reads, and the one it writes */
@operands@
};
static const uint@input_bits@_t inputs[] = { /* those that are read */
@inputs@
};
static const uint32_t runs[][2] = { /* kind of operation, and how many follow */
@runs@
};
static const uint32_t results[] = { /* twice the place, and one more for the inverse */
@results@
};

void @name@_words(const word *x, word *y)
{
    MEMORY word v[@n_slots@] ALIGNED;
    const uint@bits@_t *p = operands;
    size_t k, run;
    for (k = 0; k < @n_read@; k++)
        v[k] = x[inputs[k]];
    v[@slots@] = (word){0};
    for (run = 0; runs[run][1] > 0; run++) {
        uint32_t n = runs[run][1];
        switch (runs[run][0]) {
@cases@
        }
    }
    for (k = 0; k < @n_outputs@; k++)
        y[k] = results[k] & 1 ? (word)~v[results[k] >> 1] : v[results[k] >> 1];
    (void)x, (void)y, (void)p;
}
