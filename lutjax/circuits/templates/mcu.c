/* @title@; @name@.h describes it. */
#include "@name@.h"

#ifdef __GNUC__
#define SEPARATE __attribute__((noinline))
#else
#define SEPARATE
#endif

/* A bit is a word whose lowest bit counts; where MASKS is 1 all its other bits are the same. */
#if defined(__AVR__)
#include <avr/pgmspace.h>
#define MASKS 1
typedef int8_t word;
#define FLASH PROGMEM
#define READ8(p) pgm_read_byte(p)
#define READ16(p) pgm_read_word(p)
#define READ32(p) pgm_read_dword(p)
#else
#ifdef __arm__
#define MASKS 1
#else
#define MASKS 0
#endif
typedef int32_t word;
#define FLASH
#define READ8(p) (*(p))
#define READ16(p) (*(p))
#define READ32(p) (*(p))
#endif
typedef int8_t cell; /* a word in memory */
typedef @sum@ sum;

#if MASKS
#define TRUTH(x) ((word)(0 - (word)(x)))
#define TIMES(g, b) ((sum)((sum)(g) & (sum)((sum)1 << (b)))) /* 1 << b where g is set */
#define ONE(g) ((sum)(0 - (sum)(g)))
#else
#define TRUTH(x) ((word)(x))
#define TIMES(g, b) ((sum)((sum)((g) & 1) << (b)))
#define ONE(g) ((sum)((g) & 1))
#endif
#define BIT(x, b) TRUTH((x) >> (b) & 1)

/* Whether a number is below a constant: of type uint8_t, of at most 22 bits, or any. */
#define LESS(x, k) TRUTH((x) < (k))
#if defined(__arm__)
#define LESS22(x, k) ((word)((int32_t)(x) - (int32_t)(k)) >> 24)
#define LESS8(x, k) LESS22(x, k)
#elif defined(__AVR__) && defined(__GNUC__)
#define LESS22(x, k) LESS(x, k)
#define LESS8(x, k) \
    __extension__({ \
        word m_; \
        __asm__("cpi %1, %2\n\tsbc %0, %0" : "=r"(m_) : "d"((uint8_t)(x)), "M"(k)); \
        m_; \
    })
#else
#define LESS22(x, k) LESS(x, k)
#define LESS8(x, k) LESS(x, k)
#endif

@macros@

@body@

@result@ @name@_predict(@parameters@)
{
@code@
}
