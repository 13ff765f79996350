
static @type@ number_@port@(double x)
{
    static const double thresholds[@count@] = {@thresholds@};
    static const @type@ numbers[@count@ + 1] = {@numbers@};
    size_t low = 0, high = @count@;
    if (x != x)
        return @missing@;
    while (low < high) { /* how many thresholds x is above */
        const size_t middle = (low + high) / 2;
        if (x > thresholds[middle])
            low = middle + 1;
        else
            high = middle;
    }
    return numbers[low];
}
