// Any circuit: bits to switch, and the numbers that come out.
{
  const state = Object.values(inputs).map((port) => ({ port, bits: Array(port.count * port.bits).fill(0) }));
  const isNumber = (port) => port.bits > 1 && port.bits <= 53; // others are shown as bits alone
  const { classes, input_names: names } = data.about;
  const ports = [...Object.values(inputs)];
  // The name of a number that the circuit states: of an input, or of the class whose votes it counts.
  function stated(port, i) {
    const at = ports.indexOf(port);
    if (at >= 0) return names?.[ports.slice(0, at).reduce((sum, { count }) => sum + count, 0) + i];
    return classes && port.count === classes.length ? classes[i] : undefined;
  }
  const isClass = (port) =>
    data.about.kind === "classifier" && classes && port.count === 1 && !ports.includes(port);
  const place = (port, i) => (port.count > 1 ? `${port.name}[${i}]` : port.name);
  const nameOf = (port, i) => stated(port, i) ?? place(port, i);
  const where = (port, i, k) => nameOf(port, i) + (port.bits > 1 ? ` bit ${k}` : "");

  // Show a port: a row for each number, its bits with the highest first. Return the cells of numbers and of bits.
  function view(port, parent, makeBit) {
    const bits = Array.from({ length: port.count * port.bits }, (_, k) => {
      const bit = makeBit(k);
      bit.title = where(port, Math.floor(k / port.bits), k % port.bits);
      return bit;
    });
    const bitsOfRow = (i) => bits.slice(i * port.bits, (i + 1) * port.bits).reverse();
    const group = (some) => make("div", { className: "bits" }, ...some);
    const cells = [];
    parent.append(make("h3", {
      textContent: port.name + (port.count > 1 ? `, ${whole(port.count)} ${port.bits > 1 ? "numbers" : "bits"}` : ""),
    }));
    if (port.bits === 1 && !isClass(port) && stated(port, 0) === undefined) {
      parent.append(group(bits));
      return { bits, cells };
    }
    const table = make("table", { className: "numbers" });
    for (let i = 0; i < port.count; i++) {
      const row = make("tr", {}, make("th", { scope: "row", textContent: nameOf(port, i), title: place(port, i) }));
      if (isNumber(port) || isClass(port)) row.append((cells[i] = make("td")));
      row.append(make("td", {}, group(bitsOfRow(i))));
      table.append(row);
    }
    parent.append(make("div", { className: "scroll" }, table));
    return { bits, cells };
  }

  for (const entry of state) {
    const { port, bits } = entry, scale = 2 ** port.fraction;
    const shown = view(port, find("inputs"), (k) => {
      const button = make("button", { type: "button" });
      button.addEventListener("click", () => {
        bits[k] ^= 1;
        update();
      });
      return button;
    });
    const fields = shown.cells.map((cell, i) => {
      const [least, most] = port.signed ? [-(2 ** (port.bits - 1)), 2 ** (port.bits - 1) - 1] : [0, 2 ** port.bits - 1];
      const field = make("input", { type: "number", min: least / scale, max: most / scale, step: 1 / scale });
      field.setAttribute("aria-label", nameOf(port, i));
      field.addEventListener("change", () => {
        entry.set(i, Math.min(most, Math.max(least, Math.round(field.valueAsNumber * scale) || 0)));
        update();
      });
      cell.append(field);
      return field;
    });
    entry.set = (i, number) => bits.splice(i * port.bits, port.bits, ...bitsOf(port, number));
    entry.show = () => {
      fields.forEach((field, i) => (field.value = numberOf(port, (k) => bits[i * port.bits + k]) / scale));
      shown.bits.forEach((button, k) => {
        if (button.textContent === String(bits[k])) return;
        button.textContent = bits[k];
        button.setAttribute("aria-label", button.title);
        button.setAttribute("aria-pressed", bits[k] === 1);
      });
    };
  }

  const results = Object.values(outputs).map((port) => {
    const shown = view(port, find("outputs"), () => make("span"));
    return () => {
      const numbers = numbersOf(port);
      shown.cells.forEach((cell, i) => {
        const number = numbers[i] / 2 ** port.fraction;
        cell.textContent = isClass(port) ? `${number}: ${classes[number] ?? "?"}` : number;
      });
      shown.bits.forEach((place, k) => {
        const bit = evaluator.word(evaluator.outputs[port.start + k]) & 1;
        if (place.textContent === String(bit)) return;
        place.textContent = bit;
        place.className = bit ? "on" : "";
      });
    };
  });

  function update() {
    for (const { port, bits, show } of state) {
      evaluator.use(1).set(bits, port.start);
      show();
    }
    evaluator.run();
    for (const show of results) show();
    showGates();
  }

  function fill(value) {
    for (const { bits } of state) bits.forEach((_, k) => (bits[k] = value()));
    update();
  }
  find("zeros").addEventListener("click", () => fill(() => 0));
  find("random").addEventListener("click", () => fill(() => +(Math.random() < 0.5)));
  update();
  Object.assign(window.lutjax, {
    set(name, numbers) {
      const entry = state.find(({ port }) => port.name === name);
      numbers.forEach((number, i) => entry.set(i, number));
      update();
    },
    get: (name) => numbersOf(outputs[name]),
  });
}
