// A circuit that reads rows of a table: a field for each column, and the answer in words.
{
  const { columns, classes, target, kind, scale, offset } = data.about;
  const [port] = Object.values(outputs), isNumber = (column) => column.kind === "number";
  const OTHER = "other", MISSING = "missing";

  // Return the field of a column, and functions that read and write its cell.
  function fieldOf(column, i) {
    if (isNumber(column)) {
      const field = make("input", { type: "number", id: `field-${i}`, placeholder: MISSING, step: 10 ** -column.decimals });
      if (column.least !== null) field.min = column.least;
      if (column.largest !== null) field.max = column.largest;
      const range = column.least === null || column.largest === null ? "" : `${column.least} to ${column.largest} in the data`;
      return {
        field, range,
        get: () => (Number.isFinite(field.valueAsNumber) ? field.valueAsNumber : null),
        set: (cell) => (field.value = cell === null ? "" : cell),
      };
    }
    const field = make("select", { id: `field-${i}` });
    column.values.forEach((value, code) => field.append(make("option", { value: code, textContent: value })));
    field.append(make("option", { value: OTHER, textContent: "(any other)" }), make("option", { value: MISSING, textContent: "(missing)" }));
    return {
      field, range: "",
      // No category is a number, so a code that stands for any other one does.
      get: () => (field.value === MISSING ? null : field.value === OTHER ? 0 : column.values[field.value]),
      set: (cell) => {
        const code = column.values.indexOf(cell);
        field.value = cell === null ? MISSING : code < 0 ? OTHER : code;
      },
    };
  }

  const fields = columns.map((column, i) => {
    const made = fieldOf(column, i);
    made.field.addEventListener("input", update);
    find("fields").append(make("tr", {},
      make("th", { scope: "row" }, make("label", { htmlFor: `field-${i}`, textContent: column.name })),
      make("td", {}, made.field), make("td", { className: "quiet", textContent: made.range })));
    return made;
  });

  const isVotes = classes && port.count === classes.length && port.count > 1;
  const bars = [];
  find("target").textContent = target ? `${target}:` : "";
  if (isVotes) {
    find("votes").hidden = false;
    for (const name of classes) {
      const fill = make("div"), count = make("td");
      const row = make("tr", {}, make("th", { scope: "row", textContent: name }),
        make("td", {}, make("div", { className: "bar" }, fill)), count);
      find("votes").tBodies[0].append(row);
      bars.push({ row, fill, count });
    }
  }

  const votesOf = (count) => `${count} ${count === 1 ? "vote" : "votes"}`;

  // Show the answer to the numbers of the output port.
  function show(numbers) {
    if (isVotes) {
      const best = numbers.indexOf(Math.max(...numbers)), most = Math.max(1, ...numbers);
      find("class").textContent = classes[best];
      find("answer-text").textContent = `${numbers.map((count, k) => `${votesOf(count)} for ${classes[k]}`).join(", ")}.` +
        (numbers.filter((count) => count === numbers[best]).length > 1 ? " Of equal votes the first class wins." : "");
      bars.forEach(({ row, fill, count }, k) => {
        row.className = k === best ? "best" : "";
        fill.style.width = `${(100 * numbers[k]) / most}%`;
        count.textContent = numbers[k];
      });
    } else if (kind === "regression") {
      const count = numbers.reduce((sum, number) => sum + number, 0);
      find("class").textContent = Number((count * scale + offset).toPrecision(6));
      find("answer-text").textContent = `${count} bits are 1, times ${scale.toPrecision(6)}, plus ${offset.toPrecision(6)}.`;
    } else if (classes && port.count === 1) {
      find("class").textContent = classes[numbers[0]] ?? numbers[0];
    } else {
      find("outputs").hidden = false;
      find("outputs").textContent = `${port.name}: ${numbers.join(" ")}`;
    }
  }

  const rowHere = () => fields.map(({ get }) => get());
  function update() {
    const row = rowHere();
    evaluator.use(1).set(wordsOfRows(data, [row]));
    evaluator.run();
    show(numbersOf(port));
    showGates();
    return row;
  }

  function set(row) {
    row.forEach((cell, i) => fields[i].set(cell));
    update();
  }

  let next = 0;
  const another = () => set(data.rows[next++ % data.rows.length]);
  find("nothing").addEventListener("click", () => set(columns.map(() => null)));
  find("another").addEventListener("click", another);
  find("another").hidden = data.rows.length < 2;
  if (data.rows.length) another();
  else set(columns.map((column) => (isNumber(column) ? column.fill : column.values[0] ?? null)));
  Object.assign(window.lutjax, { set, row: rowHere, get: () => numbersOf(port), answer: () => find("class").textContent });
}
