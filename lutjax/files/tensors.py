"""Tensor positions in safetensors and GGUF files, from their headers."""

import dataclasses
import hashlib
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

from lutjax.files import strict_json
from lutjax.files.errors import FolderError
from lutjax.files.messages import in_a_line

_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
"""Bytes per element of the dtypes of safetensors."""

_GGUF_TYPES = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
_GGUF_VALUES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_STRING, _GGUF_ARRAY = 8, 9

_MOST_HEADER = 100 << 20
"""Maximum bytes of a header."""

_SAMPLE = 4096
"""Bytes of a sample."""


class TensorFileError(FolderError):
    """Error for a damaged, replaced or foreign tensor file."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Tensor position in a file.

    Attributes:
      dtype: safetensors dtype name.
      shape: sizes, the contiguous axis last.
      offset: first byte in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def n_bytes(self) -> int:
        """Tensor size in bytes."""
        return math.prod(self.shape) * _SIZES[self.dtype]


@dataclasses.dataclass(frozen=True)
class TensorFile:
    """An open read-only map of a safetensors or GGUF file.

    Attributes:
      path: file path.
      tensors: tensor positions by name, without unknown dtypes.
      size: file size in bytes.
      header: the header's SHA-256 in hexadecimal digits.
      map: the mapped file.
    """

    path: Path
    tensors: dict[str, Tensor]
    size: int
    header: str
    map: mmap.mmap

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "TensorFile":
        """Map a file and read its header.

        Raises:
          TensorFileError: the file is missing, truncated, or no safetensors or GGUF file.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                parse = _parse_gguf if file.read(4) == b"GGUF" else _parse_safetensors
                file.seek(0)
                tensors = parse(file, size)
                n_bytes = file.tell()
                file.seek(0)
                header = hashlib.sha256(file.read(n_bytes)).hexdigest()
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                if hasattr(mmap, "MADV_RANDOM"):
                    # Neighbors of a row are no more likely to be read: read no pages ahead.
                    mapped.madvise(mmap.MADV_RANDOM)
        except OSError as error:
            raise TensorFileError(f"{path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, TypeError, KeyError, struct.error, UnicodeDecodeError) as error:
            raise TensorFileError(
                f"{path} is no safetensors or GGUF file: {in_a_line(error)}."
            ) from error
        for name, tensor in tensors.items():
            if tensor.offset + tensor.n_bytes > size:
                raise TensorFileError(
                    f"{path} is truncated: it has {size:,} bytes, "
                    f"and {in_a_line(name, 100)} ends at {tensor.offset + tensor.n_bytes:,}."
                )
        return cls(path, tensors, size, header, mapped)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor position.

        Raises:
          TensorFileError: the file has no such tensor.
        """
        if name not in self.tensors:
            raise TensorFileError(
                f"{self.path} has no tensor {name!r}; "
                f"it has {strict_json.format_names(sorted(self.tensors), 200)}."
            )
        return self.tensors[name]

    def sample_ranges(self, tensor: Tensor, count: int) -> list[slice]:
        """Return evenly spaced sample positions in a tensor, and start reading them.

        Args:
          tensor: a tensor of this file.
          count: number of 4 kB samples, at least 2, including both ends.
        """
        last, length = max(tensor.n_bytes - _SAMPLE, 0), min(_SAMPLE, tensor.n_bytes)
        starts = sorted({tensor.offset + last * i // (count - 1) for i in range(count)})
        # The kernel reads all samples at once, in place of one after the other.
        if hasattr(mmap, "MADV_WILLNEED"):
            for start in starts:
                page = start // mmap.PAGESIZE * mmap.PAGESIZE
                self.map.madvise(mmap.MADV_WILLNEED, page, min(start + length, self.size) - page)
        return [slice(start, start + length) for start in starts]

    def digest_ranges(self, ranges: list[slice]) -> str:
        """Return the SHA-256 for parts of the file, in hexadecimal digits."""
        digest = hashlib.sha256()
        for part in ranges:
            digest.update(self.map[part])
        return digest.hexdigest()

    def release(self) -> None:
        """Unmap resident pages; they stay in the host's page cache."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)


def _parse_safetensors(file: BinaryIO, size: int) -> dict[str, Tensor]:
    (n_bytes,) = struct.unpack("<Q", file.read(8))
    if not 2 <= n_bytes <= min(size - 8, _MOST_HEADER):
        raise ValueError(f"its header has {n_bytes:,} bytes")
    entries = strict_json.loads(file.read(n_bytes))
    if not isinstance(entries, dict):
        raise ValueError("its header is no object")
    tensors = {}
    for name, entry in entries.items():
        if name == "__metadata__" or entry["dtype"] not in _SIZES:
            continue
        first, last = entry["data_offsets"]
        tensor = Tensor(entry["dtype"], tuple(entry["shape"]), 8 + n_bytes + first)
        if not all(isinstance(n, int) and n >= 0 for n in (first, last, *tensor.shape)):
            raise ValueError(f"{in_a_line(name, 100)} has no valid position")
        # An untrusted header: a shape must not reach beyond its own bytes.
        if last - first != tensor.n_bytes:
            raise ValueError(
                f"{in_a_line(name, 100)} has {last - first:,} bytes; "
                f"its shape needs {tensor.n_bytes:,}"
            )
        tensors[name] = tensor
    return tensors


def _parse_gguf(file: BinaryIO, size: int) -> dict[str, Tensor]:

    def read(form: str) -> Any:
        (value,) = struct.unpack(f"<{form}", file.read(struct.calcsize(form)))
        return value

    def text() -> str:
        n_bytes = read("Q")
        if n_bytes > _MOST_HEADER:
            raise ValueError(f"a text has {n_bytes:,} bytes")
        return file.read(n_bytes).decode()

    def skip(kind: int) -> None:
        if kind == _GGUF_STRING:
            file.seek(read("Q"), os.SEEK_CUR)
        elif kind == _GGUF_ARRAY:
            inner, count = read("I"), read("Q")
            if inner in _GGUF_VALUES:  # fixed sizes: vocabularies have many elements
                file.seek(_GGUF_VALUES[inner] * count, os.SEEK_CUR)
                return
            for _ in range(min(count, _MOST_HEADER)):
                skip(inner)
        else:
            file.seek(_GGUF_VALUES[kind], os.SEEK_CUR)

    file.read(4)
    version, n_tensors, n_values = read("I"), read("Q"), read("Q")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}; 2 and 3 are read")
    alignment = 32
    for _ in range(n_values):
        name, kind = text(), read("I")
        if name == "general.alignment" and kind == 4:
            alignment = read("I")
        else:
            skip(kind)
    tensors = {}
    for _ in range(n_tensors):
        name, rank = text(), read("I")
        if rank > 8:
            raise ValueError(f"{in_a_line(name, 100)} has {rank} axes")
        shape = tuple(read("Q") for _ in range(rank))[::-1]  # GGUF writes the contiguous axis first
        kind, offset = read("I"), read("Q")
        if kind in _GGUF_TYPES:
            tensors[name] = Tensor(_GGUF_TYPES[kind], shape, offset)
    first = -(-file.tell() // alignment) * alignment
    return {
        name: dataclasses.replace(tensor, offset=first + tensor.offset)
        for name, tensor in tensors.items()
    }
