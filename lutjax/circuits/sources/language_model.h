/* A language model of look-up tables that reads and writes bytes. All of its numbers are whole ones: it compares, reads rows of
 * tables and adds them, and no sum can leave int32. No heap, no floating point, no variables of its own but the tables. */
#ifndef LANGUAGE_MODEL_H
#define LANGUAGE_MODEL_H

#include <stdint.h>

#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A text so far: for each layer the keys of the bytes that the next one sees, and the vector of the last byte. */
typedef struct {
    int32_t keys[LM_LAYERS][LM_WINDOW][LM_KEY_SIZE];
    int32_t z[LM_FEATURES];
    int32_t newest; /* place of the last byte's keys */
    int32_t filled; /* places that hold keys */
} lm_state;

/* Begin a text. */
void lm_start(lm_state *state);

/* Continue a text with a byte. */
void lm_feed(lm_state *state, uint8_t byte);

/* Logits of the byte after the last, in units of 2**-LM_LOGIT_FRACTION. */
void lm_logits(const lm_state *state, int32_t logits[LM_BYTES]);

/* The next byte. A temperature of 0 takes the likeliest, the first of several; else one is drawn from the top_k likeliest, 1 to
 * LM_BYTES, with 64 bits of random, which counts the draws.
 *
 * The weight of a byte that is d units below the largest logit is 2**-e, where e = d log2(exp(1)) / temperature, cut off after 16
 * bits. Draws are those of SplitMix64, modulo the sum of the weights. */
uint8_t lm_choose(const int32_t logits[LM_BYTES], uint32_t thousandths_of_temperature, int top_k, uint64_t *random);

#ifdef __cplusplus
}
#endif

#endif
