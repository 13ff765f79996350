// Any circuit: bits to switch, and the numbers that come out.
{
  const state = Object.values(inputs).map((port) => ({ port, numbers: Array(port.count).fill(0), show: null }));
  const bounds = (port) => (port.signed ? [-(2 ** (port.bits - 1)), 2 ** (port.bits - 1) - 1] : [0, 2 ** port.bits - 1]);

  function update() {
    for (const { port, numbers, show } of state) {
      setNumbers(port, numbers);
      show();
    }
    evaluator.run();
    for (const { port, show } of results) show(numbersOf(port));
    showGates();
  }

  // Rows of a port: a number in the notation of its format, and its bits with the highest first.
  function rowsOf(port, title, makeBit) {
    if (port.bits === 1) {
      const bits = Array.from({ length: port.count }, (_, i) => makeBit(i, 0));
      const list = make("div", { className: "bits" }, ...bits);
      return { view: make("div", {}, title, list), bits: bits.map((bit) => [bit]), cells: [] };
    }
    const bits = [], cells = [], table = make("table", { className: "numbers" });
    for (let i = 0; i < port.count; i++) {
      bits.push(Array.from({ length: port.bits }, (_, k) => makeBit(i, k)));
      cells.push(make("td"));
      const heading = make("th", { scope: "row", textContent: port.count > 1 ? `${port.name}[${i}]` : port.name });
      table.append(make("tr", {}, heading, cells[i], make("td", {}, make("div", { className: "bits" }, ...[...bits[i]].reverse()))));
    }
    return { view: make("div", {}, title, make("div", { className: "scroll" }, table)), bits, cells };
  }

  const titleOf = (port) => make("h3", {
    textContent: port.name + (port.count > 1 ? `, ${whole(port.count)} ${port.bits > 1 ? "numbers" : "bits"}` : ""),
  });
  const where = (port, i, k) =>
    (port.count > 1 ? `${port.name}[${i}]` : port.name) + (port.bits > 1 ? ` bit ${k}` : "");

  for (const entry of state) {
    const { port, numbers } = entry;
    const [least, most] = bounds(port), scale = 2 ** port.fraction;
    const rows = rowsOf(port, titleOf(port), (i, k) => {
      const button = make("button", { type: "button" });
      button.title = where(port, i, k);
      button.setAttribute("aria-label", where(port, i, k));
      button.addEventListener("click", () => {
        const bits = bitsOf(port, numbers[i]);
        bits[k] ^= 1;
        numbers[i] = numberOf(port, (j) => bits[j]);
        update();
      });
      return button;
    });
    const fields = rows.cells.map((cell, i) => {
      const field = make("input", { type: "number", min: least / scale, max: most / scale, step: 1 / scale });
      field.setAttribute("aria-label", where(port, i, 0).replace(/ bit 0$/, ""));
      field.addEventListener("change", () => {
        numbers[i] = Math.min(most, Math.max(least, Math.round(field.valueAsNumber * scale) || 0));
        update();
      });
      cell.append(field);
      return field;
    });
    entry.show = () => numbers.forEach((number, i) => {
      if (fields[i]) fields[i].value = number / scale;
      bitsOf(port, number).forEach((bit, k) => {
        rows.bits[i][k].textContent = bit;
        rows.bits[i][k].setAttribute("aria-pressed", bit === 1);
      });
    });
    find("inputs").append(rows.view);
  }

  const results = Object.values(outputs).map((port) => {
    const rows = rowsOf(port, titleOf(port), (i, k) => make("span", { title: where(port, i, k) }));
    find("outputs").append(rows.view);
    const show = (numbers) => numbers.forEach((number, i) => {
      if (rows.cells[i]) rows.cells[i].textContent = number / 2 ** port.fraction;
      bitsOf(port, number).forEach((bit, k) => {
        rows.bits[i][k].textContent = bit;
        rows.bits[i][k].className = bit ? "on" : "";
      });
    });
    return { port, show };
  });

  const fill = (value) => {
    for (const { port, numbers } of state) {
      numbers.forEach((_, i) => (numbers[i] = numberOf(port, () => value())));
    }
    update();
  };
  find("zeros").addEventListener("click", () => fill(() => 0));
  find("random").addEventListener("click", () => fill(() => Math.random() < 0.5));
  update();
  Object.assign(window.lutjax, {
    set(name, numbers) {
      state.find(({ port }) => port.name === name).numbers.splice(0, numbers.length, ...numbers);
      update();
    },
    get: (name) => numbersOf(outputs[name]),
  });
}
