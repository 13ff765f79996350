
static void bits_of_@port@(const @type@ *numbers, size_t n, unit *bits)
{
    enum { COUNT = @count@, BITS = @bits@, READ = @read@, WIDTH = @width@, STEP = 64 * ROW / WIDTH };
    size_t group, start, k, f, b;
    for (group = 0; group < GROUPS; group++, numbers += COUNT * UNIT, n = n > UNIT ? n - UNIT : 0)
        for (start = 0; start < COUNT; start += STEP) {
            const size_t width = COUNT - start < STEP ? COUNT - start : STEP;
            uint64_t a[UNIT][ROW] ALIGNED;
            for (k = 0; k < UNIT; k++) {
                const @type@ *from = numbers + k * COUNT + start;
                if (k < n && width == STEP && COPY(a[k], from, 8 * ROW))
                    continue;
                for (f = 0; f < ROW; f++)
                    a[k][f] = 0;
                for (f = 0; k < n && f < width; f++)
                    a[k][f * WIDTH / 64] |= (uint64_t)(@unsigned@)from[f] << f * WIDTH % 64;
            }
            transpose((row *)a);
            for (f = 0; f < width; f++)
                for (b = 0; b < READ; b++) {
                    const size_t at = f * WIDTH + b;
                    bits[((start + f) * BITS + b) * GROUPS + group] = (unit)(a[at % UNIT][at / 64] >> at / UNIT * UNIT % 64);
                }
        }
}
