
/* The next state of an automaton on @grid@. For each channel and row, `cells` has the cells of the row in
 * integers of 64 bits, or of a word if that is smaller: column 0 is the lowest bit of the first one. Bits behind the last
 * column are 0. `next` does not overlap. */
#if @NAME@_LANES >= 64
typedef uint64_t @name@_unit;
#else
typedef @name@_word @name@_unit;
#endif
void @name@_step(const @name@_unit *cells, @name@_unit *next, size_t rows, size_t columns);
