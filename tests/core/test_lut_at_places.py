"""Detection and lookup at all positions in one op: on meshes, and on GPUs. The parity suite covers its values."""

import functools
import re

import fused_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import largest_collective
from machine import needs_devices, needs_gpu

import lutjax
from lutjax.dispatch.registry import Backend, Device
from lutjax.ops.lut_at_places import Windows, lut_at_places

WINDOWS = Windows((4, 3, 4), (2, 2), (1, 1), (1, 0), 2)  # of two groups with channels of their own
GROUPS = {"windows": WINDOWS, "groups": 2}


def arguments():
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.integers(-4, 5, (4, *WINDOWS.image)), jnp.float32)
    weights = jnp.asarray(rng.integers(-8, 9, (4, 32, 3)) / 4, jnp.float32)
    return images, weights, jnp.asarray(rng.integers(0, 8, (4, 5, 2)), jnp.int32)


def with_gradients(images, weights, anchors, targets=None):
    def op(images, weights):
        options = {"n_outputs": 5, **GROUPS}
        return lut_at_places(images, weights, anchors, targets, **options)

    y, pull = jax.vjp(op, images, weights)
    return y, *pull(jnp.ones_like(y))


@needs_devices(8)
@pytest.mark.parametrize(("axes", "tables_of", "reaches"), [("Auto", 2, "targets")])
def test_tables_and_samples_over_devices(axes, tables_of, reaches):
    targets = () if reaches != "targets" else (jnp.array([[0, 4, -1], [4, 1, 0]], jnp.int32),)
    given = (*arguments(), *targets)
    with fused_kernels.on_cpu("lut_at_places"):
        check_on_mesh(given, axes, tables_of)


def check_on_mesh(given, axes, tables_of):
    expected = with_gradients(*given)
    axis = getattr(jax.sharding.AxisType, axes)
    mesh = jax.make_mesh(
        (2, tables_of),
        ("data", "tables"),
        axis_types=(axis, axis),
        devices=jax.devices()[: 2 * tables_of],
    )
    specs = (jax.P("data"), jax.P("tables"), jax.P("tables"), jax.P())[: len(given)]
    placed = jax.device_put(given, tuple(jax.NamedSharding(mesh, spec) for spec in specs))
    compiled = jax.jit(with_gradients).lower(*placed).compile()
    actual = compiled(*placed)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    assert actual[0].sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P("data")), 4)
    assert actual[2].sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P("tables")), 3)
    assert not re.findall(r" (?:all-to-all|collective-permute)\(", compiled.as_text())
    outputs, of_images, of_tables = (a.nbytes for a in expected)
    assert largest_collective(compiled) <= max(outputs / 2, of_images / 2, of_tables / tables_of)


def test_where_devices_are_not_known_each_has_its_own_way(monkeypatch):
    """Trace for CPU and GPU, only one with a kernel: each program has the kernel or the decomposition; calls report their device."""
    cpu, gpu = Device(Backend.CPU, "cpu"), Device(Backend.GPU, "a GPU without kernels")
    expected = with_gradients(*arguments())
    monkeypatch.setattr("lutjax.dispatch.registry._default_devices", lambda: (gpu, cpu))
    with fused_kernels.on_cpu("lut_at_places"), lutjax.kernel_registry.collecting() as calls:
        exported = jax.export.export(jax.jit(with_gradients), platforms=["cpu", "cuda"])(
            *arguments()
        )
    for actual, e in zip(exported.call(*arguments()), expected, strict=True):
        np.testing.assert_allclose(actual, e, rtol=1e-6, atol=1e-6)
    first = calls[:3]
    assert [made.call.op for made in first if made.runs_on(cpu)] == ["lut_at_places"]
    assert [made.call.op for made in first if made.runs_on(gpu)] == ["detect", "lookup"]


def test_detectors_without_pairs_add_their_one_row():
    images, weights, _ = arguments()
    y = lut_at_places(images, weights[:, :1], jnp.zeros((4, 0, 2), jnp.int32), **GROUPS)
    expected = weights[:, 0].reshape(2, 2, 3).sum(1).reshape(6)
    np.testing.assert_array_equal(y, jnp.broadcast_to(expected, (4, *WINDOWS.places, 6)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": np.zeros((2, 3, 4, 4), np.float32)}, r"images is .*its last axes must be \[4, 3, 4\], the image of windows"),
        ({"weights": np.zeros((4, 8, 3), np.float32)}, "weights is "),
        ({"groups": 3}, "groups is int 3; it must divide the number of detectors, 4"),
        ({"targets": np.zeros((3, 3), np.int32), "n_outputs": 5}, r"targets is .*expected \[2, 3\]: a target for each output"),
        ({"targets": np.zeros((2, 3), np.int32)}, "n_outputs is None; with targets it is the number of outputs of a place"),
    ],
)  # fmt: skip
def test_other_sizes_are_refused(changes, message):
    given = dict(zip(("images", "weights", "anchors"), arguments(), strict=True))
    with pytest.raises(ValueError, match=f"^lut_at_places: {message}"):
        lut_at_places(**{**given, **GROUPS, **changes})


# ------------------------------------------------------------------------------------- on GPUs
on_gpu = [pytest.mark.gpu, needs_gpu]


@pytest.mark.parametrize("implementation", [pytest.param("triton", marks=on_gpu)])
def test_the_gradient_of_images_has_the_same_bits_in_every_run(implementation):
    keys = jax.random.split(jax.random.key(0), 4)
    images, weights = (
        jax.random.normal(keys[0], (8, 16, 16, 3)),
        jax.random.normal(keys[1], (16, 64, 64)),
    )
    anchors = lutjax.sample_anchors(keys[2], n_inputs=27, n_detectors=16, n_anchors=6)
    dy = jax.random.normal(keys[3], (8, 16, 16, 64))

    @jax.jit
    def of_images(images):
        f = functools.partial(
            lutjax.conv_lut,
            weights=weights,
            anchors=anchors,
            kernel=3,
            padding=1,
            implementation=implementation,
        )
        return jax.vjp(f, images)[1](dy)[0]

    first = of_images(images)
    for _ in range(4):
        np.testing.assert_array_equal(of_images(images), first)
