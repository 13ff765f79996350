
/* Table row. */
@constants@

@row@

/* Predict a row. */
static inline @result@ @name@_predict_row(@parameters@)
{
    @call@;
}
