/* What avr-libc has in avr/pgmspace.h of all that a circuit needs. */
#include <stdint.h>
#define PROGMEM __attribute__((section(".progmem.data")))
static inline uint8_t pgm_read_byte(const void *p)
{
    uint8_t x;
    __asm__("lpm %0, Z" : "=r"(x) : "z"(p));
    return x;
}
static inline uint16_t pgm_read_word(const void *p)
{
    uint16_t x;
    __asm__("lpm %A0, Z+\n\tlpm %B0, Z" : "=&r"(x), "+z"(p));
    return x;
}
static inline uint32_t pgm_read_dword(const void *p)
{
    uint32_t x;
    __asm__("lpm %A0, Z+\n\tlpm %B0, Z+\n\tlpm %C0, Z+\n\tlpm %D0, Z" : "=&r"(x), "+z"(p));
    return x;
}
