"""Linked bare-metal ELF programs: loadable bytes, section sizes, and symbol addresses."""

import dataclasses
import struct
from typing import NamedTuple


class Section(NamedTuple):
    """Contiguous program bytes; zero-initialized memory is not stored in the file."""

    name: str
    address: int
    size: int
    writable: bool
    content: bytes


@dataclasses.dataclass(frozen=True)
class Image:
    sections: tuple[Section, ...]
    symbols: dict[str, int]
    is_arm: bool


_HEADER = "<16sHHIIIIIHHHHHH"
_SECTION = "<IIIIIIIIII"
_SYMBOL = "<IIIBBH"
_ALLOCATED, _WRITABLE, _EMPTY, _SYMBOLS, _ARM = 2, 1, 8, 2, 40


def read(content: bytes) -> Image:
    """Return the image of a 32-bit little-endian ELF file."""
    if content[:6] != b"\x7fELF\x01\x01":
        raise ValueError("the file is no ELF of 32 bits, lowest byte first.")
    header = struct.unpack_from(_HEADER, content)
    start, size, count, names_index = header[6], header[11], header[12], header[13]
    rows = [struct.unpack_from(_SECTION, content, start + k * size) for k in range(count)]

    def bytes_of(row: tuple[int, ...]) -> bytes:
        return b"" if row[1] == _EMPTY else content[row[4] : row[4] + row[5]]

    def text(table: bytes, at: int) -> str:
        return table[at : table.index(b"\0", at)].decode()

    names = bytes_of(rows[names_index])
    # Fields of a section header: name, type, flags, address, offset, size, link, info, alignment
    # and entry size.
    sections = tuple(
        Section(text(names, row[0]), row[3], row[5], bool(row[2] & _WRITABLE), bytes_of(row))
        for row in rows
        if row[2] & _ALLOCATED and row[5]
    )
    symbols: dict[str, int] = {}
    for row in rows:
        if row[1] == _SYMBOLS:
            table = bytes_of(rows[row[6]])
            for at in range(0, row[5], row[9]):
                name, value, *_ = struct.unpack_from(_SYMBOL, content, row[4] + at)
                symbols[text(table, name)] = value
    return Image(sections, symbols, header[2] == _ARM)
