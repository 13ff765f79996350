"""Section 10: recurrent cells, and the loop over time."""

import flax.linen
import jax
import numpy as np

from coverage_rows._row import Section, normal

SECTION = Section(
    "Recurrent Kernels (LSTM/GRU)",
    "`x` is (batch, time, features), or (batch, features) for a single cell step. `params` follows Flax's cells: "
    "each gate has an input kernel and a state kernel.",
)

LSTM = {
    "params": {
        **{f"i{gate}": {"kernel": normal(2, 3)} for gate in "ifgo"},
        **{f"h{gate}": {"kernel": normal(3, 3), "bias": normal(3)} for gate in "ifgo"},
    },
    "c": normal(2, 3),
    "h": normal(2, 3),
}
GRU = {
    "params": {
        **{f"i{gate}": {"kernel": normal(2, 3), "bias": normal(3)} for gate in "rzn"},
        **{f"h{gate}": {"kernel": normal(3, 3)} for gate in "rz"},
        "hn": {"kernel": normal(3, 3), "bias": normal(3)},
    },
    "h": normal(2, 3),
}
IMAGES = {
    "params": {
        "ih": {"kernel": normal(3, 2, 1, 8), "bias": normal(8)},
        "hh": {"kernel": normal(3, 2, 2, 8), "bias": normal(8)},
    },
    "x": normal(1, 2, 3, 2, 1),
    "c": normal(1, 3, 2, 2),
    "h": normal(1, 3, 2, 2),
}
STEP, SERIES = {"x": normal(2, 2)}, {"x": normal(2, 4, 2)}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def affine(parameters, x):
    return x @ parameters["kernel"] + parameters.get("bias", 0.0)


def affine_backward(parameters, x, dy):
    """Cotangents of parameters and of the input."""
    moved = {"kernel": x.T @ dy} | ({"bias": dy.sum(0)} if "bias" in parameters else {})
    return moved, dy @ parameters["kernel"].T


def over_time(cell, x, *carry):
    """States after each step, the first one included."""
    states = [carry]
    for t in range(x.shape[1]):
        states.append(cell(x[:, t], *states[-1]))
    return states


def added(tree, other):
    return jax.tree.map(np.add, tree, other)


def lstm_gates(params, x, h):
    i, f, g, o = (affine(params[f"i{gate}"], x) + affine(params[f"h{gate}"], h) for gate in "ifgo")
    return sigmoid(i), sigmoid(f), np.tanh(g), sigmoid(o)


def lstm_cell(params, x, c, h):
    i, f, g, o = lstm_gates(params, x, h)
    c = f * c + i * g
    return c, o * np.tanh(c)


def lstm_cell_formula(params, x, c, h, dy):
    """Hochreiter and Schmidhuber's gates by the chain rule: cotangents of parameters, input and state."""
    dc, dh = dy
    i, f, g, o = lstm_gates(params, x, h)
    new = np.tanh(f * c + i * g)
    dc = dc + dh * o * (1 - new**2)
    of_gates = {
        "i": dc * g * i * (1 - i),
        "f": dc * c * f * (1 - f),
        "g": dc * i * (1 - g**2),
        "o": dh * new * o * (1 - o),
    }
    moved, dx, before = {}, 0.0, 0.0
    for gate, cotangent in of_gates.items():
        moved[f"i{gate}"], of_x = affine_backward(params[f"i{gate}"], x, cotangent)
        moved[f"h{gate}"], of_h = affine_backward(params[f"h{gate}"], h, cotangent)
        dx, before = dx + of_x, before + of_h
    return moved, dx, dc * f, before


def lstm(params, x, c, h):
    states = over_time(lambda *step: lstm_cell(params, *step), x, c, h)
    return np.stack([h for _, h in states[1:]], 1)


def lstm_formula(params, x, c, h, dy):
    """Backwards through time."""
    states = over_time(lambda *step: lstm_cell(params, *step), x, c, h)
    total, dx = jax.tree.map(np.zeros_like, params), np.zeros_like(x)
    dc, dh = np.zeros_like(c), np.zeros_like(h)
    for t in reversed(range(x.shape[1])):
        moved, dx[:, t], dc, dh = lstm_cell_formula(params, x[:, t], *states[t], (dc, dh + dy[:, t]))
        total = added(total, moved)
    return total, dx, dc, dh


@SECTION.forward(lstm, **LSTM, **SERIES)
def lstm_forward(params, x, c, h):
    rnn = flax.linen.RNN(flax.linen.LSTMCell(3))
    return rnn.apply({"params": {"cell": params}}, x, initial_carry=(c, h))


@SECTION.backward(lstm_forward, "params", "x", "c", "h", formula=lstm_formula)
def lstm_backward(params, x, c, h, dy):
    return jax.vjp(lstm_forward, params, x, c, h)[1](dy)


