#include <stddef.h>
#include <stdint.h>
#include "@name@.h"

/* A sample in, its answers out: what a simulator runs. */
@arrays@

void run(void);
void done(void);
void *memset(void *to, int value, size_t n);
void *memcpy(void *to, const void *from, size_t n);

__attribute__((used)) void done(void)
{
    for (;;)
        __asm__ volatile("nop");
}

__attribute__((used)) void run(void)
{
@call@
}

/* What compilers call, and a board has in its library. */
__attribute__((used)) void *memset(void *to, int value, size_t n)
{
    volatile unsigned char *p = (unsigned char *)to;
    while (n-- > 0)
        *p++ = (unsigned char)value;
    return to;
}

__attribute__((used)) void *memcpy(void *to, const void *from, size_t n)
{
    volatile unsigned char *p = (unsigned char *)to;
    const unsigned char *q = (const unsigned char *)from;
    while (n-- > 0)
        *p++ = *q++;
    return to;
}
