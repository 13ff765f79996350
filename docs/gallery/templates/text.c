/* What the page of the text model calls, compiled to WebAssembly. */
#include "language_model.h"
#include "tables.h"

#define EXPORT(name) __attribute__((export_name(name)))

lm_value lm_tables[LM_TABLE_SIZE];
static lm_state state;
static int32_t logits[LM_BYTES];
static uint64_t draws;

EXPORT("tables") lm_value *tables(void) { return lm_tables; }

EXPORT("size") int32_t size(void) { return (int32_t)sizeof lm_tables; }

EXPORT("start") void start(int32_t seed)
{
    lm_start(&state);
    draws = (uint64_t)(uint32_t)seed;
}

EXPORT("feed") void feed(int32_t byte) { lm_feed(&state, (uint8_t)byte); }

EXPORT("next") int32_t next(int32_t thousandths, int32_t top_k)
{
    lm_logits(&state, logits);
    uint8_t byte = lm_choose(logits, (uint32_t)thousandths, top_k, &draws);
    lm_feed(&state, byte);
    return byte;
}
