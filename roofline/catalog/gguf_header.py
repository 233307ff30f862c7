"""The header of a GGUF file: metadata and tensor names, without the tensors.

The gguf package's own reader builds a Python object per token of the vocabulary (2 s for 49152 tokens) and
trusts the lengths it finds; a shape needs neither. Format: the GGUF specification in ggml/docs/gguf.md.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

_STRING, _ARRAY = 8, 9
# struct formats of the scalar value types, by the number that stands in the file.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GGUFHeader:
    """metadata: scalar and string values by key (arrays are left out); tensors: dimensions by name."""

    metadata: dict[str, object]
    tensors: dict[str, tuple[int, ...]]


def read_gguf_header(path: Path) -> GGUFHeader:
    """The header of a little-endian GGUF file, version 2 or 3. Raises OSError, or ValueError if damaged."""
    with path.open("rb") as file:
        try:
            # mmap refuses an empty file with a ValueError of its own.
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data))
        except struct.error:
            raise ValueError("the file ends within its header") from None


class _Cursor:
    """Reads on from a position; every read beyond the end raises struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalar(self, code: str) -> int | float | bool:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def count(self, code: str = "Q") -> int:
        return int(self.scalar(code))

    def string(self) -> str:
        length = self.count()
        self.skip(length)
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def skip(self, length: int) -> None:
        if self.at + length > len(self.data):
            raise struct.error
        self.at += length


def _parse(cursor: _Cursor) -> GGUFHeader:
    if cursor.data[:4] != b"GGUF":
        raise ValueError("it does not start with 'GGUF'")
    cursor.skip(4)
    version = cursor.count("I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} is not supported; supported: 2, 3 (little-endian)")
    tensor_count, value_count = cursor.count(), cursor.count()
    metadata = {}
    for _ in range(value_count):
        key = cursor.string()
        value = _value(cursor, cursor.count("I"))
        if value is not None:
            metadata[key] = value
    tensors, furthest = {}, 0
    for _ in range(tensor_count):
        name = cursor.string()
        tensors[name] = tuple(cursor.count() for _ in range(cursor.count("I")))
        cursor.skip(4)  # its quantization type
        furthest = max(furthest, cursor.count())
    if tensors and cursor.at + furthest >= len(cursor.data):
        raise ValueError("the file ends before its last tensor")
    return GGUFHeader(metadata, tensors)


def _value(cursor: _Cursor, kind: int) -> object:
    """One metadata value; None for an array, which is skipped."""
    if kind == _STRING:
        return cursor.string()
    if kind != _ARRAY:
        return cursor.scalar(_code(kind))
    kind, length = cursor.count("I"), cursor.count()
    if kind == _STRING:
        for _ in range(length):
            cursor.skip(cursor.count())
    else:
        cursor.skip(length * struct.calcsize(_code(kind)))
    return None


def _code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"metadata of unknown type {kind}")
    return _SCALARS[kind]
