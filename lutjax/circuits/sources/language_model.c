#include "language_model.h"

#include "detectors.h"
#include "tables.h"

#define ATTENTION_ROWS ((size_t)1 << LM_ATTENTION_BITS)
#define ATTENTION_SIZE (LM_ATTENTION_DETECTORS * ATTENTION_ROWS * LM_FEATURES)
#define FFN_ROWS ((size_t)1 << LM_FFN_ANCHORS)
#define FFN_SIZE (LM_FFN_DETECTORS * FFN_ROWS * LM_FEATURES)
#define LAYER_SIZE (ATTENTION_SIZE + FFN_SIZE)

static void add_row(int32_t *sums, const lm_value *row, int32_t n)
{
    for (int32_t k = 0; k < n; k++)
        sums[k] += row[k];
}

/* Add to a vector what the tables gave, in the units of the vector. */
static void add_sums(int32_t *z, const int32_t *sums, const uint8_t *shifts)
{
    for (int k = 0; k < LM_FEATURES; k++)
        z[k] += sums[k] * ((int32_t)1 << shifts[k]);
}

/* Add the rows of fully connected tables that a vector addresses. */
static void look_up(const int32_t *z, const uint16_t *anchors, const lm_value *tables, int32_t n_detectors,
                    int n_anchors, int32_t n_outputs, int32_t *sums)
{
    for (int32_t t = 0; t < n_detectors; t++) {
        uint32_t row = lutjax_row(z, anchors + 2 * t * n_anchors, n_anchors, 1);
        add_row(sums, tables + (((size_t)t << n_anchors) + row) * (size_t)n_outputs, n_outputs);
    }
}

/* The keys of the byte at a distance before the newest. */
static const int32_t *key_at(const lm_state *state, int layer, int32_t distance)
{
    int32_t place = state->newest - distance;
    return state->keys[layer][place < 0 ? place + LM_WINDOW : place];
}

#if LM_PAIRS
/* Detect each pair of the vector and an earlier one as one joint vector: the earlier, the later, and their distance's positions. */
static void attend(const lm_state *state, int layer, const int32_t *z, int32_t *own, int32_t *sums)
{
    const uint16_t *anchors = lm_attention_anchors + 2 * (size_t)layer * LM_ATTENTION_DETECTORS * LM_ATTENTION_ANCHORS;
    const lm_value *tables = lm_tables + (size_t)layer * LAYER_SIZE;
    int32_t joint[2 * LM_FEATURES + LM_POSITION_BITS];
    for (int k = 0; k < LM_FEATURES; k++)
        joint[LM_FEATURES + k] = own[k] = z[k];
    for (int32_t distance = 0; distance < state->filled; distance++) {
        const int32_t *key = key_at(state, layer, distance);
        for (int k = 0; k < LM_FEATURES; k++)
            joint[k] = key[k];
        for (int t = 0; t < LM_ATTENTION_DETECTORS; t++) {
#if LM_POSITION_BITS
            const int32_t *position = lm_positions
                + (((size_t)layer * LM_WINDOW + (size_t)distance) * LM_POSITION_LISTS + (size_t)(t % LM_POSITION_LISTS))
                    * LM_POSITION_BITS;
            for (int k = 0; k < LM_POSITION_BITS; k++)
                joint[2 * LM_FEATURES + k] = position[k];
#endif
            uint32_t row = lutjax_row(joint, anchors + 2 * t * LM_ATTENTION_ANCHORS, LM_ATTENTION_ANCHORS, 1);
            add_row(sums, tables + ((size_t)t * ATTENTION_ROWS + row) * LM_FEATURES, LM_FEATURES);
        }
    }
}
#else
/* Put the bits of the vector, of an earlier one and of their distance side by side. */
static void attend(const lm_state *state, int layer, const int32_t *z, int32_t *own, int32_t *sums)
{
    const uint16_t *anchors = lm_attention_anchors + 2 * (size_t)layer * LM_ATTENTION_DETECTORS * LM_ATTENTION_ANCHORS;
    const lm_value *tables = lm_tables + (size_t)layer * LAYER_SIZE;
    for (int t = 0; t < LM_ATTENTION_DETECTORS; t++)
        own[t] = (int32_t)lutjax_row(z, anchors + 2 * t * LM_ATTENTION_ANCHORS, LM_ATTENTION_ANCHORS, 1);
    for (int32_t distance = 0; distance < state->filled; distance++) {
        const int32_t *key = key_at(state, layer, distance);
        for (int t = 0; t < LM_ATTENTION_DETECTORS; t++) {
            size_t row = (((size_t)own[t] << LM_ATTENTION_ANCHORS) | (size_t)key[t]) << LM_POSITION_BITS;
#if LM_POSITION_BITS
            row |= (size_t)lm_positions[((size_t)layer * LM_WINDOW + (size_t)distance) * LM_POSITION_LISTS
                                        + (size_t)(t % LM_POSITION_LISTS)];
#endif
            add_row(sums, tables + ((size_t)t * ATTENTION_ROWS + row) * LM_FEATURES, LM_FEATURES);
        }
    }
}
#endif

