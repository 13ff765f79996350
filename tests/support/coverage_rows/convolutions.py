"""Section 3: convolutions, channels first."""

import jax
import numpy as np

from coverage_rows._row import Section, normal

SECTION = Section(
    "Convolution Kernels",
    "Channels come first: `x` is (batch, channels, height, width), `w` (out, in, height, width).",
)

IMAGES = {"x": normal(2, 2, 4, 5), "w": normal(3, 2, 3, 2)}
VOLUMES = {"x": normal(1, 2, 3, 4, 3), "w": normal(2, 2, 2, 3, 2)}


def taps(x, window, stride, pad, dilation):
    """Each place of the output, each tap of the window, and the place of the padded input under it."""
    sizes = [
        (n + 2 * pad - dilation * (taps - 1) - 1) // stride + 1
        for n, taps in zip(x.shape[2:], window, strict=True)
    ]
    for at in np.ndindex(*sizes):
        for tap in np.ndindex(*window):
            yield at, tap, tuple(stride * a + dilation * t for a, t in zip(at, tap, strict=True))


def padded(x, pad):
    return np.pad(x, [(0, 0), (0, 0)] + [(pad, pad)] * (x.ndim - 2))


def convolve(x, w, stride=1, pad=0, dilation=1, groups=1):
    """Over any number of axes, from the definition."""
    places = list(taps(x, w.shape[2:], stride, pad, dilation))
    x, outputs = padded(x, pad), w.shape[0] // groups
    y = np.zeros((x.shape[0], w.shape[0], *(a + 1 for a in places[-1][0])))
    for at, tap, place in places:
        for group in range(groups):
            read = slice(group * w.shape[1], (group + 1) * w.shape[1])
            written = slice(group * outputs, (group + 1) * outputs)
            y[:, written, *at] += x[:, read, *place] @ w[written, :, *tap].T
    return y


def convolve_backward(x, w, dy, stride=1, pad=0, dilation=1, groups=1):
    """Its cotangents: every product of `convolve`, in both directions."""
    places = list(taps(x, w.shape[2:], stride, pad, dilation))
    x, outputs = padded(x, pad), w.shape[0] // groups
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for at, tap, place in places:
        for group in range(groups):
            read = slice(group * w.shape[1], (group + 1) * w.shape[1])
            written = slice(group * outputs, (group + 1) * outputs)
            dx[:, read, *place] += dy[:, written, *at] @ w[written, :, *tap]
            dw[written, :, *tap] += dy[:, written, *at].T @ x[:, read, *place]
    inside = tuple(slice(pad, n - pad) for n in x.shape[2:])
    return dx[:, :, *inside], dw


def spread(x, w, stride):
    """The transpose of a convolution: every input number adds a window to the output."""
    sizes = [stride * (n - 1) + taps for n, taps in zip(x.shape[2:], w.shape[2:], strict=True)]
    y = np.zeros((x.shape[0], w.shape[1], *sizes))
    for at in np.ndindex(*x.shape[2:]):
        for tap in np.ndindex(*w.shape[2:]):
            y[:, :, *(stride * a + t for a, t in zip(at, tap, strict=True))] += x[:, :, *at] @ w[:, :, *tap]
    return y


def spread_backward(x, w, dy, stride):
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for at in np.ndindex(*x.shape[2:]):
        for tap in np.ndindex(*w.shape[2:]):
            place = tuple(stride * a + t for a, t in zip(at, tap, strict=True))
            dx[:, :, *at] += dy[:, :, *place] @ w[:, :, *tap].T
            dw[:, :, *tap] += x[:, :, *at].T @ dy[:, :, *place]
    return dx, dw


def columns(x):
    """Windows of 3 x 2 with one line of padding: channel, row and column of the window in one axis."""
    places = list(taps(x, (3, 2), 1, 1, 1))
    sizes = [a + 1 for a in places[-1][0]]
    y, x = np.zeros((x.shape[0], x.shape[1], 3, 2, *sizes)), padded(x, 1)
    for at, tap, place in places:
        y[:, :, *tap, *at] = x[:, :, *place]
    return y.reshape(x.shape[0], -1, *sizes)


