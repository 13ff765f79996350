"use strict";
// The circuit as the page carries it, and its evaluation: 32 samples in a word, one in each bit (lane).
//
// A circuit is {inputs, outputs, parts, about, literals, gates}. Node 0 is the constant 0, then come the bits of the
// inputs, then the gates. A literal is 2 * node, and one more where the value is inverted.

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

// Return the fan-ins and tables of the gates. Each gate is its number n of fan-ins, its table of 2^n bits (lowest
// first, in whole bytes), and for each fan-in how many nodes before the gate it lies (7 bits a byte, lowest first).
function gatesOf(base64, firstGate) {
  const bytes = bytesOf(base64), gates = [];
  for (let at = 0, node = firstGate; at < bytes.length; node++) {
    const n = bytes[at++], nBytes = Math.max(1, (1 << n) >> 3);
    let table = "";
    for (let k = 0; k < 1 << n; k++) table += (bytes[at + (k >> 3)] >> (k & 7)) & 1;
    at += nBytes;
    const fanins = [];
    for (let k = 0; k < n; k++) {
      let distance = 0, shift = 0, byte;
      do {
        byte = bytes[at++];
        distance += (byte & 127) * 2 ** shift;
        shift += 7;
      } while (byte & 128);
      fanins.push(node - distance);
    }
    gates.push({ fanins, table });
  }
  return gates;
}

// Steps that a processor computes in an instruction or three: AND, XOR, and a choice between two (MUX).
const AND = 0, XOR = 1, MUX = 2;

class Evaluator {
  // Turn each gate into steps over literals of slots: slot 0 is the constant, then come the inputs, then the steps.
  constructor(data) {
    const count = (ports) => ports.reduce((sum, port) => sum + port.count * port.bits, 0);
    this.nInputs = count(data.inputs);
    this.nOutputs = count(data.outputs);
    this.gates = gatesOf(data.gates, 1 + this.nInputs);
    const kind = [], a = [], b = [], c = [];
    const known = [new Map(), new Map()];
    const step = (which, x, y, z) => {
      kind.push(which), a.push(x), b.push(y), c.push(z);
      return 2 * (this.nInputs + kind.length);
    };
    const and = (x, y) => {
      if (x > y) [x, y] = [y, x];
      if (x < 2 || x === y) return x === 0 ? 0 : y;
      return x === (y ^ 1) ? 0 : once(AND, x, y);
    };
    const xor = (x, y) => {
      if (x > y) [x, y] = [y, x];
      const inverted = (x & 1) ^ (y & 1);
      if (x >> 1 === y >> 1) return inverted;
      return x < 2 ? y ^ x : once(XOR, x & ~1, y & ~1) ^ inverted;
    };
    const once = (which, x, y) => {
      const key = x * 2 ** 26 + y;
      if (!known[which].has(key)) known[which].set(key, step(which, x, y, 0));
      return known[which].get(key);
    };
    const choose = (x, high, low) => {
      if (high === low) return low;
      if (high === (low ^ 1)) return xor(x, low);
      if (low < 2) return low === 0 ? and(x, high) : and(x, high ^ 1) ^ 1;
      if (high < 2) return high === 0 ? and(x ^ 1, low) : and(x ^ 1, low ^ 1) ^ 1;
      return x < 2 ? (x ? high : low) : step(MUX, x, high, low);
    };
    const literals = [0];
    for (let k = 1; k <= this.nInputs; k++) literals.push(2 * k);
    for (const { fanins, table } of this.gates) {
      const cofactors = new Map();
      const lower = (bits, n) => {
        if (n === 0) return +bits;
        if (bits[0] === "1") return lower(bits.replace(/./g, (bit) => 1 - bit), n) ^ 1;
        if (!cofactors.has(bits)) {
          const half = bits.length / 2;
          const low = lower(bits.slice(0, half), n - 1), high = lower(bits.slice(half), n - 1);
          cofactors.set(bits, choose(literals[fanins[n - 1]], high, low));
        }
        return cofactors.get(bits);
      };
      literals.push(lower(table, fanins.length));
    }
    this.literals = literals; // of each node
    this.outputs = data.literals.map((literal) => literals[literal >> 1] ^ (literal & 1));
    [this.kind, this.a, this.b, this.c] = [Uint8Array.from(kind), ...[a, b, c].map((x) => Uint32Array.from(x))];
    this.nSlots = 1 + this.nInputs + kind.length;
    this.use(1);
  }

  // Take room for n words a slot; the words of the inputs are then written from `inputs` on.
  use(n) {
    if (this.n !== n) {
      this.n = n;
      this.slots = new Uint32Array(this.nSlots * n);
      this.inputs = this.slots.subarray(n, (1 + this.nInputs) * n);
    }
    return this.inputs;
  }

  // Return an evaluator of the same steps with slots of its own.
  copy() {
    return Object.assign(Object.create(Evaluator.prototype), this, { n: 0 });
  }

  // Compute all slots from those of the inputs.
  run() {
    const { kind, a, b, c, slots, n } = this;
    for (let s = 0, to = (1 + this.nInputs) * n; s < kind.length; s++, to += n) {
      const x = a[s], y = b[s], i = (x >> 1) * n, j = (y >> 1) * n, notX = -(x & 1), notY = -(y & 1);
      if (kind[s] === AND) {
        for (let w = 0; w < n; w++) slots[to + w] = (slots[i + w] ^ notX) & (slots[j + w] ^ notY);
      } else if (kind[s] === XOR) {
        for (let w = 0; w < n; w++) slots[to + w] = slots[i + w] ^ slots[j + w];
      } else {
        const z = c[s], k = (z >> 1) * n, notZ = -(z & 1);
        for (let w = 0; w < n; w++) {
          const high = slots[j + w] ^ notY, low = slots[k + w] ^ notZ;
          slots[to + w] = low ^ ((slots[i + w] ^ notX) & (high ^ low));
        }
      }
    }
  }

  // Return word w of a literal, after `run`.
  word(literal, w = 0) {
    return (this.slots[(literal >> 1) * this.n + w] ^ -(literal & 1)) >>> 0;
  }

  // Return the words of all outputs for words of all inputs, n of each: bit j of word w is sample 32 * w + j.
  evaluate(words, n = 1) {
    this.use(n).set(words);
    this.run();
    return Uint32Array.from({ length: this.nOutputs * n }, (_, k) =>
      this.word(this.outputs[Math.floor(k / n)], k % n));
  }
}
