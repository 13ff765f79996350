static const uint@bits@_t operands[] FLASH = { /* for each operation what it reads, and the place that it writes */
@operands@
};
static const uint16_t runs[] FLASH = { /* kind of operation, and how many follow */
@runs@
};

static SEPARATE void evaluate(@arguments@)
{
    const uint@bits@_t *p = operands;
    const uint16_t *run = runs;
    uint16_t n;
    for (; (n = READ16(run + 1)) > 0; run += 2)
        switch (READ16(run)) {
@cases@
        }
@unused@
}
