"""Section 13: sums, maxima and products over the edges of a graph."""

import jax
import jax.numpy as jnp
import numpy as np

from coverage_rows._row import Section, fixed, indices, normal, positive

SECTION = Section(
    "Graph Neural Network Kernels",
    "Edges are two node lists, `senders` and `receivers`; the test graph has 5 nodes. Sparse matrices are "
    "`values` at `rows` and `cols`.",
)

NODES = 5
SPARSE = {"values": normal(7), "rows": indices(NODES, 7), "cols": indices(4, 7), "x": normal(4, 3)}
# node 3 receives nothing
RECEIVERS = fixed([0, 1, 1, 2, 4, 4, 4, 0])
EDGES = {"x": normal(8, 3), "receivers": RECEIVERS}
MESSAGES = {
    "x": normal(NODES, 2),
    "edges": normal(8, 2),
    "w": normal(6, 3),
    "senders": indices(NODES, 8),
    "receivers": RECEIVERS,
}


def sparse_product(values, rows, cols, x):
    y = np.zeros((NODES, x.shape[1]))
    for value, row, col in zip(values, rows, cols, strict=True):
        y[row] += value * x[col]
    return y


def sparse_formula(values, rows, cols, x, dy):
    dx = np.zeros_like(x)
    for value, row, col in zip(values, rows, cols, strict=True):
        dx[col] += value * dy[row]
    return np.array([dy[row] @ x[col] for row, col in zip(rows, cols, strict=True)]), dx


@SECTION.forward(sparse_product, **SPARSE)
def sparse_mm_forward(values, rows, cols, x):
    return jax.ops.segment_sum(values[:, None] * x[cols], rows, num_segments=5)


@SECTION.backward(sparse_mm_forward, "values", "x", formula=sparse_formula)
def sparse_mm_backward(values, rows, cols, x, dy):
    return jax.vjp(lambda values, x: sparse_mm_forward(values, rows, cols, x), values, x)[1](dy)


def messages(x, edges, w, senders, receivers):
    y = np.zeros((NODES, w.shape[1]))
    for edge, (sender, receiver) in enumerate(zip(senders, receivers, strict=True)):
        y[receiver] += np.maximum(np.concatenate([x[sender], x[receiver], edges[edge]]) @ w, 0)
    return y


def messages_formula(x, edges, w, senders, receivers, dy):
    dx, dedges, dw = np.zeros_like(x), np.zeros_like(edges), np.zeros_like(w)
    for edge, (sender, receiver) in enumerate(zip(senders, receivers, strict=True)):
        read = np.concatenate([x[sender], x[receiver], edges[edge]])
        cotangent = dy[receiver] * (read @ w > 0)
        dw += np.outer(read, cotangent)
        dx[sender] += (w @ cotangent)[:2]
        dx[receiver] += (w @ cotangent)[2:4]
        dedges[edge] += (w @ cotangent)[4:]
    return dx, dedges, dw


@SECTION.forward(messages, **MESSAGES)
def message_passing_forward(x, edges, w, senders, receivers):
    read = jnp.concatenate([x[senders], x[receivers], edges], axis=-1)
    return jax.ops.segment_sum(jax.nn.relu(read @ w), receivers, num_segments=5)


@SECTION.backward(message_passing_forward, "x", "edges", "w", formula=messages_formula)
def message_passing_backward(x, edges, w, senders, receivers, dy):
    return jax.vjp(lambda *moved: message_passing_forward(*moved, senders, receivers), x, edges, w)[1](dy)


def grouped(x, receivers, reduce):
    """The edges of each node; 0 where it has none."""
    found = [x[receivers == node] for node in range(NODES)]
    return np.stack([reduce(lines, 0) if len(lines) else np.zeros(x.shape[1]) for lines in found])


@SECTION.forward(lambda x, receivers: grouped(x, receivers, np.sum), **EDGES)
def scatter_add(x, receivers):
    return jax.ops.segment_sum(x, receivers, num_segments=5)


@SECTION.forward(lambda x, receivers: grouped(x, receivers, np.max), **EDGES)
def scatter_max(x, receivers):
    """0 for nodes without edges."""
    y = jax.ops.segment_max(x, receivers, num_segments=5)
    return jnp.where(jnp.isneginf(y), 0.0, y)


@SECTION.forward(lambda x, receivers: grouped(x, receivers, np.mean), **EDGES)
def scatter_mean(x, receivers):
    """0 for nodes without edges."""
    n = jax.ops.segment_sum(jnp.ones_like(x), receivers, num_segments=5)
    return jax.ops.segment_sum(x, receivers, num_segments=5) / jnp.maximum(n, 1.0)


def edge_softmax_reference(x, receivers):
    y = np.exp(x)
    return np.stack([y[edge] / y[receivers == node].sum(0) for edge, node in enumerate(receivers)])


@SECTION.forward(edge_softmax_reference, **EDGES)
def edge_softmax(x, receivers):
    """Over the edges of each receiver."""
    top = jax.ops.segment_max(jax.lax.stop_gradient(x), receivers, num_segments=5)
    y = jnp.exp(x - top[receivers])
    return y / jax.ops.segment_sum(y, receivers, num_segments=5)[receivers]


DIFFUSION = {"x": normal(4, 2), "links": positive(4, 4), "w": normal(2, 3, 2, 2)}


def diffused(x, links, w):
    """Walks of 0, 1 and 2 steps along the links and against them, each with weights of its own."""
    y = np.zeros((x.shape[0], w.shape[-1]))
    for along, weights in zip((links, links.T), w, strict=True):
        walked = x
        for step in weights:
            y = y + walked @ step
            walked = np.array([(line / sum(line)) @ walked for line in along])
    return y


def diffused_formula(x, links, w, dy):
    dx, dlinks, dw = np.zeros_like(x), np.zeros_like(links), np.zeros_like(w)
    for direction, along in enumerate((links, links.T)):
        total = along.sum(1, keepdims=True)
        walk = along / total
        dwalk = np.zeros_like(walk)
        walks = [np.linalg.matrix_power(walk, k) for k in range(3)]
        for k in range(3):
            dw[direction, k] = (walks[k] @ x).T @ dy
            outer = dy @ w[direction, k].T
            dx += walks[k].T @ outer
            dwalk += sum(walks[j].T @ outer @ (walks[k - 1 - j] @ x).T for j in range(k))
        moved = (dwalk - np.sum(dwalk * walk, 1, keepdims=True)) / total
        dlinks += moved.T if direction else moved
    return dx, dlinks, dw


@SECTION.forward(diffused, **DIFFUSION)
def diffusion_conv_forward(x, links, w):
    """Li et al. 2018: `links` weighs the edge between each two nodes, `w` is (2 directions, steps, in, out)."""
    walks = (links / links.sum(1, keepdims=True), links.T / links.T.sum(1, keepdims=True))
    powers = jnp.stack([jnp.stack([jnp.linalg.matrix_power(walk, k) for k in range(3)]) for walk in walks])
    return jnp.einsum("dknm,mi,dkio->no", powers, x, w)


@SECTION.backward(diffusion_conv_forward, "x", "links", "w", formula=diffused_formula)
def diffusion_conv_backward(x, links, w, dy):
    return jax.vjp(diffusion_conv_forward, x, links, w)[1](dy)
