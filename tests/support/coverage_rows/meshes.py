"""Section 14: volumes and meshes."""

import jax
import jax.numpy as jnp
import numpy as np

from coverage_rows._row import Section, indices, normal

SECTION = Section(
    "3D/Mesh Kernels",
    "`neighbors` contains the four edges around each mesh edge, `spirals` the vertices in the spiral around each vertex.",
)

MESH = {"x": normal(6, 2), "neighbors": indices(6, 6, 4), "w": normal(10, 3), "b": normal(3)}
SPIRALS = {"x": normal(5, 2), "spirals": indices(5, 5, 3), "w": normal(6, 3), "b": normal(3)}


def blocks(x):
    """Each place of the input, and the places of the output that are copies of it."""
    for d, h, w in np.ndindex(*x.shape[2:]):
        yield (d, h, w), (slice(2 * d, 2 * d + 2), slice(3 * h, 3 * h + 3), slice(2 * w, 2 * w + 2))


def upsampled(x):
    y = np.empty((*x.shape[:2], 2 * x.shape[2], 3 * x.shape[3], 2 * x.shape[4]))
    for at, copies in blocks(x):
        y[:, :, *copies] = x[:, :, *at][..., None, None, None]
    return y


def upsampled_formula(x, dy):
    dx = np.empty_like(x)
    for at, copies in blocks(x):
        dx[:, :, *at] = dy[:, :, *copies].sum((2, 3, 4))
    return dx


@SECTION.forward(upsampled, x=normal(1, 2, 3, 2, 3))
def upsample3d_nearest(x):
    """`x` is (batch, channels, depth, height, width); by 2, 3 and 2."""
    n, c, d, h, w = x.shape
    return jax.image.resize(x, (n, c, 2 * d, 3 * h, 2 * w), "nearest")


@SECTION.backward(upsample3d_nearest, "x", formula=upsampled_formula)
def upsample3d_nearest_backward(x, dy):
    return jax.vjp(upsample3d_nearest, x)[1](dy)


def mesh_reading(x, neighbors, edge):
    a, b, c, d = (x[other] for other in neighbors[edge])
    return np.concatenate([x[edge], a + c, abs(a - c), b + d, abs(b - d)])


def mesh_convolved(x, neighbors, w, b):
    return np.stack([mesh_reading(x, neighbors, edge) @ w + b for edge in range(len(x))])


def mesh_formula(x, neighbors, w, b, dy):
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for edge, cotangent in enumerate(dy):
        dw += np.outer(mesh_reading(x, neighbors, edge), cotangent)
        own, *pairs = np.split(w @ cotangent, 5)
        dx[edge] += own
        for (one, other), (total, apart) in zip(((0, 2), (1, 3)), (pairs[:2], pairs[2:]), strict=True):
            one, other = neighbors[edge, one], neighbors[edge, other]
            sign = np.sign(x[one] - x[other])
            dx[one] += total + sign * apart
            dx[other] += total - sign * apart
    return dx, dw, dy.sum(0)


@SECTION.forward(mesh_convolved, **MESH)
def mesh_conv_forward(x, neighbors, w, b):
    """Hanocka et al. 2019: sums and distances of opposite edges, which their order does not change."""
    one, two, three, four = jnp.moveaxis(x[neighbors], 1, 0)
    pairs = [one + three, jnp.abs(one - three), two + four, jnp.abs(two - four)]
    return jnp.concatenate([x, *pairs], axis=-1) @ w + b


@SECTION.backward(mesh_conv_forward, "x", "w", "b", formula=mesh_formula)
def mesh_conv_backward(x, neighbors, w, b, dy):
    return jax.vjp(lambda x, w, b: mesh_conv_forward(x, neighbors, w, b), x, w, b)[1](dy)


def spiralled(x, spirals, w, b):
    return np.stack([np.concatenate([x[other] for other in spiral]) @ w + b for spiral in spirals])


def spiral_formula(x, spirals, w, b, dy):
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for spiral, cotangent in zip(spirals, dy, strict=True):
        dw += np.outer(np.concatenate([x[other] for other in spiral]), cotangent)
        for other, moved in zip(spiral, np.split(w @ cotangent, len(spiral)), strict=True):
            dx[other] += moved
    return dx, dw, dy.sum(0)


@SECTION.forward(spiralled, **SPIRALS)
def spiral_conv_forward(x, spirals, w, b):
    """Lim et al. 2018."""
    return x[spirals].reshape(len(spirals), -1) @ w + b


@SECTION.backward(spiral_conv_forward, "x", "w", "b", formula=spiral_formula)
def spiral_conv_backward(x, spirals, w, b, dy):
    return jax.vjp(lambda x, w, b: spiral_conv_forward(x, spirals, w, b), x, w, b)[1](dy)
