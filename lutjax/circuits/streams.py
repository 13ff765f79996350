"""Verilog wrappers between two streams with back-pressure: AXI-Stream, or plain valid and ready."""

from lutjax.circuits import _names, _templates, verilog
from lutjax.circuits.circuit import Circuit

INTERFACES = ("handshake", "axi")


def write(
    circuit: Circuit, name: str = "circuit", *, registers: int = 0, interface: str = "handshake"
) -> str:
    """Return a module ``{name}_stream`` around the `lutjax.circuits.verilog.write` module.

    A sample enters in each cycle with input ``valid`` and ``ready`` high. Its answer leaves in a
    cycle with output ``valid`` and ``ready`` high. All answers keep the sample order, regardless
    of stalls on either side. With both sides ready, throughput is one sample per cycle. Answers
    pass through a queue of at least the latency plus two, so no path connects ``ready`` or
    ``valid`` on one side to the other side.

    All input port bits form one vector, the first port lowest, and so do the output port bits.

    Args:
      circuit: any circuit with inputs and outputs.
      name: as in `verilog.write`.
      registers: as in `verilog.write`.
      interface: ``"handshake"``: ``clk``, ``reset`` (synchronous), ``in_valid``, ``in_ready``,
        ``in_data``, ``out_valid``, ``out_ready``, ``out_data``; or ``"axi"``, AXI4-Stream:
        ``aclk``, ``aresetn``, ``s_axis_*`` and ``m_axis_*`` with ``tvalid``, ``tready``, ``tdata``
        in whole bytes, and ``tlast``, which accompanies its sample.

    Raises:
      ValueError: a name that is invalid in Verilog, negative `registers`, an unknown interface, or
        a circuit without inputs or outputs.

    Example:
      >>> from lutjax.circuits import Circuit, Port, streams, verilog
      >>> both = Circuit((Port("x", 2),), (Port("y"),), ((1, 2),), (0b1000,), (2 * 3,))
      >>> list(verilog.declared(streams.write(both), "circuit_stream"))
      ['clk', 'reset', 'in_valid', 'in_ready', 'in_data', 'out_valid', 'out_ready', 'out_data']
    """
    if interface not in INTERFACES:
        raise ValueError(
            f"streams.write: interface is {interface!r}; expected {' or '.join(INTERFACES)}."
        )
    if why := _names.explain_bad_port(name):
        raise ValueError(f"streams.write: name is {name!r}; {why}.")
    if not circuit.inputs or not circuit.outputs:
        raise ValueError("streams.write: the circuit has no inputs or no outputs; expected both.")
    cycles = verilog.latency(circuit, registers)
    # The queue holds all answers on their way when its reader stops: at least the latency plus two.
    bits = (cycles + 1).bit_length()
    n_in, n_out = circuit.n_inputs, circuit.n_outputs
    # AXI streams transfer whole bytes.
    wide_in, wide_out = (-(-n // 8) * 8 for n in (n_in, n_out))
    if interface == "axi":
        ports = ["input wire aclk", "input wire aresetn"]
        ports += ["input wire s_axis_tvalid", "output wire s_axis_tready"]
        ports += [f"input wire [{wide_in - 1}:0] s_axis_tdata", "input wire s_axis_tlast"]
        ports += ["output wire m_axis_tvalid", "input wire m_axis_tready"]
        ports += [f"output wire [{wide_out - 1}:0] m_axis_tdata", "output wire m_axis_tlast"]
        of = {"clock": "aclk", "reset": "!aresetn"}
        of |= {"valid_in": "s_axis_tvalid", "ready_out": "m_axis_tready"}
        of |= {"data_in": f"s_axis_tdata[{n_in - 1}:0]", "last_in": "s_axis_tlast"}
        ready, valid, data, last = "s_axis_tready", "m_axis_tvalid", "m_axis_tdata", "m_axis_tlast"
    else:
        ports = ["input wire clk", "input wire reset"]
        ports += ["input wire in_valid", "output wire in_ready"]
        ports += [f"input wire [{n_in - 1}:0] in_data", "output wire out_valid"]
        ports += ["input wire out_ready", f"output wire [{n_out - 1}:0] out_data"]
        of = {"clock": "clk", "reset": "reset", "valid_in": "in_valid", "ready_out": "out_ready"}
        of |= {"data_in": "in_data", "last_in": "1'b0"}
        ready, valid, data, last = "in_ready", "out_valid", "out_data", ""
    place = f"given[{bits - 1}:0]"
    padding = wide_out - n_out if interface == "axi" else 0
    leaves = f"{{{padding}'d0, queue[{place}]}}" if padding else f"queue[{place}]"
    assigns = [
        f"assign {ready} = ready;",
        f"assign {valid} = valid;",
        f"assign {data} = {leaves};",
        *([f"assign {last} = lasts[{place}];"] if last else []),
    ]
    # Without registers, the answer is there in the cycle of its sample.
    control = []
    if registers:
        control = [f".clk({of['clock']})", f".reset({of['reset']})"]
        control += [".valid_in(take)", ".valid_out(answered)"]
    about = (
        f"// in: {n_in} bits, out: {n_out} bits; a queue of {1 << bits} answers, "
        f"a latency of {cycles + 1} cycles"
    )
    return _templates.fill_template(
        "stream.v",
        module=name,
        about=about,
        ports=",\n".join(f"  {port}" for port in ports),
        in_top=n_in - 1,
        out_top=n_out - 1,
        last=(1 << bits) - 1,
        depth=1 << bits,
        top=bits,
        size=bits + 1,
        place=bits - 1,
        assigns=[f"  {line}" for line in assigns],
        connections=", ".join([*control, *verilog.connections(circuit, "inputs", "answers")]),
        answered="" if registers else "  assign answered = take;",
        **of,
    )
