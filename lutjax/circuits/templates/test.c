#include <stdio.h>
@includes@#include "@name@.h"

@arrays@

int main(void)
{
    unsigned long k, i, wrong = 0;
@calls@
    printf("@name@: @n@ samples, %lu wrong\n", wrong);
    return wrong != 0;
}
