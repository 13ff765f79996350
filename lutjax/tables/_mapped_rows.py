"""Table rows in mapped files: positions, byte gathers and a file description."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lutjax.files.tensors import Tensor, TensorFile, TensorFileError
from lutjax.tables._codecs import Codec
from lutjax.tables.host import in_threads

Parts = Sequence[tuple[str | os.PathLike[str], str]]
"""Paths and tensor names, in row order."""

_SAMPLED = 64
"""Number of samples that identify the rows of a table."""

_BULK = 1024
"""Fewest rows of a gather that may unmap the pages it touched.

A page fault may map a megabyte of the page cache, so that few rows make all files resident. Bulk
gathers unmap pages until as many bytes were copied as the files hold. Decoding reads few rows at a
time: faults would take longer than its reads, so its pages stay mapped.
"""


class MappedRows:
    """Rows in read-only file maps.

    Args:
      parts: tensors with the rows.
      codec: row byte layout.
      scales: tensors with row scales.
      expected: description of the files from `description`; None accepts any files.

    Attributes:
      n_rows: number of rows.
      description: JSON-compatible facts about the files, with digests of headers and samples.

    Raises:
      TensorFileError: a file is missing, truncated, or differs from `expected`, or a tensor has
        another dtype or shape than the codec needs.
    """

    def __init__(
        self,
        parts: Parts,
        codec: Codec,
        scales: Parts = (),
        expected: Mapping[str, Any] | None = None,
    ):
        self.codec, self._given = codec, (tuple(parts), tuple(scales))
        files: dict[Path, TensorFile] = {}

        def find(path: Any, name: str) -> tuple[TensorFile, Tensor]:
            path = Path(path)
            if path not in files:
                files[path] = TensorFile.open(path)
            return files[path], files[path].tensor(name)

        if not parts:
            raise ValueError("HostTable.mapped: parts is empty; expected paths and tensor names.")
        tensors = [[find(*part) for part in parts]]
        if codec.name == "e4m3_ue8m0":
            tensors.append([find(*part) for part in scales])
        elif scales:
            raise ValueError(f"HostTable.mapped: scales are given; {codec.name} rows need none.")
        self._arrays = [
            [
                _rows_of(file, tensor, name, codec, role)
                for (file, tensor), (_, name) in zip(each, names, strict=True)
            ]
            for role, (each, names) in enumerate(zip(tensors, self._given, strict=False))
        ]
        self._starts = [np.cumsum([0, *map(len, arrays)]) for arrays in self._arrays]
        counts = [int(starts[-1]) for starts in self._starts]
        if len(set(counts)) > 1:
            raise TensorFileError(
                f"{self._given[0][0][0]}: there are {counts[0]:,} rows and scales "
                f"for {counts[1]:,}; expected one for each."
            )
        self.n_rows, self._files = counts[0], list(files.values())
        # The digest of a sample from all files identifies them: files of many gigabytes would take
        # minutes to read.
        samples = max(_SAMPLED // sum(map(len, tensors)), 2)
        ranges = [
            [file.sample_ranges(tensor, samples) for file, tensor in each] for each in tensors
        ]
        self.description: dict[str, Any] = {
            "codec": codec.name,
            "width": codec.width,
            "scale": codec.scale,
            "rows": self.n_rows,
            "parts": [
                {
                    "file": file.path.name,
                    "size": file.size,
                    "header": file.header,
                    "tensor": name,
                    "sample": file.digest_ranges(part),
                }
                for each, names, parts in zip(tensors, self._given, ranges, strict=False)
                for (file, _), (_, name), part in zip(each, names, parts, strict=True)
            ],
        }
        self._n_copied = 0
        for file in self._files:
            file.release()
        if expected is not None:
            self.check(expected, "the description")

    def __reduce__(self) -> Any:
        return MappedRows, (self._given[0], self.codec, self._given[1], self.description)

    @property
    def digest(self) -> str:
        """SHA-256 of the description, in hexadecimal digits."""
        return identify(self.description)

    def check(self, expected: Mapping[str, Any], owner: str) -> None:
        """Raise TensorFileError unless a description matches these files."""
        if identify(expected) == self.digest:
            return
        parts_of_expected, parts = (
            each.get("parts") or [] for each in (expected, self.description)
        )
        for a, b in zip(parts_of_expected, parts, strict=False):
            if identify({"parts": [a]}) != identify({"parts": [b]}):
                names = (n for n in ("tensor", "size", "header", "sample") if a.get(n) != b[n])
                what = next(names, "size")
                raise TensorFileError(
                    f"{b['file']}: {owner} belongs to other base files: {what} is {b[what]}, "
                    f"not {a.get(what)}. Use the files with which it was made."
                )
        raise TensorFileError(
            f"{self._given[0][0][0]}: {owner} belongs to another table: "
            f"its digest is {identify(expected)}, not {self.digest}."
        )

    def gather(self, ids: np.ndarray, out: np.ndarray) -> None:
        """Copy the bytes of rows with increasing ids into `out`, ``[rows, bytes]``."""
        column, jobs = 0, []
        for arrays, starts in zip(self._arrays, self._starts, strict=True):
            stop = column + arrays[0].shape[1]
            ends = np.searchsorted(ids, starts)
            for array, start, a, b in zip(arrays, starts, ends, ends[1:], strict=False):
                step = max(-(-int(b - a) // 8), _BULK)
                jobs += [
                    (array, int(start), slice(i, min(i + step, b)), column, stop)
                    for i in range(a, b, step)
                ]
            column = stop

        def copy(job: tuple[np.ndarray, int, slice, int, int]) -> None:
            array, start, part, first, last = job
            out[part, first:last] = array[ids[part] - start]

        if len(ids) <= _BULK:
            for job in jobs:
                copy(job)
            return
        in_threads(copy, jobs)
        self._n_copied += len(ids) * self.codec.n_bytes
        if self._n_copied < sum(file.size for file in self._files):
            for file in self._files:
                file.release()


def read_scale(part: tuple[str | os.PathLike[str], str]) -> float:
    """Return a table scale, one bfloat16 or float32 element in a file.

    Raises:
      TensorFileError: the file has no such tensor.
    """
    file = TensorFile.open(part[0])
    tensor = file.tensor(part[1])
    size = {"BF16": 2, "F32": 4}.get(tensor.dtype)
    if tensor.n_bytes != size:
        raise TensorFileError(
            f"{file.path}: {part[1]} is {tensor.dtype}{list(tensor.shape)}; "
            "expected one BF16 or F32 element."
        )
    # A bfloat16 is the upper half of a float32.
    octets = file.map[tensor.offset : tensor.offset + tensor.n_bytes]
    return float(np.frombuffer(octets.rjust(4, b"\0"), "<f4")[0])


def identify(description: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a description without its file names, in hexadecimal digits."""
    parts = [
        {name: part[name] for name in part if name != "file"}
        for part in description.get("parts", ())
    ]
    text = json.dumps({**description, "parts": parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _rows_of(file: TensorFile, tensor: Tensor, name: str, codec: Codec, role: int) -> np.ndarray:
    """Return a tensor's bytes as ``[rows, bytes]``, without reading them."""
    dtypes = ("F8_E8M0", "U8") if role else codec.dtypes
    length = codec.lengths[role]
    if len(tensor.shape) != 2 or tensor.shape[1] != length or tensor.dtype not in dtypes:
        raise TensorFileError(
            f"{file.path}: {name} is {tensor.dtype}{list(tensor.shape)}; "
            f"the codec {codec.name} of width {codec.width} needs {dtypes[0]}[rows, {length}]."
        )
    n_bytes = tensor.n_bytes
    return np.frombuffer(file.map, np.uint8, n_bytes, tensor.offset).reshape(tensor.shape[0], -1)
