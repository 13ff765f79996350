
static void numbers_of_@port@(const unit *bits, size_t n, @type@ *numbers)
{
    enum { COUNT = @count@, BITS = @bits@, WIDTH = @width@, SIGN = @sign@ };
    size_t f, group, first, lane, i;
    int byte, b;
    for (f = 0; f < COUNT; f++)
        for (byte = 0; byte < WIDTH / 8; byte++) {
            uint64_t a[8][ROW] ALIGNED;
            for (b = 0; b < 8; b++) {
                const int bit = 8 * byte + b < BITS ? 8 * byte + b : SIGN;
                for (group = 0; group < ROW; group++)
                    a[b][group] = bit < 0 || group >= GROUPS ? 0 : bits[(f * BITS + (size_t)bit) * GROUPS + group];
            }
            TRANSPOSE((row *)a, 1, 1)
            TRANSPOSE((row *)a, 1, 8)
            for (group = 0; group < GROUPS; group++)
                for (i = 0; i < UNIT / 8; i++) {
                    first = UNIT * group + 8 * i;
                    if (COUNT == 1 && WIDTH == 8 && first + 8 <= n && COPY(numbers + first, &a[i][group], 8))
                        continue;
                    for (lane = first; lane < first + 8 && lane < n; lane++) {
                        @type@ *to = numbers + lane * COUNT + f;
                        const @unsigned@ octet = (@unsigned@)(a[i][group] >> 8 * (lane - first) & 255);
                        *to = (@type@)((byte > 0 ? (@unsigned@)*to : 0) | octet << 8 * byte);
                    }
                }
        }
}
