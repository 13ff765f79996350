/* @title@; @name@.h describes it. */
#include "@name@.h"@includes@

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

#if defined(__GNUC__) && UNIT == 64
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

/* The bits d higher of p change places with the lower ones of q. */
#define SWAP(p, q, d) \
    { \
        const row t_ = (p >> (uint64_t)(d) ^ q) & (uint64_t)(~(uint64_t)0 / (((uint64_t)1 << (d)) + 1)); \
        p ^= t_ << (uint64_t)(d); \
        q ^= t_; \
    }

/* Of eight rows, `apart` from one another: piece j of row k becomes piece k of row j, of each eight pieces of so many bits. */
#define TRANSPOSE(a, apart, bits) \
    { \
        row r0 = (a)[0], r1 = (a)[apart], r2 = (a)[2 * apart], r3 = (a)[3 * apart]; \
        row r4 = (a)[4 * apart], r5 = (a)[5 * apart], r6 = (a)[6 * apart], r7 = (a)[7 * apart]; \
        SWAP(r0, r4, 4 * bits) SWAP(r1, r5, 4 * bits) SWAP(r2, r6, 4 * bits) SWAP(r3, r7, 4 * bits) \
        SWAP(r0, r2, 2 * bits) SWAP(r1, r3, 2 * bits) SWAP(r4, r6, 2 * bits) SWAP(r5, r7, 2 * bits) \
        SWAP(r0, r1, bits) SWAP(r2, r3, bits) SWAP(r4, r5, bits) SWAP(r6, r7, bits) \
        (a)[0] = r0, (a)[apart] = r1, (a)[2 * apart] = r2, (a)[3 * apart] = r3; \
        (a)[4 * apart] = r4, (a)[5 * apart] = r5, (a)[6 * apart] = r6, (a)[7 * apart] = r7; \
    }

/* In each column of UNIT bits, bit j of row k becomes bit k of row j. */
static void transpose(row *a)
{
    int k;
#if UNIT == 64
    for (k = 0; k < 8; k++)
        TRANSPOSE(a + k, 8, 8)
#elif UNIT > 8
    int d;
    for (d = UNIT / 2; d >= 8; d >>= 1)
        for (k = 0; k < UNIT; k = (k + d + 1) & ~d)
            SWAP(a[k], a[k + d], d)
#endif
    for (k = 0; k < UNIT; k += 8)
        TRANSPOSE(a + k, 1, 1)
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
@step@@rows@