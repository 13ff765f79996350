"""Check what was compiled: ``python native/check_objects.py FOLDER``, the folder of the build.

The kernels are compiled once for each level of instructions. A function that the linker may take from any of several objects, a weak
symbol, would be taken from one for all of them: an older CPU then meets instructions that it does not have.
"""

import re
import subprocess
import sys
from pathlib import Path

_WEAK = re.compile(r"^[0-9a-f]+ [WVuwv] (.*)$", re.MULTILINE)


def weak_symbols(folder: Path) -> dict[str, list[str]]:
    """Return the symbols of the kernels' objects that a linker may merge, by object."""
    objects = sorted(folder.glob("**/kernels_*.dir/**/*.o"))
    if not objects:
        raise SystemExit(f"{folder} has no objects of kernels: it is no folder of a build.")
    found = {}
    for path in objects:
        text = subprocess.run(["nm", "-C", str(path)], check=True, capture_output=True, text=True).stdout
        found[f"{path.parts[-4]}/{path.name}"] = _WEAK.findall(text)
    return found


def main() -> None:
    """Exit with status 1 where there are any."""
    found = weak_symbols(Path(sys.argv[1]))
    lines = [f"{name}: {symbol}" for name, symbols in found.items() for symbol in symbols]
    if lines:
        raise SystemExit(
            "weak symbols, which a linker takes from any level of instructions:\n" + "\n".join(lines)
        )
    print(f"{len(found)} objects of kernels without weak symbols")


if __name__ == "__main__":
    main()
