
/* The n units of a row at `line`, and these with each cell's neighbor in its place: of the units before and after them the cells are left out. */
static inline void @name@_shifted(const unit *restrict line, unit *restrict left, unit *restrict here, unit *restrict right, size_t n)
{
    size_t k;
    for (k = n; k < GROUPS; k++)
        left[k] = here[k] = right[k] = 0;
    for (k = 0; k < n; k++) {
        here[k] = line[k];
        left[k] = (unit)((unit)(line[k] << 1) | (k > 0 ? line[k - 1] >> (UNIT - 1) : 0));
        right[k] = (unit)(line[k] >> 1 | (k + 1 < n ? (unit)(line[k + 1] << (UNIT - 1)) : 0));
    }
}

void @name@_step(const @name@_unit *cells, @name@_unit *next, size_t rows, size_t columns)
{
    enum { CHANNELS = @outputs@, PERIODIC = @periodic@ };
    static const unsigned char place[3][3] = {{0, 1, 2}, {3, 8, 4}, {5, 6, 7}}; /* neighbors by rows, then the cell */
    MEMORY unit in[9 * CHANNELS * GROUPS] ALIGNED;
    MEMORY unit out[CHANNELS * GROUPS] ALIGNED;
    const size_t units = (columns + UNIT - 1) / UNIT; /* of a row */
    const size_t top = columns > 0 ? (columns - 1) % UNIT : 0; /* bit of the last cell of a row, in its last unit */
    size_t row, start, channel, group, dy;
    for (start = 0; start < units; start += GROUPS)
        for (row = 0; row < rows; row++) {
            const size_t n = units - start < GROUPS ? units - start : GROUPS;
            for (channel = 0; channel < CHANNELS; channel++)
                for (dy = 0; dy < 3; dy++) {
                    const int inside = PERIODIC || (row + dy > 0 && row + dy <= rows);
                    const unit *line = cells + (channel * rows + (row + dy + rows - 1) % rows) * units;
                    unit *left = in + (place[dy][0] * CHANNELS + channel) * GROUPS;
                    unit *here = in + (place[dy][1] * CHANNELS + channel) * GROUPS;
                    unit *right = in + (place[dy][2] * CHANNELS + channel) * GROUPS;
                    if (row > 0 && dy < 2) { /* a row that was below the last one, or its own */
                        for (group = 0; group < GROUPS; group++) {
                            left[group] = in[(place[dy + 1][0] * CHANNELS + channel) * GROUPS + group];
                            here[group] = in[(place[dy + 1][1] * CHANNELS + channel) * GROUPS + group];
                            right[group] = in[(place[dy + 1][2] * CHANNELS + channel) * GROUPS + group];
                        }
                        continue;
                    }
                    if (!inside) {
                        for (group = 0; group < GROUPS; group++)
                            left[group] = here[group] = right[group] = 0;
                        continue;
                    }
                    if (n == GROUPS)
                        @name@_shifted(line + start, left, here, right, GROUPS);
                    else
                        @name@_shifted(line + start, left, here, right, n);
                    if (start > 0)
                        left[0] |= (unit)(line[start - 1] >> (UNIT - 1));
                    else if (PERIODIC)
                        left[0] |= (unit)(line[units - 1] >> top & 1);
                    if (start + n < units)
                        right[n - 1] |= (unit)(line[start + n] << (UNIT - 1));
                    else if (PERIODIC)
                        right[n - 1] |= (unit)((line[0] & 1) << top);
                }
            @name@_words((const word *)in, (word *)out);
            for (channel = 0; channel < CHANNELS; channel++)
                for (group = 0; group < GROUPS && start + group < units; group++) {
                    const unit seen = start + group + 1 < units ? (unit)~(unit)0 : (unit)((unit)~(unit)0 >> (UNIT - 1 - top));
                    next[(channel * rows + row) * units + start + group] = out[channel * GROUPS + group] & seen;
                }
        }
}
