
/* Rows of the table. */
@constants@

typedef struct {
@members@
} @name@_row;

/* The code of a category by its name in UTF-8; NULL and "" are missing. */
@codes@

/* The answers to n rows. */
void @name@_predict_rows(const @name@_row *rows, size_t n, @outputs@);
