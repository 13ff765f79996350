/* @title@; @name@.h describes it. */
#include "@name@.h"

typedef @name@_word word;

#if @NAME@_LANES > 64
#define UNIT 64
#else
#define UNIT @NAME@_LANES /* bits of an integer of which words are made */
#endif
#define GROUPS (@NAME@_LANES / UNIT)
#if UNIT == 64
typedef uint64_t unit;
#else
typedef word unit;
#endif

#ifdef @NAME@_STATIC
#define MEMORY static
#else
#define MEMORY
#endif

#ifdef __GNUC__
#define ALIGNED __attribute__((aligned(64)))
#define SEPARATE __attribute__((noinline))
#else
#define ALIGNED
#define SEPARATE
#endif

@macros@
@body@

/* Numbers to bits and back. */

#ifdef __GNUC__
#define ROW 8 /* 64-bit integers that are transposed side by side */
typedef uint64_t row __attribute__((vector_size(64), aligned(8), may_alias));
#else
#define ROW 1
typedef uint64_t row;
#endif
#if defined(__GNUC__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define COPY(to, from, bytes) (__builtin_memcpy(to, from, bytes), 1)
#else
#define COPY(to, from, bytes) 0
#endif

/* In each column of UNIT bits, bit j of row k becomes bit k of row j. */
static void transpose(row *a)
{
    uint64_t low = ~(uint64_t)0 / (((uint64_t)1 << UNIT / 2) + 1);
    int d, k;
    for (d = UNIT / 2; d > 0; d >>= 1, low ^= low << d)
        for (k = 0; k < UNIT; k = (k + d + 1) & ~d) {
            const row t = (a[k] >> (uint64_t)d ^ a[k + d]) & low;
            a[k] ^= t << (uint64_t)d;
            a[k + d] ^= t;
        }
}

/* Bit q of byte i of word b becomes bit b of byte i of word q. */
static void transpose_bytes(unit *r)
{
    static const unsigned char lows[3] = {0x0F, 0x33, 0x55};
    int s, k, d;
    for (s = 0, d = 4; s < 3; s++, d >>= 1) {
        const unit low = (unit)((unit)~(unit)0 / 255 * lows[s]);
        for (k = 0; k < 8; k = (k + d + 1) & ~d) {
            const unit t = (unit)((r[k] >> d ^ r[k + d]) & low);
            r[k] = (unit)(r[k] ^ (unit)(t << d));
            r[k + d] = (unit)(r[k + d] ^ t);
        }
    }
}
@ports@
void @name@_predict(@parameters@)
{
    MEMORY unit in[@in_words@ * GROUPS] ALIGNED;
    MEMORY unit out[@out_words@ * GROUPS] ALIGNED;
    size_t done;
    for (done = 0; done < n; done += @NAME@_LANES) {
        const size_t left = n - done < @NAME@_LANES ? n - done : @NAME@_LANES;
@calls_in@
        @name@_words((const word *)in, (word *)out);
@calls_out@
    }
}
