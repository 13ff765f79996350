"""Implementation selection: reasons, errors, and no import before selection."""

import ast
import asyncio
import functools
import importlib
import itertools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import absence, detections, slow_except
from commands import command, output

import lutjax
from lutjax import extras as _extras, optim as tables
from lutjax.dispatch import _gradient
from lutjax.dispatch.registry import Backend, Device, KernelRegistry, Platform, Request

pytestmark = pytest.mark.usefixtures("without_native")  # what is chosen then is the same everywhere

CPU = Device(lutjax.Backend.CPU, "cpu")
GPU = Device(lutjax.Backend.GPU, "NVIDIA H200")


@pytest.fixture
def detection():
    return lutjax.detect_signs(jnp.ones((3, 5, 2)))


@pytest.fixture
def weights():
    return jnp.arange(5 * 4 * 2, dtype=jnp.float32).reshape(5, 4, 2)


@pytest.fixture
def registered():
    """Register an implementation for one test, replacing a package implementation if one exists."""
    registry, specs, replaced = lutjax.kernel_registry, [], []

    def register(op, platform, backend, *args, **kwargs):
        for spec in registry.candidates(op):
            if (spec.platform, spec.backend) == (platform, backend):
                registry.unregister(op, platform, backend)
                replaced.append(spec)
        specs.append(registry.register(op, platform, backend, *args, **kwargs))
        return specs[-1]

    yield register
    for spec in specs:
        registry.unregister(spec.op, spec.platform, spec.backend)
    for spec in replaced:
        registry._add(spec)


def test_every_op_is_registered_for_xla():
    for op in lutjax.kernel_registry.ops():
        spec = lutjax.kernel_registry.get(op, platform="xla", backend="any")
        assert spec.target == (
            "lutjax.dispatch._parts" if spec.is_decomposition else f"lutjax.kernels._xla.{op}"
        )
        assert spec.is_decomposition == (op in ("lut_at_places", "gate_network", "logic_trees"))


def test_a_class_or_a_function_is_registered_by_a_decorator(weights, detection):
    registry, called = lutjax.kernel_registry, []
    plain = registry.get("lookup", Platform.XLA)

    @registry.register("lookup", Platform.TRITON, Backend.CPU, priority=-1)
    class Own:
        @staticmethod
        def forward(call, *, device):
            called.append(device)
            return 2 * plain.load("forward")(call, device=device)

        @staticmethod
        def backward(call, cotangent, needs, *, device):
            return plain.load("backward")(call, cotangent, needs, device=device)

    try:
        own = registry.get("lookup", Platform.TRITON, Backend.CPU)
        assert own.directions == ("forward", "backward")
        np.testing.assert_array_equal(own(weights, detection), 2 * plain(weights, detection))
        assert [device.backend for device in called] == ["cpu"]
        np.testing.assert_array_equal(lutjax.lookup(weights, detection), plain(weights, detection))
        jax.grad(lambda w: own(w, detection).sum())(weights)
    finally:
        registry.unregister("lookup", Platform.TRITON, Backend.CPU)

    @registry.register("lookup", "triton", "cpu", priority=-1)
    def forward(call, *, device):
        return plain.load("forward")(call, device=device)

    try:
        assert registry.get("lookup", "triton", "cpu").directions == ("forward",)
        with pytest.raises(lutjax.NoImplementationError, match=r"triton/cpu .*has no backward"):
            jax.grad(lambda w: registry.get("lookup", "triton", "cpu")(w, detection).sum())(weights)
    finally:
        registry.unregister("lookup", "triton", "cpu")


def of_two(one, other): ...


class Unbound:
    def forward(self, call, *, device): ...


class Empty: ...


