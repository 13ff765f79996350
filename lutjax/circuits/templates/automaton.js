// A cellular automaton: the circuit is the rule of one cell, and 32 cells of a row are evaluated in a word.
{
  const { channels, periodic } = data.about, [height, width] = data.size;
  const across = Math.ceil(width / 32), area = height * across, last = (width - 1) & 31;
  const valid = last === 31 ? -1 : (2 << last) - 1; // cells of the last word of a row
  let state = new Uint32Array(channels * area), steps = 0, dirty = true;
  const rows = Math.max(1, Math.min(height, Math.floor(2 ** 18 / (evaluator.nSlots * across)))); // at once, in a cache
  const middle = [height >> 1, width >> 1];
  const blocks = Array.from({ length: Math.ceil(height / rows) }, (_, k) => k * rows);
  const central = Math.floor(middle[0] / rows) * rows; // comes last, so that its gates can be shown
  blocks.push(blocks.splice(central / rows, 1)[0]);
  const sides = { left: new Uint32Array(state.length), right: new Uint32Array(state.length) };

  // The neighbor at the left (-1) or right (1) of each cell of a row, into `to`.
  function shift(from, at, side, to) {
    const edge = (word, bit) => (periodic ? (from[at + word] >>> bit) & 1 : 0);
    for (let w = 0; w < across; w++) {
      if (side < 0) to[w] = (from[at + w] << 1) | (w ? from[at + w - 1] >>> 31 : edge(across - 1, last));
      else to[w] = (from[at + w] >>> 1) | (w < across - 1 ? from[at + w + 1] << 31 : edge(0, 0) << last);
    }
  }

  // Cells of a word that are updated.
  function updated() {
    let word = 0;
    for (let k = 0; k < 32; k++) word |= (Math.random() < data.update_rate) << k;
    return word;
  }

  function step() {
    for (let at = 0; at < state.length; at += across) {
      shift(state, at, -1, sides.left.subarray(at, at + across));
      shift(state, at, 1, sides.right.subarray(at, at + across));
    }
    const { left, right } = sides, next = new Uint32Array(state.length);
    // The eight neighbors row by row, then the cell; the channels of each one after the other.
    const order = [[-1, left], [-1, state], [-1, right], [0, left], [0, right], [1, left], [1, state], [1, right], [0, state]];
    for (const top of blocks) {
      const n = Math.min(rows, height - top) * across, words = evaluator.use(n);
      order.forEach(([dy, from], place) => {
        for (let c = 0; c < channels; c++) {
          const to = (place * channels + c) * n;
          for (let y = 0; y * across < n; y++) {
            let row = top + y + dy;
            if (periodic) row = (row + height) % height;
            const start = c * area + row * across;
            if (row < 0 || row >= height) words.fill(0, to + y * across, to + (y + 1) * across);
            else words.set(from.subarray(start, start + across), to + y * across);
          }
        }
      });
      evaluator.run();
      for (let c = 0; c < channels; c++) {
        for (let w = 0; w < n; w++) next[c * area + top * across + w] = evaluator.word(evaluator.outputs[c], w);
      }
    }
    if (data.update_rate < 1) {
      for (let at = 0; at < area; at++) {
        const mask = updated();
        for (let k = at; k < next.length; k += area) next[k] = (next[k] & mask) | (state[k] & ~mask);
      }
    }
    for (let at = across - 1; at < next.length; at += across) next[at] &= valid;
    state = next;
    steps++;
    dirty = true;
  }

  const get = (c, y, x) => (state[c * area + y * across + (x >> 5)] >>> (x & 31)) & 1;
  function put(c, y, x, bit) {
    const at = c * area + y * across + (x >> 5), mask = 1 << (x & 31);
    state[at] = bit ? state[at] | mask : state[at] & ~mask;
  }
  function fill(bit) {
    for (let c = 0; c < channels; c++) {
      for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) put(c, y, x, bit(c, y, x));
    }
    steps = 0;
    dirty = true;
  }
  const given = data.start && bytesOf(data.start);
  const starts = {
    seed: () => fill((c, y, x) => y === middle[0] && x === middle[1]),
    sparse: () => fill((c) => c === 0 && Math.random() < 0.3),
    random: () => fill(() => Math.random() < 0.5),
    empty: () => fill(() => 0),
    given: () => fill((c, y, x) => {
      const k = (c * height + y) * width + x;
      return (given[k >> 3] >> (k & 7)) & 1;
    }),
  };

  // ------------------------------------------------------------------------------------------------- what is shown
  const grid = find("grid"), shown = find("shown");
  const image = { data: null, context: null };
  function draw() {
    if (!image.data) {
      [grid.width, grid.height] = [width, height];
      image.context = grid.getContext("2d");
      image.data = image.context.createImageData(width, height);
    }
    const { data: colors } = image.data, off = styled("--pixel-off"), on = styled("--pixel-on"), accent = styled("--accent");
    const colored = shown.value === "colors", first = colored ? 0 : +shown.value;
    for (let y = 0, to = 0; y < height; y++) {
      for (let x = 0; x < width; x++, to += 4) {
        const bit = get(first, y, x);
        for (let k = 0; k < 3; k++) colors[to + k] = colored ? 255 * get(k, y, x) : (bit ? on : off)[k];
        colors[to + 3] = 255;
      }
    }
    if (mark.shown) {
      for (const [dy, dx] of [[0, -2], [0, -1], [0, 1], [0, 2], [-2, 0], [-1, 0], [1, 0], [2, 0]]) {
        const y = mark.at[0] + dy, x = mark.at[1] + dx;
        if (y >= 0 && y < height && x >= 0 && x < width) colors.set(accent, 4 * (y * width + x));
      }
    }
    image.context.putImageData(image.data, 0, 0);
    let alive = 0;
    for (let at = first * area; at < (first + 1) * area; at++) {
      let word = state[at];
      word -= (word >>> 1) & 0x55555555;
      word = (word & 0x33333333) + ((word >>> 2) & 0x33333333);
      alive += (((word + (word >>> 4)) & 0x0f0f0f0f) * 0x01010101) >>> 24;
    }
    const rate = playing && speed.measured ? `; ${whole(speed.measured)} steps a second` : "";
    find("state").textContent = `Step ${whole(steps)}; ${whole(alive)} of ${whole(width * height)} cells are 1` +
      `${channels > 1 ? ` in channel ${first + 1}` : ""}${rate}`;
    dirty = false;
  }

  // ------------------------------------------------------------------------------------------------- time
  const RATES = [1, 2, 5, 10, 20, 30, 60, 120, 240, 480]; // steps a second
  const speed = { range: find("speed-range"), measured: 0, counted: 0, since: 0 };
  let playing = false, due = 0, before = 0, gatesShown = 0;
  function frame(now) {
    if (playing) {
      due += (RATES[speed.range.value] * Math.min(Math.max(now - before, 0), 250)) / 1000;
      const count = Math.floor(due), begin = performance.now();
      let done = 0;
      while (done < count && performance.now() - begin < 25) step(), done++; // the page answers while it computes
      due = done < count ? 0 : due - count;
      speed.counted += done;
      if (now - speed.since > 1000) {
        speed.measured = (1000 * speed.counted) / (now - speed.since);
        [speed.since, speed.counted] = [now, 0];
        dirty = true;
      }
    }
    before = now;
    if (dirty) {
      draw();
      if (steps && now - gatesShown > 250) {
        showGates((middle[0] - central) * across + (middle[1] >> 5), middle[1] & 31);
        gatesShown = now;
      }
    }
    requestAnimationFrame(frame);
  }
  function play(on = !playing) {
    playing = on;
    [due, speed.counted, speed.measured, speed.since] = [0, 0, 0, performance.now()];
    find("play").textContent = on ? "Pause" : "Play";
    find("play").setAttribute("aria-pressed", on);
    dirty = true;
  }
  function stepOnce() {
    play(false);
    step();
  }
  find("play").addEventListener("click", () => play());
  find("step").addEventListener("click", stepOnce);
  const showRate = () => (find("speed-text").textContent = `${RATES[speed.range.value]} steps a second`);
  speed.range.addEventListener("input", showRate);

  // ------------------------------------------------------------------------------------------------- brush
  const radius = find("radius");
  const showRadius = () => (find("radius-text").textContent = radius.value);
  radius.addEventListener("input", showRadius);
  function brush(y0, x0, other) {
    let kind = document.querySelector("input[name=brush]:checked").value;
    if (other) kind = kind === "paint" ? "erase" : "paint";
    const r = radius.valueAsNumber;
    for (let dy = -r; dy <= r; dy++) {
      for (let dx = -r; dx <= r; dx++) {
        let y = y0 + dy, x = x0 + dx;
        if (dy * dy + dx * dx > r * r) continue;
        if (periodic) [y, x] = [(y + height) % height, (x + width) % width];
        if (y < 0 || y >= height || x < 0 || x >= width) continue;
        for (let c = 0; c < channels; c++) {
          put(c, y, x, kind === "erase" ? 0 : kind === "noise" ? Math.random() < 0.5 : c < data.shown);
        }
      }
    }
    dirty = true;
  }
  const cellOf = (event) => {
    const box = grid.getBoundingClientRect(), edge = grid.clientLeft;
    const place = (at, from, size, count) =>
      Math.min(count - 1, Math.max(0, Math.floor(((at - from - edge) / (size - 2 * edge)) * count)));
    return [place(event.clientY, box.top, box.height, height), place(event.clientX, box.left, box.width, width)];
  };
  let brushing = null;
  grid.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    grid.setPointerCapture(event.pointerId);
    mark.shown = false;
    brushing = cellOf(event);
    brush(...brushing, event.shiftKey);
  });
  grid.addEventListener("pointermove", (event) => {
    if (!brushing) return;
    const [y, x] = cellOf(event), [y0, x0] = brushing, n = Math.max(Math.abs(y - y0), Math.abs(x - x0));
    for (let k = 1; k <= n; k++) {
      brush(Math.round(y0 + ((y - y0) * k) / n), Math.round(x0 + ((x - x0) * k) / n), event.shiftKey);
    }
    brushing = [y, x];
  });
  for (const end of ["pointerup", "pointercancel"]) grid.addEventListener(end, () => (brushing = null));

  const mark = { at: middle, shown: false };
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  grid.addEventListener("keydown", (event) => {
    const move = moves[event.key], size = [height, width];
    if (move) mark.at = mark.at.map((x, k) => Math.min(size[k] - 1, Math.max(0, x + move[k])));
    else if (event.key === "Enter") brush(...mark.at, event.shiftKey);
    else if (event.key === " ") play();
    else if (event.key.toLowerCase() === "s" && !event.ctrlKey && !event.metaKey) stepOnce();
    else return;
    event.preventDefault();
    mark.shown = event.key !== " " || mark.shown;
    dirty = true;
  });
  grid.addEventListener("blur", () => {
    mark.shown = false;
    dirty = true;
  });

  // ------------------------------------------------------------------------------------------------- begin
  if (channels >= 3) shown.append(make("option", { value: "colors", textContent: "channels 1 to 3 as colors" }));
  for (let c = 0; c < channels; c++) shown.append(make("option", { value: c, textContent: `channel ${c + 1}` }));
  shown.value = data.shown === 3 ? "colors" : "0";
  shown.addEventListener("change", () => (dirty = true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (dirty = true));
  for (const name of Object.keys(starts)) {
    find(`start-${name}`).addEventListener("click", () => starts[name]());
  }
  find("start-given").hidden = !given;
  showRate();
  showRadius();
  starts[data.begin]();
  play(!matchMedia("(prefers-reduced-motion: reduce)").matches);
  before = performance.now();
  requestAnimationFrame(frame);
  Object.assign(window.lutjax, {
    play, brush,
    step(count = 1) {
      for (let k = 0; k < count; k++) step();
    },
    steps: () => steps,
    cells: () => Array.from({ length: channels * height * width }, (_, k) => {
      const y = Math.floor(k / width) % height;
      return get(Math.floor(k / (width * height)), y, k % width);
    }),
    set(cells) {
      fill((c, y, x) => cells[(c * height + y) * width + x]);
    },
  });
}
