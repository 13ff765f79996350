"""Modules with stream interfaces: no lost, duplicated or reordered answers, however long either side waits."""

import numpy as np
import pytest
from cases import slow_except
from cycles import Machine
from example_circuits import life_circuit, random_circuit
from tools import require_tool

from lutjax.circuits import Circuit, Format, Port, simulate, streams, verilog

COPIES = 64
NAMES = {
    "handshake": ("in_valid", "in_ready", "in_data", "out_valid", "out_ready", "out_data", "", ""),
    "axi": (*("s_axis_tvalid", "s_axis_tready", "s_axis_tdata", "m_axis_tvalid", "m_axis_tready",
        "m_axis_tdata"), *("s_axis_tlast", "m_axis_tlast")),
}  # fmt: skip
CIRCUITS = {
    "life": life_circuit(),
    "one bit": random_circuit(3, 1, 4, ports={"y": (1, Format())}),
    "two ports": random_circuit(*(5, {"a": (2, Format(3)), "b": (3, Format(2))}, 60), simplify=True,
        ports={"c": (3, Format(4)), "d": (1, Format(2))}),
}  # fmt: skip


def vector(result, name, n):
    """Return a vector's bit words; AIGER names a single bit without brackets."""
    return [result[f"{name}[{k}]"] if f"{name}[{k}]" in result else result[name] for k in range(n)]


