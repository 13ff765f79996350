
/* A row of the table. */
@constants@

@row@

/* The answer to a row. */
static inline @result@ @name@_predict_row(@parameters@)
{
    @call@;
}
