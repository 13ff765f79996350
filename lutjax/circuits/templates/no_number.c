
static @type@ number_@port@(double x)
{
    return x != x ? @missing@ : @numbers@;
}
