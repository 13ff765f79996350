
int @name@_code_@port@(const char *text)
{
    static const char *const texts[] = {@texts@};
    int code;
    if (text == NULL || *text == 0)
        return @missing@;
    for (code = 0; code < @count@; code++)
        if (strcmp(text, texts[code]) == 0)
            return code;
    return @other@;
}
