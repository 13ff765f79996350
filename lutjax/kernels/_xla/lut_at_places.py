"""`lut_at_places` in plain JAX: the detection of all places, then the look-up with places as samples."""

import math
from types import ModuleType

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import detect, lookup, sparse_lookup
from lutjax.ops.detect import Detect
from lutjax.ops.lookup import Lookup
from lutjax.ops.lut_at_places import LutAtPlaces
from lutjax.ops.sparse_lookup import SparseLookup
from lutjax.values._detection import Detection


def forward(call: LutAtPlaces, *, device: Device) -> jax.Array:
    found = detect.forward(_detect(call), device=device)
    rows, look_up = _look_up(call, found)
    y = rows.forward(look_up, device=device)
    return y.reshape(len(call.x), call.n_places, call.n_outputs)


def backward(
    call: LutAtPlaces, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    detected = _detect(call)
    d = detect.forward(detected, device=device)
    rows, look_up = _look_up(call, d)
    wanted = frozenset({"x": "detection"}.get(name, name) for name in needs)
    dy = cotangent.reshape(len(call.x) * call.n_places, call.n_outputs)
    found = rows.backward(look_up, dy, wanted, device=device)
    if "x" in needs:
        d_margin = found.pop("detection").reshape(d.margin.shape)
        of_padded = detect.backward(detected.residuals(d), d_margin, frozenset({"x"}), device=device)["x"]
        found["x"] = _of_images(call, of_padded)
    return found


def _detect(call: LutAtPlaces) -> Detect:
    windows = call.windows
    images = windows.padded(call.x.reshape(len(call.x), *windows.image))
    x = images.reshape(len(images), math.prod(images.shape[1:]))
    return Detect(x, windows.ids(call.anchors), epsilon=call.epsilon, n_inputs=x.shape[1])


def _look_up(call: LutAtPlaces, d: Detection) -> tuple[ModuleType, Lookup | SparseLookup]:
    """Return the module that looks up, and its call."""
    n_detectors, n = len(call.weights), len(call.x) * call.n_places
    of_places = jax.tree.map(lambda a: a.reshape(n, n_detectors), d)
    if call.targets is None:
        return lookup, Lookup(call.weights, of_places, groups=call.groups)
    each = n_detectors // call.groups
    targets = jnp.repeat(call.targets[:, None], each, 0, total_repeat_length=n_detectors)
    return sparse_lookup, SparseLookup(call.weights, of_places, targets, n_outputs=call.n_outputs)


def _of_images(call: LutAtPlaces, of_padded: jax.Array) -> jax.Array:
    """Return the cotangent of images from that of padded ones."""
    (height, width, channels), (above, left) = call.windows.image, call.windows.padding
    rows = of_padded.reshape(len(of_padded), height + 2 * above, width + 2 * left, channels)
    inside: jax.Array = rows[:, above : above + height, left : left + width]
    return inside.reshape(call.x.shape)
