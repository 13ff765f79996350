// What all pages share: numbers of ports, the parts of the circuit, its speed.
const data = JSON.parse(document.getElementById("circuit").textContent);
const evaluator = new Evaluator(data);
const find = (id) => document.getElementById(id);
const whole = (number) => Math.round(number).toLocaleString("en");

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Ports by name, each with the bit at which it starts.
function portsOf(ports) {
  let start = 0;
  return Object.fromEntries(ports.map((port) => {
    const placed = { ...port, start };
    start += port.count * port.bits;
    return [port.name, placed];
  }));
}
const inputs = portsOf(data.inputs), outputs = portsOf(data.outputs);

// Return the whole number that the bits of a number form; a signed one is in two's complement.
function numberOf(port, bit) {
  let number = 0;
  for (let k = 0; k < port.bits; k++) number += bit(k) ? 2 ** k : 0;
  return port.signed && number >= 2 ** (port.bits - 1) ? number - 2 ** port.bits : number;
}

// Return the bits of a whole number, lowest first.
function bitsOf(port, number) {
  if (number < 0) number += 2 ** port.bits;
  return Array.from({ length: port.bits }, (_, k) => Math.floor(number / 2 ** k) % 2);
}

// Write whole numbers into an input port, of one sample.
function setNumbers(port, numbers) {
  const words = evaluator.use(1);
  numbers.forEach((number, i) => bitsOf(port, number).forEach((bit, k) => (words[port.start + i * port.bits + k] = bit)));
}

// Return the whole numbers of an output port, of one sample.
function numbersOf(port) {
  return Array.from({ length: port.count }, (_, i) => {
    const first = port.start + i * port.bits;
    return numberOf(port, (k) => evaluator.word(evaluator.outputs[first + k]) & 1);
  });
}

function styled(name) {
  const color = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((k) => parseInt(color.slice(k, k + 2), 16));
}

// Draw pixels on a canvas, one pixel each: `shade(k)` is red, green and blue of pixel k.
function paint(canvas, width, height, shade) {
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d"), image = context.createImageData(width, height);
  for (let k = 0; k < width * height; k++) image.data.set([...shade(k), 255], 4 * k);
  context.putImageData(image, 0, 0);
}

const PART_WORDS = {
  encoder: "compares the inputs with thresholds",
  perception: "looks at each neighbor of the cell",
  update: "decides the new state of the cell",
  votes: "counts the votes of each class",
  argmax: "chooses the class with the most votes, the first of equals",
};

const partViews = [];
function showParts() {
  const parts = data.parts.filter(([, count]) => count), most = Math.max(...parts.map(([, count]) => count));
  const many = parts.length > 6; // then side by side, with few words
  find("parts").classList.toggle("many", many);
  let first = 1 + evaluator.nInputs;
  for (const [name, count] of parts) {
    const words = PART_WORDS[name] || (name.startsWith("layer") && !many ? "gates that training found" : "");
    const canvas = make("canvas");
    canvas.setAttribute("aria-hidden", "true");
    const fill = make("div");
    fill.style.width = `${(100 * count) / most}%`;
    find("parts").append(make("li", {},
      make("div", { className: "part-line" },
        make("span", {}, make("strong", { textContent: name }), words && `: ${words}`),
        make("span", { textContent: `${whole(count)} ${count === 1 ? "gate" : "gates"}` })),
      make("div", { className: "bar" }, fill), canvas));
    partViews.push({ canvas, first, count });
    first += count;
  }
}

// Show which gates answer 1 for the sample in a lane of a word.
function showGates(word = 0, lane = 0) {
  const [on, off] = ["--accent", "--off"].map((name) => new Uint32Array(Uint8Array.from([...styled(name), 255]).buffer)[0]);
  for (const { canvas, first, count } of partViews) {
    const room = canvas.parentElement.clientWidth / 3, unit = Math.min(5, Math.max(2, Math.floor(room / count)));
    const across = Math.min(count, Math.max(1, Math.floor(room / unit)));
    const width = 3 * across, down = Math.ceil(count / across);
    canvas.style.width = `${unit * width}px`;
    [canvas.width, canvas.height] = [width, 3 * down];
    const context = canvas.getContext("2d"), image = context.createImageData(width, 3 * down);
    const pixels = new Uint32Array(image.data.buffer); // 3 x 3 for each gate, of which 2 x 2 are colored
    for (let gate = 0; gate < count; gate++) {
      const bit = (evaluator.word(evaluator.literals[first + gate], word) >>> lane) & 1;
      const at = 3 * (Math.floor(gate / across) * width + (gate % across));
      pixels[at] = pixels[at + 1] = pixels[at + width] = pixels[at + width + 1] = bit ? on : off;
    }
    context.putImageData(image, 0, 0);
  }
}

// Measure the circuit on random words.
function measure() {
  const nWords = 16, other = evaluator.copy(), words = other.use(nWords);
  for (let k = 0; k < words.length; k++) words[k] = Math.floor(Math.random() * 2 ** 32);
  for (const begin = performance.now(); performance.now() - begin < 30;) other.run();
  let runs = 0;
  const begin = performance.now();
  while (performance.now() - begin < 100 || !runs) other.run(), runs++;
  const samples = (1000 * runs * 32 * nWords) / Math.max(performance.now() - begin, 1);
  const gates = samples * evaluator.gates.length;
  const short = (x) => (x >= 1e9 ? `${(x / 1e9).toPrecision(3)} billion` : x >= 1e6 ? `${(x / 1e6).toPrecision(3)} million` : whole(x));
  find("speed").textContent = `Measured here: ${short(gates)} gates a second, which is ${short(samples)} ` +
    `${data.kind === "automaton" ? "cells" : "inputs"} a second. A word holds 32 of them, and one instruction computes a gate for all.`;
  return { gates, samples };
}

showParts();
find("measure").addEventListener("click", measure);
setTimeout(measure, 300);
// For the console, and for tests.
window.lutjax = { circuit: data, evaluator, measure, evaluate: (words, n) => evaluator.copy().evaluate(words, n) };