@SECTION.forward(lstm_cell, **LSTM, **STEP)
def lstm_cell_forward(params, x, c, h):
    return flax.linen.LSTMCell(3).apply({"params": params}, (c, h), x)[0]


@SECTION.backward(lstm_cell_forward, "params", "x", "c", "h", formula=lstm_cell_formula)
def lstm_cell_backward(params, x, c, h, dy):
    return jax.vjp(lstm_cell_forward, params, x, c, h)[1](dy)


def gru_gates(params, x, h):
    r = sigmoid(affine(params["ir"], x) + affine(params["hr"], h))
    z = sigmoid(affine(params["iz"], x) + affine(params["hz"], h))
    return r, z, np.tanh(affine(params["in"], x) + r * affine(params["hn"], h))


def gru_cell(params, x, h):
    _, z, n = gru_gates(params, x, h)
    return (1 - z) * n + z * h


def gru_cell_formula(params, x, h, dy):
    r, z, n = gru_gates(params, x, h)
    dn = dy * (1 - z) * (1 - n**2)
    of_input = {
        "r": dn * affine(params["hn"], h) * r * (1 - r),
        "z": dy * (h - n) * z * (1 - z),
        "n": dn,
    }
    of_state = of_input | {"n": dn * r}
    moved, dx, dh = {}, 0.0, dy * z
    for gate in "rzn":
        moved[f"i{gate}"], of_x = affine_backward(params[f"i{gate}"], x, of_input[gate])
        moved[f"h{gate}"], of_h = affine_backward(params[f"h{gate}"], h, of_state[gate])
        dx, dh = dx + of_x, dh + of_h
    return moved, dx, dh


def gru(params, x, h):
    states = over_time(lambda x, h: (gru_cell(params, x, h),), x, h)
    return np.stack([h for (h,) in states[1:]], 1)


def gru_formula(params, x, h, dy):
    states = over_time(lambda x, h: (gru_cell(params, x, h),), x, h)
    total, dx, dh = jax.tree.map(np.zeros_like, params), np.zeros_like(x), np.zeros_like(h)
    for t in reversed(range(x.shape[1])):
        moved, dx[:, t], dh = gru_cell_formula(params, x[:, t], *states[t], dh + dy[:, t])
        total = added(total, moved)
    return total, dx, dh


@SECTION.forward(gru, **GRU, **SERIES)
def gru_forward(params, x, h):
    rnn = flax.linen.RNN(flax.linen.GRUCell(3))
    return rnn.apply({"params": {"cell": params}}, x, initial_carry=h)


@SECTION.backward(gru_forward, "params", "x", "h", formula=gru_formula)
def gru_backward(params, x, h, dy):
    return jax.vjp(gru_forward, params, x, h)[1](dy)


@SECTION.forward(gru_cell, **GRU, **STEP)
def gru_cell_forward(params, x, h):
    return flax.linen.GRUCell(3).apply({"params": params}, h, x)[0]


@SECTION.backward(gru_cell_forward, "params", "x", "h", formula=gru_cell_formula)
def gru_cell_backward(params, x, h, dy):
    return jax.vjp(gru_cell_forward, params, x, h)[1](dy)


def same(parameters, x):
    """A convolution of 3 x 2, channels last, that keeps the size: padding of 1 above, below and to the right."""
    wide = np.pad(x, [(0, 0), (1, 1), (0, 1), (0, 0)])
    y = np.zeros((*x.shape[:3], parameters["kernel"].shape[-1])) + parameters["bias"]
    for row, column in np.ndindex(*x.shape[1:3]):
        window = wide[:, row : row + 3, column : column + 2].reshape(len(x), -1)
        y[:, row, column] += window @ parameters["kernel"].reshape(window.shape[1], -1)
    return y


def convlstm(params, x, c, h):
    """Shi et al. 2015 without peepholes; Flax adds 1 to the forget gate."""

    def cell(x, c, h):
        i, g, f, o = np.split(same(params["ih"], x) + same(params["hh"], h), 4, -1)
        c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(g)
        return c, sigmoid(o) * np.tanh(c)

    return np.stack([h for _, h in over_time(cell, x, c, h)[1:]], 1)


@SECTION.forward(convlstm, **IMAGES)
def convlstm_forward(params, x, c, h):
    """`x` is (batch, time, height, width, channels)."""
    rnn = flax.linen.RNN(flax.linen.ConvLSTMCell(2, (3, 2)))
    return rnn.apply({"params": {"cell": params}}, x, initial_carry=(c, h))


@SECTION.backward(convlstm_forward, "params", "x", "c", "h")
def convlstm_backward(params, x, c, h, dy):
    return jax.vjp(convlstm_forward, params, x, c, h)[1](dy)
