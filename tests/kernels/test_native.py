"""Native kernels: discovery, and properties common to all kernels on any CPU. The parity suite compares their values."""

import ctypes
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import native_kernels
import numpy as np
import pytest
from cases import fast_size, implementations, ops
from commands import output
from folders import ROOT

import lutjax
from lutjax import testing
from lutjax.benchmark import results
from lutjax.dispatch.registry import KernelRegistry

INSTALLED = native_kernels.why_not() is None
installed = pytest.mark.skipif(not INSTALLED, reason=str(native_kernels.why_not()))


# ------------------------------------------------------------------------------------------- joining the registry
class Package:
    """Installed package as exposed by its entry point."""

    value = "some_package:register"
    dist = None

    def __init__(self, register):
        self.register = register

    def load(self):
        return self.register


@pytest.fixture
def registry(monkeypatch):
    """Return a registry with an installed package for this function."""

    def make(register):
        result = {"kernels": [Package(register)]}
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: result[group])
        registry = KernelRegistry(entry_points="kernels")
        registry.register_op("double", "math")
        return registry

    return make


def test_installed_packages_join_when_kernels_are_wanted(registry):
    joined = []

    def register(registry):
        joined.append(registry)
        registry.register("double", "native", "cpu", "somewhere")
        assert registry.candidates("double")  # it may ask, too

    one = registry(register)
    assert one.ops() == ("double",)
    assert not joined
    assert [spec.platform for spec in one.candidates("double")] == ["native"]
    assert [spec.target for spec in one.candidates("double")] == ["somewhere"]
    assert joined == [one]


def test_no_thread_goes_on_before_all_have_joined(registry):
    begun, result = threading.Event(), []

    def register(registry):
        begun.set()
        other.join(0.2)  # it waits, and so does not end
        assert other.is_alive()
        registry.register("double", "native", "cpu", "somewhere")

    one = registry(register)

    def ask():
        begun.wait()
        result.extend(one.candidates("double"))

    other = threading.Thread(target=ask)
    other.start()
    one.candidates("double")
    other.join()
    assert [spec.platform for spec in result] == ["native"]


def test_a_package_that_fails_is_named_every_time(registry):
    def register(registry):
        raise ImportError("its library is missing")

    one = registry(register)
    for _ in range(2):
        with pytest.raises(ImportError, match="its library is missing") as error:
            one.candidates("double")
        assert "some_package:register" in error.value.__notes__[0]
        assert "without that package lutjax runs without them" in error.value.__notes__[0]


# ------------------------------------------------------------------------------------------------ what is installed
@installed
def test_every_op_has_a_kernel_or_a_reason():
    from lutjax.status import matrix as _matrix

    column = next(c for c in _matrix.COLUMNS if c.key == "native/cpu")
    cells = [_matrix.absent_cell(op, d, column, "float32") for op, d in _matrix.rows()]
    assert [c.position[:2] for c in cells if c is not None and c.state.is_gap] == []


@installed
def test_native_kernels_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "copy_bandwidth", lambda: 1e9)
    path = tmp_path / "rows.csv"
    words = [
        "bench",
        "--shape",
        "fc:8,4,3,2,2",
        "--row",
        "forward",
        "--repeats",
        "3",
        "--csv",
        path,
    ]
    output(*words, "--implementation", "native")
    assert "detect: native, lookup: native" in path.read_text()


@installed
def test_an_old_cpu_runs_plain_jax(monkeypatch):
    """The library's required instructions are checked before selection, and none of its code runs."""
    from lutjax_cpu import _native

    lutjax.kernel_registry._resolved.clear()
    monkeypatch.setattr(_native, "highest_level", lambda: -1)
    text = lutjax.explain("detect_signs", jnp.ones((3, 2)))
    lutjax.kernel_registry._resolved.clear()
    lowest = _native.levels_built()[0]
    why = f"native/cpu (lutjax_cpu.kernels.detect_signs): needs the instructions of {_native.name_of(lowest)}"
    assert why in text
    assert ("it was built on another machine; install it again" in text) == (lowest > 0)
    assert "xla/any (lutjax.kernels._xla.detect_signs): chosen" in text


AGAIN = "install it again, in a checkout of lutjax: pip install"


