// Rows of a table as the whole numbers of the input ports. Columns are those of `about`; a cell is a number, a text, or null where it is missing.

// Return the whole number of a cell: of a number that of all that are above the same thresholds, of a text its code.
function wholeOf(column, cell) {
  if (cell === null) return column.missing_code;
  if (column.kind === "category") {
    const code = column.values.indexOf(cell);
    return code < 0 ? column.values.length : code;
  }
  let low = 0, high = column.thresholds.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (cell > column.thresholds[middle]) low = middle + 1;
    else high = middle;
  }
  return column.codes[low];
}

// Return the words of all inputs for rows: bit j of word w is row 32 * w + j.
function wordsOfRows(data, rows) {
  const n = Math.ceil(rows.length / 32), bits = data.inputs.reduce((sum, port) => sum + port.bits, 0);
  const words = new Uint32Array(bits * n);
  rows.forEach((row, r) => {
    let first = 0;
    data.about.columns.forEach((column, i) => {
      const { bits } = data.inputs[i], code = wholeOf(column, row[i]), whole = code < 0 ? code + 2 ** bits : code;
      for (let k = 0; k < bits; k++) {
        if (Math.floor(whole / 2 ** k) % 2) words[(first + k) * n + (r >> 5)] |= 1 << (r & 31);
      }
      first += bits;
    });
  });
  return words;
}