REFUSED = {
    "forward": (
        lambda register: register()(of_two),
        TypeError,
        r"forward of of_two takes \(one, other\); it is called as forward\(call, \*, device\). Give it these arguments.",
    ),
    "backward": (
        lambda register: register()(
            type("Kernel", (), {"backward": lambda call, cotangent, *, device: None})
        ),
        TypeError,
        r"backward of Kernel takes .*; it is called as backward\(call, cotangent, needs, \*, device\)",
    ),
    "method": (
        lambda register: register()(Unbound),
        TypeError,
        "forward of Unbound takes .* as a static method",
    ),
    "no function": (
        lambda register: register()(Empty),
        TypeError,
        "Empty has no function of a direction",
    ),
    "direction without one": (
        lambda register: register(directions=("forward", "update"))(Unbound),
        TypeError,
        "forward of Unbound takes|update of Unbound is None; expected a function update",
    ),
    "unknown direction": (
        lambda register: register(directions=("back",)),
        ValueError,
        "directions has 'back'",
    ),
    "target": (
        lambda register: register(of_two),
        TypeError,
        "target is <function of_two .*; expected the name",
    ),
    "requires": (
        lambda register: register("m", requires="triton"),
        TypeError,
        "requires is 'triton'; expected a tuple",
    ),
    "option": (
        lambda register: register("m", supports=None),
        TypeError,
        "there is no option 'supports'",
    ),
    **{
        name: (
            lambda register, name=name: register("m", **{name: of_two}),
            TypeError,
            rf"{name} takes \(one, other\); it is called as {name}\({argument}\)",
        )
        for name, argument in {
            "unsupported": "request",
            "slower": "request",
            "about": "",
        }.items()
    },
    "no callable": (
        lambda register: register("m", slower="no"),
        TypeError,
        "slower is 'no'; expected a function",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_functions_are_refused_when_they_are_registered(name, without_typechecking):
    register, error, message = REFUSED[name]
    with pytest.raises(error, match=f"^kernel_registry.register: .*{message}"):
        register(functools.partial(lutjax.kernel_registry.register, "lookup", "native", "tpu"))
    assert ("native", "tpu") not in {
        (s.platform, s.backend) for s in lutjax.kernel_registry.candidates("lookup")
    }


def test_functions_of_a_module_are_checked_when_it_is_imported(weights, detection, registered):
    registered("lookup", "triton", "cpu", "json")
    with pytest.raises(
        TypeError,
        match=r"triton/cpu of lookup \(json\): forward is None; expected a function forward",
    ):
        lutjax.lookup(weights, detection, implementation="triton/cpu")


def test_a_platform_with_several_backends_needs_one():
    with pytest.raises(ValueError, match="'lookup' has pallas for gpu, tpu; name one of them"):
        lutjax.kernel_registry.get("lookup", "pallas")
    assert lutjax.kernel_registry.get("lookup", "pallas", "tpu").backend == "tpu"


def test_a_second_registration_raises():
    with pytest.raises(ValueError, match=r"'lookup' already has the implementation xla/any"):
        lutjax.kernel_registry.register("lookup", "xla", "any", "somewhere")


def test_get_lists_what_there_is():
    with pytest.raises(KeyError, match=r"no implementation for xla/gpu; it has: .*xla/any"):
        lutjax.kernel_registry.get("lookup", platform="xla", backend="gpu")


def test_unknown_names(weights, detection):
    with pytest.raises(
        ValueError,
        match=r"unknown implementation 'cuda'; the implementations are xla, pallas, triton",
    ):
        lutjax.lookup(weights, detection, implementation="cuda")
    with pytest.raises(
        ValueError, match=r"unknown op 'lut'; the ops are detect, detect_signs, lookup"
    ):
        lutjax.kernel_registry.resolve("lut", weights)
    with (
        pytest.raises(ValueError, match=r"unknown op 'look'"),
        lutjax.use_implementation({"look": "xla"}),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"unknown implementation 'fast'"),
        lutjax.use_implementation("fast"),
    ):
        pass


def test_highest_priority_that_fits_is_chosen(weights, detection, registered):
    registered("lookup", "triton", "gpu", "nowhere.at.all")
    registered(
        "lookup",
        "pallas",
        "any",
        "nowhere.either",
        unsupported=lambda call: "only tables of 8 rows",
    )
    resolve = lutjax.kernel_registry.resolve
    assert resolve("lookup", weights, detection).platform == "xla"
    assert resolve("lookup", weights, detection, device=GPU).platform == "triton"
    assert (
        resolve(
            "lookup", weights, detection, device=GPU, implementation=("pallas/any", "xla")
        ).platform
        == "xla"
    )


def test_a_single_name_never_falls_back(weights, detection, registered):
    registered("lookup", "triton", "gpu", "nowhere.at.all", requires=("no_such_package",))
    with pytest.raises(lutjax.NoImplementationError) as error:
        lutjax.lookup(weights, detection, implementation="triton")
    message = str(error.value)
    assert (
        "no implementation that was asked for (triton) supports this forward call on cpu (cpu)"
        in message
    )
    assert "triton/gpu (nowhere.at.all): runs on gpu, the call runs on cpu (cpu)" in message
    assert "xla/any (lutjax.kernels._xla.lookup): not asked for (implementation=triton)" in message
    with pytest.raises(lutjax.NoImplementationError, match="needs no_such_package, not installed"):
        lutjax.kernel_registry.resolve(
            "lookup", weights, detection, device=GPU, implementation="triton"
        )


def test_unsupported_sees_the_call(weights, detection, registered):
    seen: list[Request] = []
    registered(
        "lookup",
        "pallas",
        "cpu",
        "nowhere",
        unsupported=lambda request: seen.append(request) or "no",
    )
    lutjax.lookup(weights, detection)
    (request,) = seen
    assert (request.op, request.direction, request.device) == ("lookup", "forward", CPU)
    assert request.call.weights == jax.ShapeDtypeStruct((5, 4, 2), jnp.float32)
    assert request.call.detection.index.shape == (3, 5)


def test_forward_and_backward_are_chosen_separately(weights, detection, registered):
    registered("lookup", "pallas", "cpu", "lutjax.kernels._xla.lookup", directions=("forward",))
    text = lutjax.explain("lookup", weights, detection)
    forward, backward = text.split("  backward\n")
    assert "pallas/cpu (lutjax.kernels._xla.lookup): chosen" in forward
    assert "pallas/cpu (lutjax.kernels._xla.lookup): has no backward" in backward
    assert "xla/any (lutjax.kernels._xla.lookup): chosen" in backward
    gradient = jax.grad(lambda w: lutjax.lookup(w, detection).sum())(weights)
    np.testing.assert_array_equal(
        gradient, jax.grad(lambda w: lutjax.reference.lookup(w, detection).sum())(weights)
    )
    with pytest.raises(lutjax.NoImplementationError, match="has no backward"):
        jax.grad(lambda w: lutjax.lookup(w, detection, implementation="pallas").sum())(weights)


def test_context_reaches_functions_that_jit_holds(weights, detection, registered):
    registered("lookup", "triton", "gpu", "nowhere")
    f = jax.jit(lambda w: lutjax.lookup(w, detection))
    f(weights)
    with lutjax.use_implementation("triton"), pytest.raises(lutjax.NoImplementationError):
        f(weights)
    with lutjax.use_implementation({"sparse_lookup": "triton"}):
        f(weights)
    with lutjax.use_implementation("triton"), lutjax.use_implementation({"lookup": "xla"}):
        f(weights)
        with pytest.raises(lutjax.NoImplementationError):
            lutjax.detect_signs(jnp.ones(2))
    with lutjax.use_implementation("triton"):
        lutjax.lookup(weights, detection, implementation="xla")
    f(weights)


def test_coroutines_have_their_own_choice(weights, detection):
    registry = lutjax.kernel_registry

    def asked():
        return registry.request("lookup", None)

    async def one(names):
        with lutjax.use_implementation(names):
            for _ in range(len(names)):
                await asyncio.sleep(0)
                assert asked() == names
                lutjax.lookup(weights, detection)
        assert asked() == ()

    async def free():
        for _ in range(5):
            await asyncio.sleep(0)
            assert asked() == ()
            lutjax.lookup(weights, detection)

    async def all_of_them():
        await asyncio.gather(
            one(("xla",)), one(("triton", "pallas", "xla")), free(), one(("pallas", "xla"))
        )

    asyncio.run(all_of_them())
    assert asked() == ()
    lutjax.lookup(weights, detection)  # the key of jit's cache, too, is that of no block
    assert registry._in_cache_key.value is None


def test_a_trace_under_the_choice_of_another_coroutine_is_refused(weights, detection):
    inside, done = asyncio.Event(), asyncio.Event()

    async def holds():
        with lutjax.use_implementation("xla"):
            inside.set()
            await done.wait()

    async def traces():
        await inside.wait()
        with pytest.raises(
            RuntimeError, match=r"Keep `await` out of the block of use_implementation"
        ):
            jax.jit(lambda w: lutjax.lookup(w, detection))(weights)
        jax.jit(lambda w: lutjax.lookup(w, detection))(weights)
        done.set()

    async def both():
        await asyncio.gather(holds(), traces())

    asyncio.run(both())


def test_a_pullback_runs_what_its_call_chose(weights, detection, registered):
    """Keep the selection within a block entered later, too."""
    _, pullback = jax.vjp(lambda w: lutjax.lookup(w, detection), weights)
    registered("lookup", "triton", "cpu", "no.such.module", requires=(), priority=-1)
    with lutjax.use_implementation("triton"):
        (gradient,) = pullback(jnp.ones((3, 2)))
    assert gradient.shape == weights.shape


def test_a_pullback_computes_differentiated_arguments_alone():
    for needs in itertools.product((False, True), repeat=3):
        assert _gradient._read_marks(_gradient._mark(needs), 3) == needs


def test_the_device_of_the_arrays_decides(weights, detection):
    assert "on cpu (cpu)" in lutjax.explain("lookup", weights, detection)
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), abstract_device=jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")
    )
    structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (weights, detection))
    with jax.sharding.use_abstract_mesh(mesh):
        assert "on gpu (NVIDIA H200)" in lutjax.explain("lookup", *structs)