def columns_backward(x, dy):
    dy, dx = dy.reshape(*x.shape[:2], 3, 2, *dy.shape[2:]), padded(np.zeros_like(x), 1)
    for at, tap, place in taps(x, (3, 2), 1, 1, 1):
        dx[:, :, *place] += dy[:, :, *tap, *at]
    return dx[:, :, 1:-1, 1:-1]


@SECTION.forward(columns, x=normal(2, 2, 4, 3))
def im2col(x):
    return jax.lax.conv_general_dilated_patches(x, (3, 2), (1, 1), [(1, 1), (1, 1)])


@SECTION.forward(lambda x, w: convolve(x, w, stride=2, pad=1), **IMAGES)
def conv2d_direct(x, w):
    return jax.lax.conv_general_dilated(x, w, (2, 2), [(1, 1), (1, 1)])


@SECTION.forward(lambda x, w: convolve(x, w, pad=1, groups=2), x=normal(2, 2, 3, 4), w=normal(4, 1, 3, 2))
def depthwise_conv2d(x, w):
    """`w` is (channels * multiplier, 1, height, width)."""
    return jax.lax.conv_general_dilated(x, w, (1, 1), [(1, 1), (1, 1)], feature_group_count=x.shape[1])


@SECTION.forward(lambda x, w: spread(x, w, 2), x=normal(2, 2, 3, 4), w=normal(2, 3, 3, 2))
def conv_transpose2d(x, w):
    """`w` is (in, out, height, width)."""
    layout = ("NCHW", "OIHW", "NCHW")
    return jax.lax.conv_transpose(x, w, (2, 2), "VALID", dimension_numbers=layout, transpose_kernel=True)


@SECTION.forward(lambda x, w: convolve(x, w, pad=1), **VOLUMES)
def conv3d_direct(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1, 1), [(1, 1), (1, 1), (1, 1)])


@SECTION.backward(im2col, "x", formula=columns_backward)
def col2im(x, dy):
    return jax.linear_transpose(im2col, x)(dy)


@SECTION.backward(
    conv2d_direct, "x", formula=lambda x, w, dy: convolve_backward(x, w, dy, stride=2, pad=1)[0]
)
def conv2d_backward_input(x, w, dy):
    return jax.vjp(lambda x: conv2d_direct(x, w), x)[1](dy)


@SECTION.backward(
    conv2d_direct, "w", formula=lambda x, w, dy: convolve_backward(x, w, dy, stride=2, pad=1)[1]
)
def conv2d_backward_weights(x, w, dy):
    return jax.vjp(lambda w: conv2d_direct(x, w), w)[1](dy)


@SECTION.backward(conv3d_direct, "x", formula=lambda x, w, dy: convolve_backward(x, w, dy, pad=1)[0])
def conv3d_backward_input(x, w, dy):
    return jax.vjp(lambda x: conv3d_direct(x, w), x)[1](dy)


@SECTION.backward(conv3d_direct, "w", formula=lambda x, w, dy: convolve_backward(x, w, dy, pad=1)[1])
def conv3d_backward_weights(x, w, dy):
    return jax.vjp(lambda w: conv3d_direct(x, w), w)[1](dy)


@SECTION.backward(conv_transpose2d, "x", formula=lambda x, w, dy: spread_backward(x, w, dy, 2)[0])
def deconv_backward_input(x, w, dy):
    return jax.vjp(lambda x: conv_transpose2d(x, w), x)[1](dy)


@SECTION.backward(conv_transpose2d, "w", formula=lambda x, w, dy: spread_backward(x, w, dy, 2)[1])
def deconv_backward_weights(x, w, dy):
    return jax.vjp(lambda w: conv_transpose2d(x, w), w)[1](dy)


@SECTION.backward(
    depthwise_conv2d, "x", "w", formula=lambda x, w, dy: convolve_backward(x, w, dy, pad=1, groups=2)
)
def depthwise_conv2d_backward(x, w, dy):
    return jax.vjp(depthwise_conv2d, x, w)[1](dy)


@SECTION.backward(
    lambda x, w: convolve(x, w, pad=1, dilation=2),
    "x",
    "w",
    formula=lambda x, w, dy: convolve_backward(x, w, dy, pad=1, dilation=2),
    **IMAGES,
)
def dilated_conv2d_backward(x, w, dy):
    return jax.vjp(
        lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), [(1, 1), (1, 1)], rhs_dilation=(2, 2)), x, w
    )[1](dy)
