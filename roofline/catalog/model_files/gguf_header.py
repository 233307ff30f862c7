"""The header of a GGUF file: metadata and tensor names, without the tensors.

The gguf package's own reader is too slow and too trusting. It makes an object for every token of the vocabulary, 7 s
for the 151936 of Qwen2.5, and does not compare counts and lengths with the file's size, so a damaged header keeps it
busy for minutes. Format: the GGUF specification, ggml/docs/gguf.md.
"""

import math
import mmap
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from ridgeplan.roofline.catalog.mistakes import brief

MAX_HEADER_BYTES = 64 << 20  # a vocabulary of 262144 tokens and its merges take about 15 MB
MAX_ENTRIES = 1 << 16  # metadata values, and tensors
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_STRING, _ARRAY = 8, 9
# struct formats of the scalar value types, by their number in the file.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
# Bytes of the shortest possible items. A value has a key's length, a type and a bool; a tensor has a name's length, a
# number of dimensions, a type and an offset.
_VALUE_BYTES, _TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 4 + 8


@dataclass(frozen=True)
class GGUFHeader:
    """metadata: scalar and string values by key (arrays are left out); tensors: dimensions and types by name."""

    metadata: dict[str, object]
    tensors: dict[str, tuple[int, ...]]
    types: dict[str, int]


def read_gguf_header(path: Path) -> GGUFHeader:
    """The header of a little-endian GGUF file, version 2 or 3.

    Raises OSError, or ValueError (one line, without the path) if the file is damaged. Every count and length is
    checked against the remaining bytes before it is used, so damage is found at once.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a pipe would wait for whoever writes to it
        raise ValueError("it is a pipe or a device; allowed: a file")
    with path.open("rb") as file:
        if not file.read(1):
            raise ValueError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _header(_Cursor(data))
            except (struct.error, OverflowError):  # positions past the end, and beyond 64 bits
                limit = f"{MAX_HEADER_BYTES >> 20} MiB"
                raise ValueError(f"the file ends within its header, or the header is larger than {limit}") from None


class _Cursor:
    """Reads from a position onwards. Reading past the end, or past the largest header, raises struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    @property
    def left(self) -> int:
        """Bytes from here to the end of the file or of the largest header."""
        return min(len(self.data), MAX_HEADER_BYTES) - self.at

    def scalar(self, code: str) -> int | float | bool:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def whole(self, code: str = "Q") -> int:
        return int(self.scalar(code))

    def count(self, item_bytes: int, most: int = MAX_HEADER_BYTES) -> int:
        """A count of items of at least `item_bytes` each. Raises ValueError if the file cannot hold that many."""
        found, fitting = self.whole(), self.left // item_bytes
        if found > min(fitting, most):
            raise ValueError(f"it announces {found} items in its header; allowed here: up to {min(fitting, most)}")
        return found

    def string(self) -> str:
        length = self.whole()
        self.skip(length)
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def skip(self, length: int) -> None:
        if length > self.left:
            raise struct.error
        self.at += length

    def skip_strings(self) -> None:
        count, at = self.count(_LENGTH.size), self.at
        for _ in range(count):
            at += _LENGTH.size + _LENGTH.unpack_from(self.data, at)[0]
        self.skip(at - self.at)


def _header(cursor: _Cursor) -> GGUFHeader:
    if cursor.data[:4] != b"GGUF":
        raise ValueError("it does not start with 'GGUF'")
    cursor.skip(4)
    version = cursor.whole("I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} is not supported; supported: 2, 3 (little-endian)")
    tensor_count, value_count = cursor.count(_TENSOR_BYTES, MAX_ENTRIES), cursor.count(_VALUE_BYTES, MAX_ENTRIES)
    metadata: dict[str, object] = {}
    for _ in range(value_count):
        key = _new_name(cursor.string(), metadata)
        value = _value(cursor, cursor.whole("I"))
        if value is not None:
            metadata[key] = value
    return GGUFHeader(metadata, *_tensors(cursor, tensor_count))


def _tensors(cursor: _Cursor, count: int) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Dimensions and types by name. Raises ValueError unless all tensors end within the file."""
    tensors: dict[str, tuple[int, ...]] = {}
    types: dict[str, int] = {}
    end = 0  # in bytes from the start of the tensor data, which follows the header
    for _ in range(count):
        name = _new_name(cursor.string(), tensors)
        dimensions = cursor.whole("I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"tensor {brief(name)} has {dimensions} dimensions; allowed: up to {MAX_DIMENSIONS}")
        tensors[name] = tuple(cursor.whole() for _ in range(dimensions))
        types[name] = cursor.whole("I")
        smallest_bytes = math.prod(tensors[name]) // 8  # no type takes less than a bit per element
        end = max(end, cursor.whole() + max(smallest_bytes, 1))
    if end > len(cursor.data) - cursor.at:
        raise ValueError("the file ends before its last tensor")
    return tensors, types


def _new_name(name: str, known: dict[str, object] | dict[str, tuple[int, ...]]) -> str:
    if name in known:
        raise ValueError(f"{brief(name)} stands twice in it")
    return name


def _value(cursor: _Cursor, kind: int) -> object:
    """One metadata value; None for an array, which is skipped."""
    if kind == _STRING:
        return cursor.string()
    if kind != _ARRAY:
        return cursor.scalar(_code(kind))
    kind = cursor.whole("I")
    if kind == _STRING:
        cursor.skip_strings()
    else:
        item_bytes = struct.calcsize(_code(kind))
        cursor.skip(cursor.whole() * item_bytes)
    return None


def _code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"metadata of unknown type {kind}")
    return _SCALARS[kind]