def test_several_backends_in_one_process(weights, detection, registered, monkeypatch):
    """Trace for both CPU and GPU: each gets its own implementation at lowering."""
    registered("lookup", "triton", "gpu", "tests_marked_kernel")
    import types

    marked = types.ModuleType("tests_marked_kernel")
    marked.forward = lambda call, *, device: jnp.full(
        (call.detection.shape[0], call.weights.shape[2]), 42.0
    )
    monkeypatch.setitem(sys.modules, "tests_marked_kernel", marked)
    monkeypatch.setattr("lutjax.dispatch.registry._default_devices", lambda: (GPU, CPU))

    exported = jax.export.export(jax.jit(lutjax.lookup), platforms=["cpu", "cuda"])(
        weights, detection
    )
    assert "42" in exported.mlir_module()
    np.testing.assert_array_equal(
        exported.call(weights, detection), lutjax.lookup(weights, detection)
    )

    forced = jax.jit(lambda w: lutjax.lookup(w, detection, implementation="triton"))
    np.testing.assert_array_equal(forced(weights), np.full((3, 2), 42.0))
    with pytest.raises(lutjax.NoImplementationError):
        jax.eval_shape(lambda w: lutjax.lookup(w, detection, implementation="pallas/tpu"), weights)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


X = zeros(3, 6)
ANCHORS = np.tile(np.array([[0, 1], [2, 3]], np.int32), (5, 1, 1))
COMPOSITIONS = {
    "lut": ((X, zeros(5, 4, 2), ANCHORS), {}, ["detect", "lookup"]),
    "sparse_lut": ((X, zeros(5, 4, 2), ANCHORS, zeros(1, 1, 2, dtype=np.int32), 7),
        {"epsilon": 0.5}, ["detect", "sparse_lookup"]),
    "lut_attention": ((X[None], zeros(5, 32, 2), ANCHORS, zeros(2, 1, 1)),
        {"window": 2, "segments": zeros(3, dtype=np.int32)},
        ["detect", "detect_signs", "lookup_attention"]),
    "conv_lut": ((X[:, None, :, None], zeros(5, 4, 2), ANCHORS), {"kernel": (1, 4)},
        ["lut_at_places", "detect", "lookup"]),
    "logic_gates": ((X, zeros(4, 16), zeros(4, 2, dtype=np.int32)), {"hard": True},
        ["bilinear_gates"]),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_except(COMPOSITIONS, "lut", "conv_lut"))
