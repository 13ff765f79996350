
/* Table rows. */
@constants@

typedef struct {
@members@
} @name@_row;

/* Return the code of a category, given its name in UTF-8. NULL and "" are missing cells. */
@codes@

/* Predict n rows. */
void @name@_predict_rows(const @name@_row *rows, size_t n, @outputs@);
