/* @title@
 *
@summary@
 *
 * Lanes: a word holds one bit of as many samples as it has bits, lane 0 in the lowest bit; words of more than 64 bits are
 * arrays of uint64_t, lanes 0 to 63 in the first. -D@NAME@_LANES=8, 16, 32 or 64 works with every C99 compiler, 128, 256 and
 * 512 with GCC and Clang. Without it the widest is taken that the instructions chosen for the compiler have (-march=native).
 *
 * Memory: @NAME@_SLOTS words hold values; @name@_predict needs @NAME@_INPUTS + @NAME@_OUTPUTS words more, and at most 5 kB to
 * convert numbers (8 bytes for each lane where words have at most 32 bits). All of it lies on the stack, so that threads may call
 * at the same time; -D@NAME@_STATIC puts the words in static memory, for one thread. Nothing is allocated.
 */
#ifndef @NAME@_H
#define @NAME@_H

#include <stddef.h>
#include <stdint.h>

#ifndef @NAME@_LANES
#if defined(__GNUC__) && defined(__AVX512F__)
#define @NAME@_LANES 512
#elif defined(__GNUC__) && defined(__AVX2__)
#define @NAME@_LANES 256
#elif defined(__GNUC__) && (defined(__SSE2__) || defined(__ARM_NEON))
#define @NAME@_LANES 128
#elif UINTPTR_MAX > 0xFFFFFFFFu
#define @NAME@_LANES 64
#else
#define @NAME@_LANES 32
#endif
#endif

#if @NAME@_LANES == 8
typedef uint8_t @name@_word;
#elif @NAME@_LANES == 16
typedef uint16_t @name@_word;
#elif @NAME@_LANES == 32
typedef uint32_t @name@_word;
#elif @NAME@_LANES == 64
typedef uint64_t @name@_word;
#elif defined(__GNUC__) && (@NAME@_LANES == 128 || @NAME@_LANES == 256 || @NAME@_LANES == 512)
typedef uint64_t @name@_word __attribute__((vector_size(@NAME@_LANES / 8), aligned(8), may_alias));
#else
#error "@NAME@_LANES is 8, 16, 32 or 64; with GCC and Clang also 128, 256 or 512"
#endif

#define @NAME@_INPUTS @inputs@
#define @NAME@_OUTPUTS @outputs@
#define @NAME@_SLOTS @slots@

#ifdef __cplusplus
extern "C" {
#endif

/* Bits of @NAME@_LANES samples: x[k] is bit k of the inputs, y[k] bit k of the outputs; they do not overlap. */
void @name@_words(const @name@_word *x, @name@_word *y);

/* Numbers of n samples, sample after sample:
@numbers@ */
void @name@_predict(@parameters@);
@step@@number@@rows@
#ifdef __cplusplus
}
#endif

#endif