def test_compositions_are_explained_by_their_ops(name):
    args, options, ops = COMPOSITIONS[name]
    getattr(lutjax, name)(*args, **options)  # the arguments are those of the function
    text = lutjax.explain(name, *args, **options)
    heads = [line for line in text.splitlines() if not line.startswith(" ")]
    assert heads == [f"{name} calls {', '.join(ops)}", *(f"{op} on cpu (cpu)" for op in ops)]
    assert text.count("  forward\n") == len(ops)
    # An implementation says of this call what it says of the op's own.
    with lutjax.use_implementation("triton"):
        asked = lutjax.explain(name, *args, **options)
    assert asked == lutjax.explain(name, *args, implementation="triton", **options)
    assert "triton/gpu" in asked
    # The parts of a fused op run by what is asked for.
    chosen = [line.strip() for line in asked.splitlines() if line.endswith(": chosen")]
    assert chosen == ["xla/any (its parts): chosen"] * 2 * ("lut_at_places" in ops)
    assert asked.count("not asked for (implementation=triton)") >= len(ops)


D, OF_ONE = detections(3, 5, bits=2), detections(1, 3, 5, bits=2)
FUNCTIONS = {
    **{name: case[:2] for name, case in COMPOSITIONS.items()},
    "detect": ((X, ANCHORS), {}),
    "sparse_lookup": (
        (zeros(5, 4, 2), D, zeros(1, 1, 2, dtype=np.int32), 7),
        {},
    ),
    "lookup_attention": (
        (zeros(5, 16, 2), OF_ONE, OF_ONE),
        {"window": 2, "query_start": 3},
    ),
    "lut_pair_attention": ((X[None], zeros(5, 4, 2), ANCHORS), {}),
    "soft_lut": ((X, zeros(4, 4), zeros(4, 2, dtype=np.int32)), {"feature_axis": 0}),
}


