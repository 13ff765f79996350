
static void numbers_of_@port@(const unit *bits, size_t n, @type@ *numbers)
{
    enum { COUNT = @count@, BITS = @bits@, WIDTH = @width@, SIGN = @sign@ };
    size_t group, f, lane;
    int byte, b;
    for (group = 0; group < GROUPS && n > 0; group++, numbers += COUNT * UNIT) {
        const size_t lanes = n < UNIT ? n : UNIT;
        n -= lanes;
        for (f = 0; f < COUNT; f++)
            for (byte = 0; byte < WIDTH / 8; byte++) {
                unit r[8];
                for (b = 0; b < 8; b++) {
                    const int bit = 8 * byte + b < BITS ? 8 * byte + b : SIGN;
                    r[b] = bit < 0 ? 0 : bits[(f * BITS + (size_t)bit) * GROUPS + group];
                }
                transpose_bytes(r);
                for (lane = 0; lane < lanes; lane++) {
                    const unsigned value = r[lane % 8] >> lane / 8 * 8 & 255;
                    @type@ *to = numbers + lane * COUNT + f;
                    *to = (@type@)((byte > 0 ? (@unsigned@)*to : 0) | (@unsigned@)value << 8 * byte);
                }
            }
    }
}
