"""Files of measured kernel configs: from ``lutjax tune``, or shipped for device kinds."""

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
from lutjax.files.atomic import write_atomically
from lutjax.files.messages import in_a_line
from lutjax.files.strict_json import Fields
from lutjax.tuning._launch import Bucket, Launch, Sizes, bucket

Key = tuple[str, Bucket]
"""Kernel name and sizes of a measurement."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Fastest config of a kernel at some sizes.

    Attributes:
      kernel: its name, e.g. ``"lookup.forward"``.
      sizes: measured sizes; the entry applies to all sizes that round to the same powers of two.
      microseconds: time per call. None: unknown.
      rule_microseconds: time per call with the config from the kernel's rule. None: unknown, or
          that config does not run.
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
    """Content of a config file.

    Attributes:
      device: the measured device kind, by its JAX name.
      versions: versions of the relevant packages, by name, at the last write.
    """

    device: str
    versions: Mapping[str, str]
    entries: Mapping[Key, Entry] = dataclasses.field(default_factory=dict)

    def launches(self) -> dict[Key, Launch]:
        return {key: entry.launch for key, entry in self.entries.items()}

    def with_entry(self, entry: Entry) -> "Document":
        """Return the document with an entry added, or replaced for its kernel and sizes."""
        return dataclasses.replace(self, entries={**self.entries, entry.key: entry})

    def text(self) -> str:
        """Return sorted text with one entry per line: equal entries give equal text."""
        entries = sorted(self.entries.values(), key=lambda e: (e.kernel, sorted(e.sizes.items())))
        lines = ",\n".join(f"    {json.dumps(dataclasses.asdict(entry))}" for entry in entries)
        launches = f"[\n{lines}\n  ]" if lines else "[]"
        versions = json.dumps(dict(sorted(self.versions.items())))
        return (
            f'{{\n  "device": {json.dumps(self.device)},\n  "versions": {versions},\n'
            f'  "launches": {launches}\n}}\n'
        )

    def write(self, path: Path) -> None:
        """Write the file atomically: until then a reader sees the old file."""
        with write_atomically(path) as unfinished:
            unfinished.write_text(self.text())


def load(path: str | os.PathLike[str]) -> dict[Key, Launch]:
    """Return the configs in a ``lutjax tune`` file, for `lutjax.tuning.use`.

    It takes at most 100 times the memory of the file.

    Returns:
      Configs by kernel name and sizes, rounded to powers of two.

    Raises:
      OSError: the file cannot be read.
      ValueError: the content is invalid; the message gives the position.
    """
    return read(path).launches()


@functools.cache
def measured(device_kind: str) -> dict[Key, Launch]:
    """Return the shipped configs measured on this device kind; empty for other kinds.

    The file is read when a kernel is first launched on such a device.
    """
    # Device kinds contain spaces and other characters that file names should not have.
    name = re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")
    file = resources.files("lutjax.tuning").joinpath("data", f"{name}.json")
    return parse(file.read_text(), str(file)).launches() if file.is_file() else {}


def read(path: str | os.PathLike[str]) -> Document:
    """Return the document in a file from `Document.write`."""
    return parse(Path(path).read_bytes(), os.fspath(path))


def parse(text: str | bytes, where: str) -> Document:
    """Parse a document; `where` is its name in errors."""
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
    # Without defaults: a missing field is more likely a typing error than a wish.
    if set(launch) != names:
        raise ValueError(
            f"{check.where}: 'launch' has the fields {in_a_line(sorted(launch))}; expected "
            f"{sorted(names)}."
        )
    try:
        made = Launch(**launch)
    except ValueError as error:
        raise ValueError(f"{check.where}: {error}") from None
    times = (check.number(value, name) for name in ("microseconds", "rule_microseconds"))
    return Entry(kernel, sizes, made, *times)
