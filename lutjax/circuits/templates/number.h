
/* The number that an answer stands for, which is how many bits are 1: times the scale of the model, plus its offset. */
static inline float @name@_number(uint32_t answer)
{
    return (float)answer * @scale@ + @offset@;
}
