
/* Rows to numbers. */
@parts@

void @name@_predict_rows(const @name@_row *rows, size_t n, @outputs@)
{
    size_t done, k;
    for (done = 0; done < n; done += @NAME@_LANES) {
        const size_t left = n - done < @NAME@_LANES ? n - done : @NAME@_LANES;
@locals@
        for (k = 0; k < left; k++) {
            const @name@_row *row = rows + done + k;
@codes@
        }
        @name@_predict(@arguments@);
    }
}