@pytest.mark.parametrize("device", ["gpu", "tpu"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_explained_for_other_devices(name, device):
    """Explain functions by their own arguments, which may differ from kernel arguments."""
    args, options = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype) if hasattr(a, "shape") else a,
        FUNCTIONS[name],
    )
    kind = {"gpu": "NVIDIA H200", "tpu": "TPU v5 lite"}[device]
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), abstract_device=jax.sharding.AbstractDevice(kind, None, device)
    )
    with jax.sharding.use_abstract_mesh(mesh):
        text = lutjax.explain(name, *args, **options)
    assert f" on {device} ({kind})\n  forward\n" in text
    assert "chosen" in text


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_leading_axes_do_not_change_the_choice(leading):
    """Implementations are selected by their kernel shapes."""
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), abstract_device=jax.sharding.AbstractDevice("TPU v5 lite", None, "tpu")
    )

    def attention(x, weights):
        d = lutjax.detect(x, ANCHORS)
        return lutjax.lookup_attention(weights, d, d, implementation="pallas/tpu")

    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*leading, 5, 4), (5, 16, 3)))
    with jax.sharding.use_abstract_mesh(mesh):
        assert jax.eval_shape(attention, *shapes).shape == (*leading, 5, 3)


def test_updates_are_explained(weights, detection):
    _, gradient = tables.value_and_grad(lambda p: lutjax.lookup(p["weights"], detection).sum())(
        {"weights": weights}
    )
    text = lutjax.explain("update_table", weights, gradient["weights"], 0.1, tables.SGD())
    assert text.startswith("update_table calls lookup\nlookup on cpu (cpu)\n  update\n")
    assert "xla/any (lutjax.kernels._xla.lookup): chosen" in text
    assert "forward" not in text


def test_an_unknown_name_lists_what_is_known():
    for name in ("lutt", "scale_gradient"):
        with pytest.raises(
            ValueError,
            match=rf"unknown op '{name}'; the ops are detect, .*compositions of .* lut, ",
        ):
            lutjax.explain(name, X)


@pytest.mark.usefixtures("without_typechecking")
def test_wrong_arguments_of_a_composition_are_its_own_error():
    with pytest.raises(ValueError, match=r"lookup: weights is float32\[5, 8, 2\]"):
        lutjax.explain("lut", X, jnp.zeros((5, 8, 2)), ANCHORS)


def test_missing_packages_of_kernels_name_their_extra(weights, detection, registered, monkeypatch):
    from lutjax.dispatch import registry

    monkeypatch.setattr(registry, "_is_installed", lambda package: False)
    registered("lookup", "triton", "cpu", "nowhere", requires=("jax_triton", "triton"))
    why = re.escape(f"needs jax_triton, triton, not installed: {_extras.command('triton')}")
    with pytest.raises(lutjax.NoImplementationError, match=why):
        lutjax.lookup(weights, detection, implementation="triton/cpu")


