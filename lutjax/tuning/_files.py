"""Files of measured launches: what ``lutjax tune`` writes, and what is shipped for kinds of devices."""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from lutjax.files import strict_json
from lutjax.files.atomic import atomically
from lutjax.files.messages import in_a_line
from lutjax.files.strict_json import Fields
from lutjax.tuning._launch import Bucket, Launch, Sizes, bucket

Key = tuple[str, Bucket]
"""A kernel and the sizes for which it was measured."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """The best launch of a kernel at some sizes.

    Attributes:
      kernel: its name, e.g. ``"lookup.forward"``.
      sizes: at which it was measured; it stands for all that round to the same powers of two.
      microseconds: of a call. None: not known.
      rule_microseconds: of a call with the launch of the rule beside the kernel. None: not known, or the rule's does
        not run.
    """

    kernel: str
    sizes: Sizes
    launch: Launch
    microseconds: float | None = None
    rule_microseconds: float | None = None

    @property
    def key(self) -> Key:
        return self.kernel, bucket(self.sizes)


@dataclasses.dataclass(frozen=True)
class Document:
    """Content of a file of launches.

    Attributes:
      device: the kind of device that it was measured on, as JAX calls it.
      versions: of the packages that matter, by name, when the file was last written.
    """

    device: str
    versions: Mapping[str, str]
    entries: Mapping[Key, Entry] = dataclasses.field(default_factory=dict)

    def launches(self) -> dict[Key, Launch]:
        return {key: entry.launch for key, entry in self.entries.items()}

    def with_entry(self, entry: Entry) -> "Document":
        """Return the document with one more entry, or with it instead of the one for its kernel and sizes."""
        return dataclasses.replace(self, entries={**self.entries, entry.key: entry})

    def text(self) -> str:
        """Sorted, an entry a line: the same entries give the same text."""
        entries = sorted(self.entries.values(), key=lambda e: (e.kernel, sorted(e.sizes.items())))
        lines = ",\n".join(f"    {json.dumps(dataclasses.asdict(entry))}" for entry in entries)
        launches = f"[\n{lines}\n  ]" if lines else "[]"
        versions = json.dumps(dict(sorted(self.versions.items())))
        return (
            f'{{\n  "device": {json.dumps(self.device)},\n  "versions": {versions},\n'
            f'  "launches": {launches}\n}}\n'
        )

    def write(self, path: Path) -> None:
        """Write the file atomically: a reader sees the old file meanwhile."""
        with atomically(path) as unfinished:
            unfinished.write_text(self.text())


def load(path: str | os.PathLike[str]) -> dict[Key, Launch]:
    """Return the launches of a file that ``lutjax tune`` wrote; `lutjax.tuning.use` takes them. It takes at most 100 times the memory of the file.

    Returns:
      Launches by the name of the kernel and its sizes, rounded to powers of two.

    Raises:
      OSError: the file cannot be read.
      ValueError: it does not hold launches; the message says where.
    """
    return read(path).launches()


@functools.cache
def measured(device_kind: str) -> dict[Key, Launch]:
    """Return the launches that were measured on devices of this kind and are shipped with the package; none for others.

    Its file is read when a kernel is first launched for such a device.
    """
    name = re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")
    file = resources.files("lutjax.tuning").joinpath("data", f"{name}.json")
    return parse(file.read_text(), str(file)).launches() if file.is_file() else {}


def read(path: str | os.PathLike[str]) -> Document:
    """Return a file that was written by `Document.write`."""
    return parse(Path(path).read_bytes(), os.fspath(path))


def parse(text: str | bytes, where: str) -> Document:
    """Return the document of a text; `where` names it in errors."""
    try:
        document = strict_json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}.") from None
    check = Fields(where)
    device = check.field(document, "device", str)
    versions = check.field(document, "versions", dict)
    for name in versions:
        Fields(f"{where}: versions").field(versions, name, str)
    launches = check.field(document, "launches", list)
    entries = [_entry(Fields(f"{where}: launches[{n}]"), value) for n, value in enumerate(launches)]
    return Document(device, versions, {entry.key: entry for entry in entries})


def _entry(check: Fields, value: Any) -> Entry:
    kernel = check.field(value, "kernel", str)
    check = Fields(f"{check.where} ({kernel})")
    sizes = check.field(value, "sizes", dict)
    for name in sizes:
        Fields(f"{check.where}: sizes").field(sizes, name, int)
    launch = check.field(value, "launch", dict)
    names = {field.name for field in dataclasses.fields(Launch)}
    if set(launch) != names:
        raise ValueError(
            f"{check.where}: 'launch' has the fields {in_a_line(sorted(launch))}; expected {sorted(names)}."
        )
    try:
        made = Launch(**launch)
    except ValueError as error:
        raise ValueError(f"{check.where}: {error}") from None
    times = (check.number(value, name) for name in ("microseconds", "rule_microseconds"))
    return Entry(kernel, sizes, made, *times)
