
void @name@_step(const @name@_unit *cells, @name@_unit *next, size_t rows, size_t columns)
{
    enum { CHANNELS = @outputs@, PERIODIC = @periodic@ };
    static const unsigned char place[3][3] = {{0, 1, 2}, {3, 8, 4}, {5, 6, 7}}; /* neighbours by rows, then the cell */
    MEMORY unit in[9 * CHANNELS * GROUPS] ALIGNED;
    MEMORY unit out[CHANNELS * GROUPS] ALIGNED;
    const size_t units = (columns + UNIT - 1) / UNIT; /* of a row */
    const size_t top = columns > 0 ? (columns - 1) % UNIT : 0; /* bit of the last cell of a row, in its last unit */
    size_t row, start, channel, group, dy;
    for (row = 0; row < rows; row++)
        for (start = 0; start < units; start += GROUPS) {
            for (channel = 0; channel < CHANNELS; channel++)
                for (dy = 0; dy < 3; dy++) {
                    const int inside = PERIODIC || (row + dy > 0 && row + dy <= rows);
                    const unit *line = cells + (channel * rows + (row + dy + rows - 1) % rows) * units;
                    unit *left = in + (place[dy][0] * CHANNELS + channel) * GROUPS;
                    unit *here = in + (place[dy][1] * CHANNELS + channel) * GROUPS;
                    unit *right = in + (place[dy][2] * CHANNELS + channel) * GROUPS;
                    for (group = 0; group < GROUPS; group++) {
                        const size_t k = start + group;
                        unit before = 0, after = 0; /* at the lowest bit, at the highest or that of the last cell */
                        left[group] = here[group] = right[group] = 0;
                        if (!inside || k >= units)
                            continue;
                        if (k > 0)
                            before = (unit)(line[k - 1] >> (UNIT - 1));
                        else if (PERIODIC)
                            before = (unit)(line[units - 1] >> top & 1);
                        if (k + 1 < units)
                            after = (unit)(line[k + 1] << (UNIT - 1));
                        else if (PERIODIC)
                            after = (unit)((line[0] & 1) << top);
                        here[group] = line[k];
                        left[group] = (unit)((unit)(line[k] << 1) | before);
                        right[group] = (unit)(line[k] >> 1 | after);
                    }
                }
            @name@_words((const word *)in, (word *)out);
            for (channel = 0; channel < CHANNELS; channel++)
                for (group = 0; group < GROUPS && start + group < units; group++) {
                    const unit seen = start + group + 1 < units ? (unit)~(unit)0 : (unit)((unit)~(unit)0 >> (UNIT - 1 - top));
                    next[(channel * rows + row) * units + start + group] = out[channel * GROUPS + group] & seen;
                }
        }
}
