"""Check compiled objects: ``python native/check_objects.py BUILD_FOLDER``.

Kernels are compiled once per instruction level. Kernel objects must not define weak symbols: a
linker merges a weak symbol from several objects into one, so an older CPU could execute
instructions it lacks. Objects must not contain instructions above their own level, and shared code
must use only the lowest level.
"""

import re
import subprocess
import sys
from pathlib import Path

_WEAK = re.compile(r"^[0-9a-f]+ [WVuwv] (.*)$", re.MULTILINE)
_BMI = "andn|bextr|blsi|blsr|blsmsk|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|movbe|lzcnt"
_OF_V3 = rf"\t(?:v[a-z0-9]+|(?:{_BMI})[lq]?)\b.*"
_OF_V4 = r".*%(?:zmm|k[0-7]|[xy]mm(?:1[6-9]|2\d|3[01])).*"
_ABOVE = {"kernels_v2": _OF_V3, "kernels_v3": _OF_V4, "lutjax_cpu": _OF_V3}


def objects(folder: Path, target: str) -> list[Path]:
    """Return a target's objects, such as ``kernels_v2``; ``*`` matches any target."""
    return sorted(
        path for end in ("o", "obj") for path in folder.glob(f"**/{target}.dir/**/*.{end}")
    )


def weak_symbols(path: Path) -> list[str]:
    """Return an object's weak symbols, which a linker may merge."""
    return _WEAK.findall(_text("nm", "-C", path))


def instructions_above(path: Path, target: str) -> list[str]:
    """Return x86-64 instructions above the object's level."""
    text = _text("objdump", "-d", "--no-show-raw-insn", path)
    return re.findall(_ABOVE[target], text) if "x86-64" in text and target in _ABOVE else []


def _text(*command: str | Path) -> str:
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Exit with status 1 where there are any."""
    folder = Path(sys.argv[1])
    kernels = objects(folder, "kernels_*")
    if not kernels:
        raise SystemExit(f"{folder} has no objects of kernels: it is no folder of a build.")
    wrong = []
    for path in kernels:
        for symbol in weak_symbols(path):
            wrong.append(f"{path}: {symbol}: a linker takes it from any level")
    for target in _ABOVE:
        for path in objects(folder, target):
            too_high = instructions_above(path, target)
            if too_high:
                wrong.append(
                    f"{path}: {len(too_high)} instructions of a level above its own, "
                    f"such as {too_high[0].strip()}"
                )
    if wrong:
        raise SystemExit("\n".join(wrong))
    rule = "neither weak symbols nor instructions of higher levels"
    print(f"{len(kernels)} objects of kernels have {rule}")


if __name__ == "__main__":
    main()
