#include "@name@.h"
#include "detectors.h"

@arrays@
void @name@(const int32_t x[@inputs@], int32_t y[@outputs@])
{
    for (int32_t k = 0; k < @outputs@; k++)
        y[k] = 0;
    for (int32_t t = 0; t < @detectors@; t++) {
        @unused@uint32_t row = @row@;
        const @dtype@ *value = values + ((uint32_t)t * @rows@ + row) * @columns@;
        int32_t *sum = @sum@;
        @place@for (int32_t k = 0; k < @columns@; k++)
            @added@;
    }
@shifted@}