void lm_start(lm_state *state)
{
    for (int k = 0; k < LM_FEATURES; k++)
        state->z[k] = 0;
    state->newest = -1;
    state->filled = 0;
}

void lm_feed(lm_state *state, uint8_t byte)
{
    int32_t *z = state->z, next = state->newest + 1 == LM_WINDOW ? 0 : state->newest + 1;
    for (int k = 0; k < LM_FEATURES; k++)
        z[k] = lm_embedding[(int32_t)byte * LM_FEATURES + k];
    for (int layer = 0; layer < LM_LAYERS; layer++) {
        int32_t own[LM_KEY_SIZE], sums[LM_FEATURES] = {0};
        attend(state, layer, z, own, sums);
        add_sums(z, sums, lm_attention_shifts + layer * LM_FEATURES);
        for (int k = 0; k < LM_KEY_SIZE; k++)
            state->keys[layer][next][k] = own[k]; /* in the place of the oldest, which has been read */
#if LM_FFN_DETECTORS
        int32_t found[LM_FEATURES] = {0};
        look_up(z, lm_ffn_anchors + 2 * (size_t)layer * LM_FFN_DETECTORS * LM_FFN_ANCHORS,
                lm_tables + (size_t)layer * LAYER_SIZE + ATTENTION_SIZE, LM_FFN_DETECTORS, LM_FFN_ANCHORS, LM_FEATURES,
                found);
        add_sums(z, found, lm_ffn_shifts + layer * LM_FEATURES);
#endif
    }
    state->newest = next;
    if (state->filled < LM_WINDOW)
        state->filled++;
}

void lm_logits(const lm_state *state, int32_t logits[LM_BYTES])
{
    for (int k = 0; k < LM_BYTES; k++)
        logits[k] = 0;
    look_up(state->z, lm_unembed_anchors, lm_tables + LM_LAYERS * LAYER_SIZE, LM_UNEMBED_DETECTORS, LM_UNEMBED_ANCHORS,
            LM_BYTES, logits);
    for (int k = 0; k < LM_BYTES; k++)
        logits[k] *= (int32_t)1 << lm_unembed_shifts[k];
}

/* 2**-(exponent / 2**16) in units of 2**-31. */
static uint64_t power(uint64_t exponent)
{
    uint64_t whole = exponent >> 16, coarse = lm_powers[exponent >> 8 & 255], fine = lm_powers[256 + (exponent & 255)];
    return whole > 31 ? 0 : coarse * fine >> 31 >> whole;
}

static uint64_t draw(uint64_t *random)
{
    uint64_t r = *random += UINT64_C(0x9E3779B97F4A7C15);
    r = (r ^ r >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    r = (r ^ r >> 27) * UINT64_C(0x94D049BB133111EB);
    return r ^ r >> 31;
}

uint8_t lm_choose(const int32_t logits[LM_BYTES], uint32_t thousandths_of_temperature, int top_k, uint64_t *random)
{
    uint64_t weights[LM_BYTES], total = 0, divisor = (uint64_t)thousandths_of_temperature << LM_LOGIT_FRACTION, drawn;
    int best = 0;
    for (int k = 1; k < LM_BYTES; k++)
        if (logits[k] > logits[best])
            best = k;
    if (thousandths_of_temperature == 0)
        return (uint8_t)best;
    for (int k = 0; k < LM_BYTES; k++) {
        int rank = 0; /* likelier bytes, and those before it that are as likely */
        for (int j = 0; j < LM_BYTES && top_k < LM_BYTES; j++)
            rank += logits[j] > logits[k] || (logits[j] == logits[k] && j < k);
        /* 94548 is log2(exp(1)) in units of 2**-16 */
        weights[k] = rank >= top_k ? 0 : power((uint64_t)((int64_t)logits[best] - logits[k]) * 94548 * 1000 / divisor);
        total += weights[k];
    }
    drawn = draw(random) % total;
    for (int k = 0; k < LM_BYTES; k++) {
        if (drawn < weights[k])
            return (uint8_t)k;
        drawn -= weights[k];
    }
    return (uint8_t)best; /* never reached: the weights sum to the total */
}
