"""Strict settings for every test: no implicit dtype or rank promotion, and several devices on any machine.

Compilation dominates the test time, so CPU code is generated with few optimizations, and on the oldest jaxlib with the
emitters that compile twice as fast. ``XLA_FLAGS=--xla_backend_optimization_level=3 pytest`` uses the settings of users.
"""

import contextlib
import gc
import importlib.metadata
import os
import signal

gc.set_threshold(100_000, 20, 20)  # with Python's thresholds garbage takes a twelfth of the time

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_"))]:
    del os.environ[name]  # the processes of a cluster's job would wait for each other

os.environ["LUTJAX_COMPILATION_CACHE"] = "off"  # that of the user is not that of tests
flags = os.environ.get("XLA_FLAGS", "")
if "xla_backend_optimization_level" not in flags:
    flags += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    flags += " --xla_cpu_parallel_codegen_split_count=1"  # small programs take longer in parts
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # newer ones may not know the flag
        flags += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"
# Programs need not say by which calls their lines were reached: most of these calls are pytest's.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import forgotten  # noqa: E402
import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402
from machine import (  # noqa: E402, F401
    pytest_collection,
    pytest_configure,
    pytest_markeval_namespace,
    pytest_xdist_auto_num_workers,
)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run, none kept on disk. The first example of a size compiles: no deadline.
_ALWAYS = {"deadline": None, "database": None, "derandomize": True, "print_blob": False}
hypothesis.settings.register_profile("ci", max_examples=12, **_ALWAYS)
hypothesis.settings.register_profile("long", max_examples=150, **_ALWAYS)
_NO_SHRINKING = [
    p for p in hypothesis.Phase if p not in (hypothesis.Phase.shrink, hypothesis.Phase.explain)
]
hypothesis.settings.register_profile("quick", max_examples=12, phases=_NO_SHRINKING, **_ALWAYS)
hypothesis.settings.load_profile("ci")
with contextlib.suppress(ImportError):  # not in the oldest versions
    from hypothesis.internal.conjecture import providers

    # Hypothesis would parse all imported modules, 2 s in each process, to draw their constants too.
    providers.is_local_module_file = lambda path: False


def pytest_sessionstart(session):
    import native_kernels

    if native_kernels.why_not():
        native_kernels.hide()
    # Workers and later runs share compiled programs; JAX's keys include flags and versions. `pytest --cache-clear` deletes them.
    with contextlib.suppress(
        OSError, AttributeError
    ):  # a tree that cannot be written, or no cache plugin
        _use_compilation_cache(
            session.config.cache.mkdir(f"compiled-{importlib.metadata.version('jaxlib')}")
        )


def _use_compilation_cache(path):
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_compilation_cache_dir", None if path is None else str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()


def pytest_ignore_collect(collection_path, config):
    """Import no files whose tests are all deselected: GPU runs need few files, and fast ones no slow files."""
    selection = config.option.markexpr
    if not collection_path.match("test_*.py"):
        return None
    if selection == "gpu":
        return "mark.gpu" not in collection_path.read_text(encoding="utf-8") or None
    return (selection == "not slow" and collection_path.match("test_slow_*.py")) or None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects tests by their marks
def pytest_collection_modifyitems(items):
    """Mark tests as slow by the name of their file or class."""
    for item in items:
        if item.path.match("test_slow_*.py") or (item.cls and item.cls.__name__ == "TestSlow"):
            item.add_marker(pytest.mark.slow)


def pytest_report_header():
    import native_kernels

    return f"native kernels: {native_kernels.why_not() or 'tested'}"


def pytest_collection_finish():
    gc.freeze()  # what has been imported stays, and need not be looked through again


def pytest_unconfigure():
    gc.unfreeze()  # nanobind reports objects that survive the interpreter, such as all of Triton


# The more compiled programs a process holds, the longer each new one takes: small ones twice as long to lower and compile after 2500.
_PROGRAMS_HELD = 250
_compiled_programs = 0


@jax.monitoring.register_event_duration_secs_listener
def _count_programs(event, _, **__):
    global _compiled_programs
    _compiled_programs += event == "/jax/core/compile/backend_compile_duration"


def pytest_runtest_teardown(item, nextitem):
    global _compiled_programs
    if _compiled_programs > _PROGRAMS_HELD and (nextitem is None or nextitem.path != item.path):
        jax.clear_caches()
        _compiled_programs = 0


@pytest.fixture
def without_typechecking():
    """Run with user settings: only the ops check arguments."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def accelerator_formulation(monkeypatch):
    """Use plain JAX as on accelerators, runnable on any device: large gathers instead of loops."""
    from lutjax.kernels._xla import _pair_tiles, _row_gathers, bilinear_gates

    forgotten.compiled()
    for module in (_pair_tiles, _row_gathers, bilinear_gates):
        monkeypatch.setattr(module, "in_sequence", lambda device: False)
    monkeypatch.setattr(_row_gathers, "launches", lambda device: True)
    yield
    forgotten.compiled()


@pytest.fixture
def tpu_formulation(accelerator_formulation, monkeypatch):
    """Use plain JAX as on TPUs: rows in small tables are read and added as products with one-hot matrices."""
    from lutjax.kernels._xla import _row_gathers

    monkeypatch.setattr(_row_gathers, "multiplies_fast", lambda device: True)
    monkeypatch.setattr(_row_gathers, "launches", lambda device: False)


@pytest.fixture
def without_native(monkeypatch):
    """Run as if lutjax-cpu were not installed, for tests on choices and the texts naming them."""
    import lutjax
    from lutjax.dispatch import registry

    installed = registry._is_installed
    monkeypatch.setattr(
        registry, "_is_installed", lambda name: name != "lutjax_cpu" and installed(name)
    )
    specs = [
        spec
        for op in lutjax.kernel_registry.ops()
        for spec in lutjax.kernel_registry.candidates(op)
        if spec.platform == "native"
    ]
    if not specs:
        yield
        return
    with monkeypatch.context() as patched:
        for spec in specs:
            of_op = lutjax.kernel_registry._specs[spec.op]
            patched.delitem(of_op, (spec.platform, spec.backend))
        forgotten.choices()
        yield
    forgotten.choices()


@pytest.fixture(scope="module")
def compilation_cache_directory(tmp_path_factory):
    """Keep compiled programs in an empty directory shared between a test's processes."""
    path = tmp_path_factory.mktemp("compiled")
    kept = jax.config.jax_compilation_cache_dir
    _use_compilation_cache(path)
    yield path
    _use_compilation_cache(kept)