def test_kernels_that_can_be_installed_are_named(weights, detection):
    """Name them in explain and in errors, and choose none."""
    line = f"native/cpu (lutjax_cpu.kernels.lookup): needs lutjax_cpu, not installed: {_extras.command(_extras.NATIVE)}"
    assert lutjax.explain("lookup", weights, detection).count(line) == 3
    with pytest.raises(lutjax.NoImplementationError) as error:
        lutjax.lookup(weights, detection, implementation="native")
    assert line in str(error.value)
    assert not [s for s in lutjax.kernel_registry.candidates("lookup") if s.platform == "native"]


def test_a_named_package_that_is_installed_speaks_for_itself(monkeypatch):
    registry = KernelRegistry()
    registry.register_op("double", "math")
    registry.announce(
        ["double"], "native", "cpu", "json.decoder"
    )  # installed, and registers nothing
    registry.register("double", "xla", "any", "my_kernels.double")
    assert registry.not_installed("double", "native/cpu") is None
    monkeypatch.setattr("lutjax.dispatch.registry._is_installed", lambda package: False)
    assert registry.not_installed("double", "native/cpu") == "needs json, not installed"


def test_kernels_for_tpus_wait_for_a_record(monkeypatch):
    """Select no kernel automatically before a validation result on such a device."""
    registry, arguments = lutjax.kernel_registry, ("detect_signs", jnp.ones((3, 2)))
    tpu = Device(lutjax.Backend.TPU, "TPU v6e")
    assert registry.resolve(*arguments, device=tpu).platform == "xla"
    waiting = [
        c.reason for c in registry.consider(*arguments, device=tpu) if c.spec.platform == "pallas"
    ]
    assert any(
        "waits for a record" in reason and "implementation='pallas/tpu'" in reason
        for reason in waiting
    )
    assert registry.resolve(*arguments, device=tpu, implementation="pallas/tpu").backend == "tpu"

    registry._resolved.clear()
    monkeypatch.setattr(
        "lutjax.dispatch._records.has_run",
        lambda op, direction, column, kind: column == "pallas/tpu",
    )
    assert registry.resolve(*arguments, device=tpu).names[1] == "pallas/tpu"
    registry._resolved.clear()


def test_a_registry_of_ones_own():
    registry = KernelRegistry()
    assert registry.ops() == ()
    with pytest.raises(
        ValueError,
        match=r"unknown op 'double'; the ops are none, and kernel_registry.register_op adds one",
    ):
        registry.register("double", "xla", "any", "my_kernels.double")
    registry.register_op("double", "math")
    registry.register("double", "xla", "any", "my_kernels.double")
    assert [spec.target for spec in registry.candidates("double")] == ["my_kernels.double"]
    registry.unregister("double", "xla", "any")
    assert registry.candidates("double") == ()
    registry.unregister_op("double")
    assert registry.ops() == ()


