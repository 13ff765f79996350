"""Seeded file damage: raw bytes, values in JSON text, and checksummed contents."""

import gzip
import io
import json
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable

Damage = Callable[[bytes, random.Random], bytes]

NUMBERS = (
    "-1", "0", "1", "3", "256", "65535", "2147483648", "400000000", "9223372036854775807",
    "1" + "0" * 30,
)  # fmt: skip
"""Replacement numbers."""

VALUES = (
    *(None, True, False, -1, 0, 1, 2, 7, 2**31, 10**18, 10**30, 0.5, -1.5, 1e300, "", "x", "1", "../x", "$a$ \n"),
    *("\ud800", [], [[]], [1, 2], ["x"], {}, {"a": 1}),
)  # fmt: skip
"""Replacement JSON values."""

_ENDS = (b"", b"\0", b"\n", b"\xff\xfe", b"]}", b"PK\x05\x06", b"\x89PNG\r\n\x1a\n")
_OCTETS = b"\0\n\r\t ,;\"'\\#$%<>[]{}0129azA-.:\x7f\x80\xc3\xff"


def _span(data, draw):
    """Return the begin and end for a span, usually a few bytes."""
    at = draw.randrange(len(data) + 1)
    return at, min(len(data), at + draw.choice((1, 1, 2, 4, 8, 40, len(data))))


def _number(data, draw):
    """Replace a number stored as digits or in 1, 2, 4 or 8 bytes."""
    places = [match.span() for match in re.finditer(rb"-?\d+", data[: 1 << 16])]
    if places and draw.random() < 0.7:
        start, end = draw.choice(places)
        return data[:start] + draw.choice(NUMBERS).encode() + data[end:]
    size = draw.choice((1, 2, 4, 8))
    at = draw.randrange(max(1, len(data) - size))
    number = draw.choice(
        (0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), 2 ** (8 * size - 1) - 1, 2 ** (4 * size))
    )
    return data[:at] + number.to_bytes(size, draw.choice(("little", "big"))) + data[at + size :]


def _one_damage(data, draw):
    """Return data with a span cut off, changed, removed, repeated, swapped or inserted, or replace the data entirely."""
    at, end = _span(data, draw)
    octets = bytes([draw.choice((draw.choice(_OCTETS), draw.randrange(256)))])
    bracket = draw.choice((b"[", b"(", b'{"a":', b"]", b"<"))
    a, b, c, d = sorted(draw.randrange(len(data) + 1) for _ in range(4))
    choices = (
        lambda: data[:at],
        lambda: (
            data[:at]
            + bytes(octet ^ 1 << draw.randrange(8) for octet in data[at : at + 1])
            + data[at + 1 :]
        ),
        lambda: data[:at] + octets + data[at + 1 :],
        lambda: _number(data, draw),
        lambda: data[:at] + data[end:],
        lambda: data[:end] + data[at:end] * draw.choice((1, 1, 2, 100)) + data[end:],
        lambda: data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:],
        lambda: data[:at] + bytes(end - at) + data[end:],
        lambda: data[:at] + octets * draw.choice((1, 1, 3, 5000)) + data[at:],
        lambda: data.decode("latin-1").encode(
            draw.choice(("utf-16", "utf-8-sig", "utf-32-le", "utf-8"))
        ),
        lambda: data[:at] + bracket * draw.choice((2, 100, 200_000)) + data[at:],
        lambda: data + draw.choice(_ENDS) + draw.randbytes(draw.choice((0, 1, 30))),
        lambda: draw.choice(_ENDS),
    )
    return draw.choice(choices)()


def of_bytes(data, draw):
    """Damage data once or, with probability 1/4, twice."""
    for _ in range(draw.choice((1, 1, 1, 2))):
        if data:
            data = _one_damage(data, draw)
    return data


def of_json(data, draw):
    """Return JSON text with one value replaced, removed or duplicated."""
    whole = json.loads(data)
    places = []

    def visit(value):
        for key in (
            value
            if isinstance(value, dict)
            else range(len(value))
            if isinstance(value, list)
            else ()
        ):
            places.append((value, key))
            visit(value[key])

    visit(whole)
    if not places:
        return json.dumps(draw.choice(VALUES)).encode()
    inner, key = draw.choice(draw.choice((places, places[:20])))
    what = draw.random()
    if what < 0.2:
        del inner[key]
    elif what < 0.3 and isinstance(inner, list):
        inner.insert(key, inner[key])
    elif what < 0.3:
        inner[draw.choice(("", "x", "../x", key + "x"))] = inner.pop(key)
    elif what < 0.45 and isinstance(inner[key], int | float):
        inner[key] = draw.choice(
            (-inner[key], inner[key] + 1, inner[key] - 1, float(inner[key]), 2 * inner[key])
        )
    elif what < 0.5:
        inner[key] = draw.choice(places)[0] if draw.random() < 0.5 else [inner[key]]
        return _dumped(whole)
    else:
        inner[key] = draw.choice(VALUES)
    return _dumped(whole)


def _dumped(whole):
    try:
        return json.dumps(whole).encode()
    except ValueError:  # a value in itself
        return b"[[]]"


def of_members(data, draw):
    """Damage one member in a zip file and update its checksum to match."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        chosen = draw.choice(old.namelist())
        for info in old.infolist():
            content = old.read(info)
            if info.filename == chosen:
                head = content[:128]  # of an array: its header
                content = draw.choice(
                    (of_bytes(content, draw), of_bytes(head, draw) + content[128:])
                )
            how = draw.choice(
                (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
            )
            new.writestr(info.filename, content, how)
    return out.getvalue()


def of_gzip(data, draw):
    """Damage the contents in a gzip file."""
    return gzip.compress(of_bytes(gzip.decompress(data), draw), mtime=0)


def of_png(data, draw):
    """Damage one chunk in a PNG image and update its checksum to match."""
    chunks, at = [], 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        chunks.append((kind, data[at + 8 : at + 8 + size]))
        at += 12 + size
    n = draw.randrange(len(chunks))
    kind, content = chunks[n]
    if kind == b"IDAT" and draw.random() < 0.7:
        content = zlib.compress(of_bytes(zlib.decompress(content), draw))
    elif content:
        content = of_bytes(content, draw)
    else:
        kind = draw.choice((b"IDAT", b"tRNS", b"zTXt", b"fcTL", b"IEND"))
    chunks[n] = kind, content
    parts = (
        struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks
    )
    return data[:8] + b"".join(parts)
