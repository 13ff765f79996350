// Runs a function on an AVR for each sample: reads JSON, prints JSON. Needs avr8js.
const { CPU, avrInstruction } = require("avr8js");
const job = JSON.parse(require("fs").readFileSync(0, "utf8"));
const bytes = Buffer.from(job.flash, "base64");
const flash = new Uint16Array(bytes.length / 2);
new Uint8Array(flash.buffer).set(bytes);
const memory = Buffer.from(job.memory, "base64");
const found = [];
for (const sample of job.samples) {
  const cpu = new CPU(flash, job.memory_bytes);
  cpu.data.fill(0xa5, job.memory_start);
  cpu.data.set(memory, job.memory_start);
  cpu.data.set(Buffer.from(sample, "base64"), job.input);
  const top = job.memory_bytes + 0x100 - 1;
  cpu.data[top] = (job.done >> 1) & 0xff; // where the function returns to
  cpu.data[top - 1] = (job.done >> 1) >> 8;
  cpu.dataView.setUint16(93, top - 2, true);
  cpu.pc = job.run >> 1;
  let instructions = 0;
  while (cpu.pc !== job.done >> 1) {
    if (instructions++ === job.most) throw new Error("no end");
    avrInstruction(cpu);
  }
  let low = job.memory_start + memory.length;
  while (low <= top && cpu.data[low] === 0xa5) low++;
  found.push({
    output: Buffer.from(cpu.data.slice(job.output, job.output + job.output_bytes)).toString("base64"),
    instructions,
    cycles: cpu.cycles,
    stack: top - low + 1,
  });
}
const { version } = require("avr8js/package.json");
console.log(JSON.stringify({ runs: found, version, node: process.version }));
