"""Place and route a circuit on an iCE40 HX8K, and print what it takes and its clock.

A circuit has more inputs than the chip has pins, so they come from a shift register, one number a cycle:

    python benchmarks/fpga.py circuit.json --registers 4

The circuit is a file of `lutjax.circuits.netlist_json`. It needs pyosys (ABC and Yosys) and nextpnr-ice40.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from lutjax import circuits
from lutjax.circuits import Circuit, abc, verilog

WRAPPER = """\
module top (input wire clk, input wire reset, input wire shift, input wire [{top}:0] number, input wire valid_in,
            output reg valid_out, output reg [{out_top}:0] y);
  reg [{in_top}:0] x;
  reg valid;
  wire valid_y;
  wire [{out_top}:0] answer;
  always @(posedge clk) begin
    if (shift) x <= {{number, x[{in_top}:{bits}]}};
    valid <= valid_in;
    valid_out <= valid_y;
    y <= answer;
  end
  circuit dut (.clk(clk), .reset(reset), .valid_in(valid), .valid_out(valid_y), .{x}(x), .{y}(answer));
endmodule
"""
YOSYS = """
from pyosys import libyosys
design = libyosys.Design()
for command in ("read_verilog circuit.v top.v", "synth_ice40 -top top", "delete t:$scopeinfo", "write_json top.json"):
    libyosys.run_pass("tee -q -o yosys.log " + command, design)
"""


def wrapper(circuit: Circuit) -> str:
    """Return a module around the module of a circuit of one input and one output port, whose inputs come one number a cycle."""
    (x,), (y,) = circuit.inputs, circuit.outputs
    bits = x.format.bits
    return WRAPPER.format(
        top=bits - 1, bits=bits, in_top=x.n_bits - 1, out_top=y.n_bits - 1, x=x.name, y=y.name
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("circuit", type=pathlib.Path, help="a file of lutjax.circuits.netlist_json")
    parser.add_argument("--registers", type=int, default=4, help="levels of 4-input tables between registers")
    parser.add_argument("--seed", type=int, default=1, help="of placement")
    parser.add_argument("--seconds", type=float, default=1800, help="after which a tool is ended")
    options = parser.parse_args()
    circuit = circuits.netlist_json.read(options.circuit.read_text())
    mapped = abc.optimised(circuit, "strash; if -K 4 -a")
    if not abc.cec(circuit, mapped):
        raise SystemExit("the circuit of 4-input tables could not be proved equal")
    latency = verilog.latency(mapped, options.registers)
    print(
        f"{len(mapped)} tables of 4 inputs in {mapped.depth} levels, proved equal; latency {latency} cycles",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "circuit.v").write_text(circuits.verilog.write(mapped, registers=options.registers))
        (folder / "top.v").write_text(wrapper(mapped))
        commands = {
            "synthesis": [sys.executable, "-c", YOSYS],
            "nextpnr": [
                *("nextpnr-ice40", "--hx8k", "--package", "ct256", "--json", "top.json", "--asc", "top.asc"),
                *("--seed", str(options.seed), "--freq", "50", "--timing-allow-fail"),
            ],
        }
        for step, command in commands.items():
            start = time.perf_counter()
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=options.seconds, check=False
            )
            print(f"{step}: {time.perf_counter() - start:.0f} s", flush=True)
            if done.returncode:
                raise SystemExit((done.stdout + done.stderr)[-2000:])
        text = done.stdout + done.stderr
    for line in re.findall(r"(?:ICESTORM_LC|SB_IO|SB_GB): .*", text)[-3:]:
        print(line)
    print(re.findall(r"Max frequency for clock .*", text)[-1])


if __name__ == "__main__":
    main()