def bit(words, copy):
    return int(words[copy // 64] >> np.uint64(copy % 64)) & 1


def sent_and_received(circuit, registers, interface, n_cycles, how_often, *, seed=0):
    """Return accepted samples and sent answers per copy, each with its last flag, and the outputs per cycle."""
    text = verilog.write(circuit, "dut", registers=registers)
    text += streams.write(circuit, "dut", registers=registers, interface=interface)
    machine = Machine(text, "dut_stream", COPIES // 64, seed)
    in_valid, in_ready, in_data, out_valid, out_ready, out_data, last_in, last_out = NAMES[
        interface
    ]
    reset, on = ("aresetn", False) if interface == "axi" else ("reset", True)
    full, zero = (
        np.full(machine.n_words, 2**64 - 1, np.uint64),
        np.zeros(machine.n_words, np.uint64),
    )
    level = lambda high: full if high else zero  # noqa: E731
    bits = [name for name in machine.inputs if name.startswith(f"{in_data}[")]
    width = max(len(bits), 1)
    machine.step({reset: level(on), in_valid: full, out_ready: full})
    sent, received = [[] for _ in range(COPIES)], [[] for _ in range(COPIES)]
    held, history = [None] * COPIES, []
    for cycle in range(n_cycles):
        flow_in, flow_out = how_often(cycle)
        mask = [machine.drawn(1)[0], machine.drawn(1)[0]]
        valid = level(flow_in == 1) if flow_in in (0, 1) else mask[0]
        ready = level(flow_out == 1) if flow_out in (0, 1) else mask[1]
        data, mark = machine.drawn(width), machine.drawn(1)[0]
        given = {reset: level(not on), in_valid: valid, out_ready: ready, last_in: mark}
        given |= {f"{in_data}[{k}]": row for k, row in enumerate(data)} | {in_data: data[0]}
        result = machine.step(given)
        leaves = [
            *vector(result, out_data, circuit.n_outputs),
            *([result[last_out]] if last_out else []),
        ]
        history.append((result[in_ready], result[out_valid]))
        for copy in range(COPIES):
            taken = bit(valid, copy) and bit(result[in_ready], copy)
            if taken:
                row = [bit(words, copy) for words in data[: circuit.n_inputs]]
                sent[copy].append((row, bit(mark, copy) if last_out else 0))
            answer = [bit(words, copy) for words in leaves]
            if held[copy] is not None:  # what was offered stays until it is taken
                assert bit(result[out_valid], copy)
                assert answer == held[copy]
            held[copy] = None
            if bit(result[out_valid], copy):
                if bit(ready, copy):
                    mark_out = answer[circuit.n_outputs] if last_out else 0
                    received[copy].append((answer[: circuit.n_outputs], mark_out))
                else:
                    held[copy] = answer
    return sent, received, history


def check(circuit, sent, received, *, most_inside):
    for taken, left in zip(sent, received, strict=True):
        assert len(taken) - most_inside <= len(left) <= len(taken)
        if not left:
            continue
        rows = np.array([row for row, _ in taken[: len(left)]], np.uint64).T
        answers = circuit.evaluate(rows) & np.uint64(1)
        assert [(a, mark) for a, (_, mark) in zip(answers.T.tolist(), taken, strict=False)] == left


@pytest.mark.parametrize(("name", "registers", "interface"), slow_except([
    ("one bit", 1, "axi"),
    ("two ports", 2, "handshake"),
    ("life", 0, "axi"),
    ("life", 1, "handshake"),
    ("two ports", 2, "axi"),
], *("one bit-1-axi", "two ports-2-handshake")))  # fmt: skip
def test_every_answer_leaves_once_and_in_order(name, registers, interface):
    require_tool("yosys")
    circuit = CIRCUITS[name]
    depth = 1 << (verilog.latency(circuit, registers) + 1).bit_length()

    def how_often(cycle):
        """Return each side's ready rate: both random, one never, one always, both always."""
        return [(0.5, 0.5), (1, 0), (0.5, 1), (1, 0.5), (0, 1), (1, 1)][cycle // 40]

    sent, received, history = sent_and_received(circuit, registers, interface, 240, how_often)
    check(circuit, sent, received, most_inside=depth)
    assert min(map(len, sent)) > 80
    full = np.uint64(2**64 - 1)
    assert all((ready == full).all() for ready, _ in history[205:])  # a sample in every cycle
    assert all((valid == full).all() for _, valid in history[215:])
    assert not any(ready.any() for ready, _ in history[75:80])  # and none that has no room


@pytest.mark.parametrize(("arguments", "options", "message"), [
    ((), {"interface": "wishbone"}, "interface is 'wishbone'; expected handshake or axi"),
    (("module",), {}, "name is 'module'"),
    ((), {"registers": -1}, "registers is -1"),
])  # fmt: skip
def test_arguments(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        streams.write(life_circuit(), *arguments, **options)
    with pytest.raises(ValueError, match="no inputs or no outputs"):
        streams.write(Circuit((), (Port("y"),), (), (), (0,)))


def test_axi_has_whole_bytes():
    text = streams.write(CIRCUITS["two ports"], "dut", registers=2, interface="axi")
    ports = verilog.declared(text, "dut_stream")
    assert (ports["s_axis_tdata"], ports["m_axis_tdata"]) == (
        "input wire [15:0]",
        "output wire [15:0]",
    )
    assert set(ports) >= {"aclk", "aresetn", "s_axis_tlast", "m_axis_tlast"}
    assert "s_axis_tdata[11:0]" in text
    assert "{2'd0, queue[" in text


BENCH = """
module bench;
  reg clk, reset, in_valid, out_ready;
  reg [8:0] in_data, samples [0:511];
  wire in_ready, out_valid, out_data, expected;
  integer sent, got, wrong, cycle;
  dut_stream stream(.clk(clk), .reset(reset), .in_valid(in_valid), .in_ready(in_ready), .in_data(in_data),
    .out_valid(out_valid), .out_ready(out_ready), .out_data(out_data));
  plain alone(.x(samples[got]), .y(expected));
  initial begin
    clk = 0; reset = 1; in_valid = 0; out_ready = 0; in_data = 0; sent = 0; got = 0; wrong = 0;
    #1 clk = 1; #1 clk = 0; reset = 0;
    for (cycle = 0; cycle < 4000 && got < 512; cycle = cycle + 1) begin
      in_valid = sent < 512 && $random % 3 != 0; out_ready = $random % 2 == 0; in_data = sent * 73;
      #1;
      if (out_valid && out_ready) begin
        if (out_data !== expected) wrong = wrong + 1;
        got = got + 1;
      end
      if (in_valid && in_ready) begin samples[sent] = in_data; sent = sent + 1; end
      clk = 1; #1 clk = 0; #1;
    end
    if (got == 512 && wrong == 0) $display("PASS: %0d answers", got);
    else $display("FAIL: %0d answers, %0d wrong", got, wrong);
  end
endmodule
"""


def test_streams_in_a_simulator():
    require_tool("iverilog")
    circuit = life_circuit()
    module = verilog.write(circuit, "dut", registers=2) + verilog.write(circuit, "plain")
    module += streams.write(circuit, "dut", registers=2)
    assert simulate.run(module, BENCH)
