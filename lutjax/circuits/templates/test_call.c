@call@    for (k = 0; k < @n@; k++) {
        int same = 1;
@checks@
        wrong += !same;
    }