@installed
def test_libraries_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    """Missing library, or a library for another machine, another version, or different Python files."""
    from lutjax_cpu import _native

    def refused(why):
        with pytest.raises(ImportError, match=why):
            _native.opened.__wrapped__()

    folder = tmp_path / "lutjax_cpu"
    shutil.copytree(
        Path(_native.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__")
    )
    with monkeypatch.context() as patch:
        patch.setattr(lutjax, "__version__", "9.8.7")
        one = AGAIN.replace("it again", "one version of both")
        refused(rf"this is lutjax 9\.8\.7; {one}")
    monkeypatch.setattr(_native, "__file__", str(folder / "_native.py"))
    _native.opened.__wrapped__()
    changed = folder / "kernels" / "lookup.py"
    changed.write_text(changed.read_text() + "\n")
    refused(f"other files of Python than those beside it; {AGAIN}")
    with pytest.raises(
        ImportError, match="was built with other files of Python than those beside it"
    ):
        _native._check_sources(
            ctypes.CDLL(None), Path("_library.so")
        )  # it does not say what it was made of
    monkeypatch.setattr(_native, "__file__", str(tmp_path / "_native.py"))
    refused(f"has no library in .*; {AGAIN}")
    (tmp_path / "_library.so").write_bytes(b"of another machine")
    refused(rf"cannot load its library \(.*\); {AGAIN}")


@installed
def test_levels():
    from lutjax_cpu import _native

    assert _native.levels() == [n for n in _native.levels_built() if n <= _native.highest_level()]
    assert _native.about() == _native.name_of(_native.levels()[-1])
    assert len({_native.name_of(n) for n in _native.levels_built()}) == len(_native.levels_built())
    assert _native.name_of(7) == ""
    why = "level is 3; it must be one that this CPU and this library have: "
    with pytest.raises(ValueError, match=why), _native.use_level(3):
        pass


@installed
def test_errors_of_kernels_are_errors_of_the_call():
    from lutjax_cpu._call import kernel

    with pytest.raises(Exception, match='lutjax-cpu: no kernel "nothing" for this CPU'):
        kernel("nothing", (), (jax.ShapeDtypeStruct((), jnp.float32),))[0].block_until_ready()


# ------------------------------------------------------------------------------------------------ levels and threads
NATIVE = [op for op in ops() if "native" in implementations(op)] if INSTALLED else []
SEVERAL_BLOCKS = {"batch": 135}
THREADS = (1, 2, 7)
MEMORY = (0, *(2**n for n in range(6, 20, 2)))  # bytes for each call


def programs(op, **sizes):
    """Compiled functions for an op, with arguments and expected results."""
    case = testing.case(op, fast_size(op), **{n: s for n, s in sizes.items() if n in sizes_of(op)})
    directions = {
        d for d in lutjax.kernel_registry.directions(op) if "native" in implementations(op, d)
    }
    for shown, program in testing.programs(case, "native").items():
        if set(shown) <= directions:
            yield program, jax.jit(program.function)


def sizes_of(op):
    return testing.cases_of(op).sizes[fast_size(op)]


def bits(tree):
    return [np.asarray(a).tobytes() for a in jax.tree.leaves(tree)]


@installed
@pytest.mark.parametrize("op", NATIVE or [None])
def test_levels_are_right_and_threads_change_nothing(op):
    """Every instruction level on this CPU matches the reference, with the same bits for any thread count.

    On memory exhaustion, a kernel reports an error and writes nothing outside its allocations.
    """
    from lutjax_cpu import _native

    for program, run in programs(op, **SEVERAL_BLOCKS):
        expected = jax.jit(program.expected)(*program.arguments)
        for level in _native.levels():
            with _native.use_level(level):
                found = []
                for n in THREADS:
                    with _native.use_threads(n):
                        found.append(jax.block_until_ready(run(*program.arguments)))
            assert len(found[0]) == len(expected)
            for actual, wanted in zip(found[0], expected, strict=True):
                testing.assert_all_close(f"{program.what}, level {level}", actual, wanted)
            assert all(bits(other) == bits(found[0]) for other in found[1:]), (program.what, level)
        for n_bytes in MEMORY:
            got = with_memory(n_bytes, run, *program.arguments)
            assert got == bits(found[0]) or "no memory" in got, (program.what, n_bytes)


def with_memory(n_bytes, run, *arguments):
    """Return the result bits under a kernel memory limit, or the error text."""
    from lutjax_cpu import _native

    with _native.use_memory(n_bytes):
        try:
            return bits(jax.block_until_ready(run(*arguments)))
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            return str(error)


FIXED = [op for op in ("lookup", "sparse_lookup") if op in NATIVE]


@installed
@pytest.mark.parametrize("op", FIXED or [None])
def test_fixed_point_has_the_same_bits_at_every_level(op):
    """Plain JAX produces the same bits."""
    from lutjax_cpu import _native

    case = testing.case(op, fast_size(op), **SEVERAL_BLOCKS)
    accumulate = lutjax.FixedPoint(2.0**12)
    native, plain = (
        testing.program(case, name, accumulate=accumulate) for name in ("native", "xla")
    )
    wanted, run = bits(jax.jit(plain.function)(*plain.arguments)), jax.jit(native.function)
    for level in _native.levels():
        with _native.use_level(level):
            assert bits(run(*native.arguments)) == wanted, level


@installed
def test_loops_in_loops_end():
    """A single thread never waits for another thread; neither do eight devices with nested loops inside a scan."""
    from jax.sharding import Mesh, PartitionSpec
    from lutjax_cpu import _native
    from lutjax_cpu._call import kernel

    n = 37

    def count(_, __):
        return None, kernel("threads", (), (jax.ShapeDtypeStruct((2,), jnp.int32),), integers=(n,))[
            0
        ]

    def counts():
        return jax.lax.scan(count, None, None, length=3)[1][None]

    devices = jax.devices()
    whole = jax.shard_map(
        counts,
        mesh=Mesh(devices, ("d",)),
        in_specs=(),
        out_specs=PartitionSpec("d"),
        check_vma=False,
    )
    for threads in (*THREADS, 0):
        with _native.use_threads(threads):
            result = np.asarray(jax.jit(whole)())
        assert result.shape == (len(devices), 3, 2)
        assert (result[..., 1] == n * n).all()
        assert (result[..., 0] == threads).all() or threads == 0


SIZES = """
import jax, json, os, lutjax
from lutjax_cpu._call import kernel
found = jax.jit(lambda: kernel("threads", (), (jax.ShapeDtypeStruct((2,), "int32"),), integers=(64,))[0])()
print(json.dumps(found.tolist()))
"""


@installed
def test_threads_are_those_of_xla():
    """XLA uses NPROC threads in a process: nested loops terminate in each process."""
    environment = {**os.environ, "NPROC": "7", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", SIZES],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert json.loads(done.stdout) == [7, 64 * 64]


# ------------------------------------------------------------------------------------------------ building
CHECKOUT = pytest.mark.skipif(not (ROOT / "native").exists(), reason="the sources are not here")


@installed
@CHECKOUT
def test_library_reports_the_digest_of_its_sources():
    from lutjax_cpu import _native

    assert _native.sources() == native_kernels.digest_of_sources(ROOT / "native")


def settings_of(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


@CHECKOUT
def test_headers_of_others_are_those_of_the_oldest_jaxlib():
    """The package also includes the headers' license."""
    (oldest,) = (d for d in settings_of(ROOT)["project"]["dependencies"] if d.startswith("jax>="))
    said = (ROOT / "native" / "third_party" / "README.md").read_text(encoding="utf-8")
    assert f"as jaxlib {oldest.removeprefix('jax>=')} has them" in said
    native = settings_of(ROOT / "native")
    assert native["project"]["license-files"] == ["LICENSE"]
    assert "Apache License" in (ROOT / "native" / "LICENSE").read_text(encoding="utf-8")
    assert [r for r in native["build-system"]["requires"] if "jax" in r] == []
    if importlib.metadata.version("jaxlib") != oldest.removeprefix("jax>="):
        pytest.skip("jaxlib is newer than the oldest one")
    import jaxlib

    theirs = Path(jaxlib.__file__).parent / "include" / "xla" / "ffi" / "api"
    ours = ROOT / "native" / "third_party" / "xla" / "ffi" / "api"
    files = sorted(path.name for path in ours.iterdir())
    assert files == ["api.h", "c_api.h", "ffi.h"]
    assert [
        name for name in files if (ours / name).read_bytes() != (theirs / name).read_bytes()
    ] == []


@CHECKOUT
def test_wheels_for_others_have_all_levels(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "native")
    import manylinux

    assert manylinux.LEVELS == "cmake.define.LUTJAX_LEVELS=all"
    wheels = settings_of(ROOT / "native")["tool"]["cibuildwheel"]
    assert wheels["config-settings"] == {"cmake.define.LUTJAX_LEVELS": "all"}
    assert "LUTJAX_LEVELS MATCHES" in (ROOT / "native" / "CMakeLists.txt").read_text(
        encoding="utf-8"
    )
