#include <stdio.h>
#include "@name@.h"

@arrays@

int main(void)
{
    unsigned long k, i, wrong = 0;
    for (k = 0; k < @n@; k++) {
        int same = 1;
@call@
@checks@
        wrong += !same;
    }
    printf("@name@: @n@ samples, %lu wrong\n", wrong);
    return wrong != 0;
}