def test_kernel_modules_are_found_by_their_path(tmp_path, monkeypatch):
    """Kernel modules are imported when a call on their platform is considered, after their package's rule."""
    package = tmp_path / "found_kernels"
    package.mkdir()
    (package / "__init__.py").write_text(
        "def supports(request):\n    return None if 'H200' in request.device.kind else 'needs an H200'\n"
    )
    (package / "_helpers.py").write_text("raise AssertionError('imported')\n")
    (package / "lookup.py").write_text(
        "from lutjax.dispatch.registry import Declaration, Deferral\n"
        "SPEC = Declaration(lambda request: Deferral('is slower'), launches=('lookup.forward',))\n"
        "def forward(call, *, device): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry = KernelRegistry()
    registry.register_op("lookup", "lutjax.ops.lookup")
    registry.discover("found_kernels", "triton", "gpu")
    (spec,) = registry.candidates("lookup")
    weights, d = jnp.ones((1, 4, 3)), lutjax.detect_signs(jnp.ones((2, 1, 2)))
    call = lutjax.kernel_registry.calls_of("lookup", weights, d)[0].call
    ask = lambda kind, direction="forward": spec.supports(  # noqa: E731
        Request(direction, call, Device(Backend(kind.split()[0]), kind))
    )
    assert ask("cpu") == "runs on gpu, the call runs on cpu (cpu)"
    assert ask("gpu A100") == "needs an H200"
    assert "found_kernels.lookup" not in sys.modules
    assert ask("gpu H200") == "is slower"
    assert spec.unsupported_reason(Request("forward", call, Device(Backend.GPU, "H200"))) is None
    assert ask("gpu H200", "backward") == "has no backward"
    assert (spec.directions, spec.launches) == (("forward",), ("lookup.forward",))
    with pytest.raises(ValueError, match="already has the implementation"):
        registry.discover("found_kernels", "triton", "gpu")
    with pytest.raises(ValueError, match="unknown op 'lookup'"):
        KernelRegistry().discover("found_kernels", "triton", "gpu")


def test_unknown_names_are_refused_and_known_ones_listed():
    """Nothing is registered by mistake."""
    registry = lutjax.kernel_registry
    before = registry.ops()
    for op, platform, backend, message in (
        (
            "lokup",
            "xla",
            "cpu",
            r"unknown op 'lokup'; the ops are detect, .*lookup, .*register_op adds one",
        ),
        (
            "lookup",
            "tritn",
            "gpu",
            r"platform is 'tritn'; expected one of xla, pallas, triton, native",
        ),
        ("lookup", "triton", "gpus", r"backend is 'gpus'; expected one of .*cpu, .*gpu"),
    ):
        with pytest.raises(ValueError, match=message):
            registry.register(op, platform, backend, "somewhere")
        with pytest.raises(ValueError, match=message.split(", .*register_op")[0]):
            registry.get(op, platform=platform, backend=backend)
    assert registry.ops() == before


def test_the_command_explains_ops():
    result = output("explain", "packed_lut", "lookup", "--size", "one").splitlines()
    assert [line.split()[0] for line in result if not line.startswith(" ")] == [
        "packed_lut",
        "lookup",
    ]
    assert sum(line.endswith(": chosen") for line in result) == 4
    triton = output("explain", "lookup", "--implementation", "triton")
    assert "xla/any (lutjax.kernels._xla.lookup): not asked for (implementation=triton)" in triton
    for words, message in (
        (["lokup"], "unknown op 'lokup'; the ops are detect, "),
        (["lookup", "--size=none"], "lookup has no shape 'none'; its shapes are one, "),
        (["lookup", "--dtype=text"], "text"),
        (["lookup", "--implementation=tritn"], "'tritn' is not one of 'xla'"),
    ):
        refused = command("explain", *words)
        assert refused.exit_code == 2
        assert message in refused.output


@pytest.mark.parametrize(("name", "called"), [
    ("lut", "detect, lookup"),
    ("sparse_lut", "detect, sparse_lookup"),
    ("lut_attention", "detect, detect_signs, lookup_attention"),
    ("conv_lut", "lut_at_places, detect, lookup"),
    ("logic_gates", "bilinear_gates"),
    ("update_table", "lookup"),
])  # fmt: skip
def test_the_command_explains_compositions(name, called):
    result = output("explain", name).splitlines()
    assert result[0] == f"{name} calls {called}"
    assert sum(line.endswith(": chosen") for line in result) >= len(called.split(", "))


def test_the_command_has_arguments_for_every_composition():
    from lutjax.benchmark import compositions

    assert set(compositions.OPS) == set(lutjax.kernel_registry.compositions())
    refused = command("explain", "lut", "--size", "none")
    assert refused.exit_code == 2
    assert "lut: size is 'none'; it must be one of ffn, unembed" in refused.output
    refused = command("explain", "lut", "--dtype", "uint32")
    assert "lut: dtype is uint32; it must be one of float32" in refused.output


def test_dir_has_public_names_alone():
    assert [name for name in dir(lutjax) if not name.startswith("__")] == sorted(
        set(lutjax.__all__) - {"__version__"}
    )


def test_implementations_agree_on_their_arguments():
    """All implementations for an op have the same functions with the same arguments."""
    import inspect

    parameters = {
        "forward": ("call", "device"),
        "backward": ("call", "cotangent", "needs", "device"),
        "update": ("call", "cotangent", "step", "device"),
    }
    absent = set()
    for op in lutjax.kernel_registry.ops():
        for spec in lutjax.kernel_registry.candidates(op):
            assert set(spec.directions) <= set(lutjax.kernel_registry.directions(op)), spec
            for direction in spec.directions:
                try:
                    function = spec.load(direction)
                except ImportError as error:
                    absent.add(absence(spec.target, error))
                    continue
                assert tuple(inspect.signature(function).parameters) == parameters[direction], (
                    spec,
                    direction,
                )
    if absent:
        pytest.skip(f"all others agree; {', '.join(sorted(absent))}")


def test_import_is_light():
    """Importing adds only the prerequisites for tracing a function: no package, no configuration, no environment variable.

    Ops are imported at first use, without other ops' dependencies, and do not make jit recompile a function already using them.
    """
    code = """
import os, sys
import jax, jax.numpy as jnp
environment, config, modules = dict(os.environ), dict(jax.config.values), set(sys.modules)
import lutjax
new = set(sys.modules) - modules
assert new == {"lutjax", "lutjax._jit_key", "lutjax._version"}, new

@jax.jit
def first_use(x):
    anchors = lutjax.sample_anchors(jax.random.key(0), 8, 4, 3)
    return lutjax.lut(x, jnp.ones((4, 8, 5)), anchors)

for _ in range(2):
    first_use(jnp.ones((2, 8))).block_until_ready()
assert first_use._cache_size() == 1, first_use._cache_size()
new = set(sys.modules) - modules
pallas = ("jax.extend", "jax.experimental.pallas", "jax._src.pallas")
assert not [name for name in new if name.startswith(pallas)]
rooms = {name.split(".")[1].strip("_") for name in new if name.startswith("lutjax.")}
assert not rooms & {"layers", "models", "cli", "wiring", "reads"}, rooms
assert not {"lutjax.values._reproducible", "lutjax.tables.watch", "lutjax.tables._usage"} & new, new
extra = {"flax", "haiku", "optax", "orbax", "triton", "jax_triton", "click", "rich", "matplotlib", "beartype"}
assert not extra & {name.partition(".")[0] for name in new}
assert environment == dict(os.environ)
assert config == dict(jax.config.values)
lutjax.layers.nnx.LUT, lutjax.models.LUTTransformer  # there without an import of their own
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_changes_no_import_system():
    code = """
import sys
before = [list(sys.meta_path), list(sys.path), list(sys.path_hooks)]
import lutjax
assert before == [sys.meta_path, sys.path, sys.path_hooks]
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_come_from_where_type_checkers_find_them():
    block = next(
        node
        for node in ast.parse(Path(lutjax.__file__).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If)
    )
    result = {name.name: line.module for line in block.body for name in line.names}
    assert sorted([*result, "__version__"]) == sorted(lutjax.__all__)
    for name, module in result.items():
        home = importlib.import_module(f"lutjax.{name}" if module == "lutjax" else module)
        assert getattr(lutjax, name) is (home if module == "lutjax" else getattr(home, name))
    assert set(lutjax.__all__) <= set(dir(lutjax))


@pytest.mark.slow
def test_a_call_outside_of_jit_asks_nothing_twice():
    """Python functions entered by a second call with the same shapes: checks, and the kernels chosen before."""
    code = """
import sys
import jax, jax.numpy as jnp
import lutjax
x, weights = jnp.ones((4, 8)), jnp.ones((4, 8, 5))
anchors = lutjax.sample_anchors(jax.random.key(0), n_inputs=8, n_detectors=4, n_anchors=3)
read = lutjax.reads.Confidence()
scalars, logits, wires = read.initial(), jnp.zeros((16, 16)), jnp.ones((16, 2), jnp.int32)
most = {
    "lut": (220, lambda: lutjax.lut(x, weights, anchors)),
    "scored_lut": (450, lambda: lutjax.scored_lut(x, weights, anchors, scalars, read=read)),
    "logic_gates": (220, lambda: lutjax.logic_gates(x, logits, wires)),
}

def count(frame, event, argument):
    global entered
    entered += event == "call"

for name, (bound, call) in most.items():
    call()
    entered = 0
    sys.setprofile(count)
    call()
    sys.setprofile(None)
    assert entered < bound, (name, entered)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
