// A classifier of images: a picture is drawn as strokes, which become pixels, which the circuit reads.
{
  const input = Object.values(inputs)[0], [height, width] = data.image, classes = data.classes;
  const votesPort = outputs.votes || Object.values(outputs).find((port) => classes && port.count === classes.length && port.count > 1);
  const classPort = Object.values(outputs).find((port) => port !== votesPort && port.count === 1 && classes);
  const nameOf = (index) => (classes[index] === undefined ? String(index) : classes[index]);

  // Strokes are lists of points in units of pixels; `base` is an example on which they are drawn.
  let strokes = [], base = null, pixels = null, scale = 1;
  const pad = find("pad"), seen = find("seen"), fit = find("fit"), pen = find("pen");
  const large = height >= 20; // as MNIST: 20 of 28 pixels, around the center of mass; smaller images are filled
  const inner = large ? (20 / 28) * Math.min(height, width) : Math.min(height, width);
  const fine = Math.max(4, Math.ceil(128 / Math.max(height, width))); // points across a pixel
  pen.value = large ? 10 : 18; // about the strokes of MNIST, and of the 8 x 8 digits of scikit-learn
  const radius = () => (pen.valueAsNumber / 200) * height;

  // Return the strokes moved and scaled into the middle of the frame.
  function fitted() {
    const points = strokes.flat();
    if (!fit.checked || base || !points.length) return strokes;
    const low = [0, 1].map((k) => Math.min(...points.map((p) => p[k])));
    const high = [0, 1].map((k) => Math.max(...points.map((p) => p[k])));
    const side = Math.max(high[0] - low[0], high[1] - low[1]);
    const factor = side < radius() ? 1 : (inner - 2 * radius()) / side;
    let middle = [(low[0] + high[0]) / 2, (low[1] + high[1]) / 2];
    if (large) {
      let mass = 0;
      const moment = [0, 0];
      for (const stroke of strokes) {
        stroke.forEach((p, k) => {
          const q = stroke[Math.max(k - 1, 0)], length = Math.hypot(p[0] - q[0], p[1] - q[1]) + 1e-6;
          mass += length;
          for (const d of [0, 1]) moment[d] += (length * (p[d] + q[d])) / 2;
        });
      }
      middle = moment.map((m) => m / mass);
    }
    const to = [width / 2, height / 2];
    return strokes.map((stroke) => stroke.map((p) => p.map((x, k) => to[k] + factor * (x - middle[k]))));
  }

  // Return the share of each pixel that the strokes cover.
  function covered(lines) {
    const across = width * fine, down = height * fine, r = radius() * fine, ink = new Uint8Array(across * down);
    for (const line of lines) {
      line.forEach((point, index) => {
        const [x0, y0] = line[Math.max(index - 1, 0)].map((x) => x * fine), [x1, y1] = point.map((x) => x * fine);
        const dx = x1 - x0, dy = y1 - y0, squared = dx * dx + dy * dy;
        const bound = (x, most) => Math.min(most, Math.max(0, x));
        const left = bound(Math.floor(Math.min(x0, x1) - r), across), right = bound(Math.ceil(Math.max(x0, x1) + r), across);
        const top = bound(Math.floor(Math.min(y0, y1) - r), down), bottom = bound(Math.ceil(Math.max(y0, y1) + r), down);
        for (let y = top; y < bottom; y++) {
          for (let x = left; x < right; x++) {
            const px = x + 0.5 - x0, py = y + 0.5 - y0;
            const t = squared ? bound((px * dx + py * dy) / squared, 1) : 0;
            if ((px - t * dx) ** 2 + (py - t * dy) ** 2 <= r * r) ink[y * across + x] = 1;
          }
        }
      });
    }
    const share = new Float64Array(width * height);
    ink.forEach((bit, k) => {
      share[Math.floor(k / across / fine) * width + Math.floor((k % across) / fine)] += bit / fine ** 2;
    });
    return share;
  }

  const between = (share) => {
    const off = styled("--pixel-off"), on = styled("--pixel-on");
    return (k) => off.map((color, c) => color + share(k) * (on[c] - color));
  };
  const shadeOf = (numbers) => between((k) => Math.min(1, Math.max(0, numbers[k] / data.maximum)));

  function showPad() {
    const unit = Math.ceil(480 / height), context = pad.getContext("2d");
    if (pad.width !== unit * width) [pad.width, pad.height] = [unit * width, unit * height];
    const style = getComputedStyle(document.documentElement);
    const shade = shadeOf(base || []);
    for (let k = 0; k < width * height; k++) {
      context.fillStyle = base ? `rgb(${shade(k)})` : style.getPropertyValue("--pixel-off");
      context.fillRect((k % width) * unit, Math.floor(k / width) * unit, unit, unit);
    }
    context.strokeStyle = style.getPropertyValue("--pixel-on");
    context.lineWidth = 2 * radius() * unit;
    context.lineCap = context.lineJoin = "round";
    for (const stroke of strokes) {
      context.beginPath();
      context.moveTo(stroke[0][0] * unit, stroke[0][1] * unit);
      for (const [x, y] of stroke) context.lineTo(x * unit, y * unit);
      context.stroke();
    }
    if (keyboard.shown) {
      const [x, y] = keyboard.at;
      context.strokeStyle = style.getPropertyValue("--accent");
      context.lineWidth = keyboard.down ? 6 : 3;
      context.beginPath();
      context.arc(x * unit, y * unit, Math.max(radius(), 0.3) * unit + 4, 0, 2 * Math.PI);
      context.stroke();
    }
  }

  function showAnswer() {
    const blank = pixels.every((number) => number === 0), votes = votesPort ? numbersOf(votesPort) : null;
    let best = null;
    if (classPort) best = numbersOf(classPort)[0];
    else if (votes) best = votes.indexOf(Math.max(...votes));
    find("class").textContent = best === null ? "" : blank ? "?" : nameOf(best);
    find("class-here").textContent = find("class").textContent; // for windows in which the answer is below
    let text = blank ? "Draw something, or click an example." : "";
    if (votes) {
      scale = Math.max(scale, ...votes);
      const second = Math.max(...votes.filter((_, k) => k !== best));
      if (!blank && votes.length > 1) text = `${votes[best]} votes; the next class has ${second}`;
      votes.forEach((count, k) => {
        const row = find("votes").tBodies[0].rows[k];
        row.className = k === best && !blank ? "best" : "";
        row.cells[1].firstChild.firstChild.style.width = `${(100 * Math.max(0, count)) / scale}%`;
        row.cells[2].textContent = count;
      });
    }
    find("answer-text").textContent = text;
    if (best === null) {
      find("outputs").textContent = Object.values(outputs).map((port) => `${port.name}: ${numbersOf(port).join(" ")}`).join("\n");
    }
    return best;
  }

  function update() {
    const share = strokes.length ? covered(fitted()) : new Float64Array(width * height);
    pixels = Array.from(share, (part, k) => Math.max(Math.round(part * data.maximum), base ? base[k] : 0));
    setNumbers(input, pixels);
    evaluator.run();
    paint(seen, width, height, shadeOf(pixels));
    showPad();
    showAnswer();
    showGates();
  }

  let waiting = false;
  function soon() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      update();
    });
  }

  function clear() {
    [strokes, base] = [[], null];
    keyboard.down = false;
    update();
  }

  const at = (event) => {
    const box = pad.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * width, ((event.clientY - box.top) / box.height) * height];
  };
  let drawing = false;
  pad.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    pad.setPointerCapture(event.pointerId);
    drawing = true;
    keyboard.shown = keyboard.down = false;
    strokes.push([at(event)]);
    soon();
  });
  pad.addEventListener("pointermove", (event) => {
    if (!drawing) return;
    const events = event.getCoalescedEvents ? event.getCoalescedEvents() : [];
    for (const each of events.length ? events : [event]) strokes[strokes.length - 1].push(at(each));
    soon();
  });
  for (const end of ["pointerup", "pointercancel"]) pad.addEventListener(end, () => (drawing = false));

  const keyboard = { at: [width / 2, height / 2], down: false, shown: false };
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  pad.addEventListener("keydown", (event) => {
    const move = moves[event.key], size = [width, height];
    if (move) {
      keyboard.at = keyboard.at.map((x, k) => Math.min(size[k], Math.max(0, x + (move[k] * height) / 32)));
      if (keyboard.down) strokes[strokes.length - 1].push(keyboard.at);
    } else if (event.key === " ") {
      keyboard.down = !keyboard.down;
      if (keyboard.down) strokes.push([keyboard.at]);
    } else if (event.key === "Delete" || event.key === "Backspace") {
      clear();
    } else {
      return;
    }
    event.preventDefault();
    keyboard.shown = true;
    soon();
  });
  pad.addEventListener("blur", () => {
    keyboard.shown = false;
    showPad();
  });
  find("clear").addEventListener("click", clear);
  for (const control of [fit, pen]) control.addEventListener("input", update);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);

  data.examples.forEach((numbers, index) => {
    const canvas = make("canvas"), button = make("button", { type: "button" }, canvas);
    const label = data.labels ? `: ${nameOf(data.labels[index])}` : "";
    button.setAttribute("aria-label", `Example ${index + 1}${label}`);
    button.title = `Example ${index + 1}${label}`;
    paint(canvas, width, height, shadeOf(numbers));
    button.addEventListener("click", () => {
      [strokes, base] = [[], numbers];
      keyboard.down = false;
      update();
    });
    find("examples").append(button);
    find("examples-card").hidden = false;
  });

  find("seen-text").textContent = `The circuit reads ${width} × ${height} pixels, each a number from 0 to ` +
    `${data.maximum / 2 ** input.fraction}.` + (votesPort && !classPort ? " The answer is the first class with the most votes." : "");
  find("outputs").hidden = Boolean(classPort || votesPort);
  if (votesPort) {
    find("votes").hidden = false;
    for (let k = 0; k < votesPort.count; k++) {
      const bar = make("div", { className: "bar" }, make("div"));
      bar.setAttribute("aria-hidden", "true");
      find("votes").tBodies[0].append(make("tr", {}, make("th", { scope: "row", textContent: nameOf(k) }), make("td", {}, bar), make("td")));
    }
  }
  update();
  Object.assign(window.lutjax, {
    pixels: () => pixels,
    answer: showAnswer,
    votes: () => (votesPort ? numbersOf(votesPort) : null),
    show(numbers) {
      [strokes, base] = [[], numbers];
      update();
    },
  });
}
