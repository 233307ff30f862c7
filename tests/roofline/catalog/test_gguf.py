"""GGUF headers written byte by byte: every type of value, and counts and lengths that no file holds."""

import struct
from pathlib import Path

import pytest

from ridgeplan.roofline.catalog.gguf import read_gguf_header

# Types of values, by the specification.
UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(key: str, kind: int, content: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + content


def array(kind: int, count: int, content: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + content


def tensor(name: str, *dimensions: int, offset: int = 0, kind: int = 99) -> bytes:
    """Of a type that is not known, of which an element takes at least a bit."""
    return (
        string(name)
        + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        + struct.pack("<IQ", kind, offset)
    )


def start(tensors: int, values: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


def written(path: Path, content: bytes, *, size: int | None = None) -> Path:
    """A file of these bytes, continued with zeros up to `size`."""
    with path.open("wb") as file:
        file.write(content)
        file.truncate(size)
    return path


def test_every_type_of_value_and_the_tensors_are_read(tmp_path: Path) -> None:
    numbers = {UINT8: "B", INT8: "b", UINT16: "H", INT16: "h", UINT32: "I", INT32: "i", UINT64: "Q", INT64: "q"}
    values = [value(f"number{kind}", kind, struct.pack(f"<{code}", 7)) for kind, code in numbers.items()]
    values += [
        value("half", FLOAT32, struct.pack("<f", 0.5)),
        value("third", FLOAT64, struct.pack("<d", 1 / 3)),
        value("yes", BOOL, b"\x01"),
        value("name", STRING, string("Qwen é")),
        value("words", ARRAY, array(STRING, 3, string("a") + string("") + string("ccc"))),
        value("types", ARRAY, array(INT16, 2, struct.pack("<hh", -1, 1))),
        value("flags", ARRAY, array(BOOL, 0, b"")),
        value("last", UINT8, b"\x09"),
    ]
    tensors = [tensor("a", 4, 2), tensor("b", 3, offset=32), tensor("c", offset=64)]
    content = start(len(tensors), len(values)) + b"".join(values + tensors) + bytes(65)
    header = read_gguf_header(written(tmp_path / "good.gguf", content))
    assert header.metadata == {
        **{f"number{kind}": 7 for kind in numbers},
        "half": 0.5,
        "third": 1 / 3,
        "yes": True,
        "name": "Qwen é",
        "last": 9,
    }
    assert header.tensors == {"a": (4, 2), "b": (3,), "c": ()}


HUGE = (2**40, 2**63 - 1, 2**64 - 1)


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize(
    "content",
    [
        lambda count: start(0, count),
        lambda count: start(count, 0),
        lambda count: start(0, 1) + value("words", ARRAY, array(STRING, count, b"")),
    ],
    ids=["values", "tensors", "strings"],
)
def test_counts_that_the_file_cannot_hold_are_not_followed(tmp_path: Path, content, count: int) -> None:
    path = written(tmp_path / "bad.gguf", content(count), size=4096)
    with pytest.raises(ValueError, match=rf"^it announces {count} items in its header; allowed here: up to \d+$"):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("content", "items"),
    [
        (lambda count: start(0, count), b"".join(value(str(index), UINT8, b"1") for index in range(30))),
        (lambda count: start(count, 0), b"".join(tensor(str(index)) for index in range(30)) + b"1"),
        (lambda count: start(0, 1) + value("words", ARRAY, array(STRING, count, b"")), bytes(30 * 8)),
    ],
    ids=["values", "tensors", "strings"],
)
def test_a_file_that_ends_before_its_items_is_to_be_downloaded_again(tmp_path: Path, content, items: bytes) -> None:
    assert problem(written(tmp_path / "thirty.gguf", content(30) + items)) == ""
    more = content(31) + items
    early = f"the file ends within its header, after {len(more)} bytes; download it again"
    assert problem(written(tmp_path / "more.gguf", more)) == early


def problem(path: Path) -> str:
    """What is wrong with a file, "" if nothing."""
    try:
        read_gguf_header(path)
    except ValueError as error:
        return str(error)
    return ""


def test_entries_are_limited_even_in_files_that_could_hold_more(tmp_path: Path) -> None:
    """A model file of some gigabytes has room for any number of values and tensors."""
    for head in (start(0, 2**16 + 1), start(2**16 + 1, 0)):
        assert problem(written(tmp_path / "x.gguf", head, size=2**22)).endswith("up to 65536")
    for head in (start(0, 2**16), start(2**16, 0)):
        assert problem(written(tmp_path / "x.gguf", head, size=2**22)) == "'' stands twice in it"


def test_headers_are_limited_to_64_mib(tmp_path: Path) -> None:
    """In a file that could hold more, which costs no disk: it is zeros."""
    size = 2**26 + 4096
    head = start(0, 1) + string("types") + struct.pack("<I", ARRAY)
    fitting = 2**26 - len(head) - 12
    assert problem(written(tmp_path / "x.gguf", head + array(UINT8, fitting, b""), size=size)) == ""
    longer = written(tmp_path / "x.gguf", head + array(UINT8, fitting + 1, b""), size=size)
    assert problem(longer) == "its header is damaged, or larger than 64 MiB"
    words = written(tmp_path / "x.gguf", head + array(STRING, fitting // 8 + 1, b""), size=size)
    assert problem(words) == f"it announces {fitting // 8 + 1} items in its header; allowed here: up to {fitting // 8}"


def test_tensors_may_lie_behind_64_mib(tmp_path: Path) -> None:
    head = start(2, 0) + tensor("first", 2**20) + tensor("last", 8, offset=2**27, kind=0)
    whole = len(head) + 2**27 + 8 * 4  # of float32
    assert problem(written(tmp_path / "x.gguf", head, size=whole)) == ""
    cut = f"it is truncated: it has {whole - 1} bytes of {whole} or more; download it again"
    assert problem(written(tmp_path / "x.gguf", head, size=whole - 1)) == cut


@pytest.mark.parametrize("length", HUGE)
@pytest.mark.parametrize(
    "content",
    [
        lambda length: start(0, 1) + struct.pack("<Q", length),
        lambda length: start(0, 1) + value("name", STRING, struct.pack("<Q", length)),
        lambda length: start(0, 1) + value("words", ARRAY, array(STRING, 2, struct.pack("<QQ", length, length))),
        lambda length: start(0, 1) + value("types", ARRAY, array(UINT64, length, b"")),
        lambda length: start(1, 0) + struct.pack("<Q", length),
    ],
    ids=["key", "text", "item", "numbers", "tensor"],
)
def test_lengths_beyond_the_end_are_the_end(tmp_path: Path, content, length: int) -> None:
    path = written(tmp_path / "bad.gguf", content(length), size=4096)
    with pytest.raises(ValueError, match="the file ends within its header"):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"GGU", "it does not start with 'GGUF'"),
        (b"GGML" + bytes(20), "it does not start with 'GGUF'"),
        (b"GGUF", "the file ends within its header"),
        (start(0, 0, version=1), "GGUF version 1 is not supported; supported: 2, 3"),
        (start(0, 0, version=4), "GGUF version 4 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF version 50331648 is not supported"),
        (start(0, 1) + value("x", 13, bytes(8)), "metadata of unknown type 13"),
        (start(0, 1) + value("x", ARRAY, array(ARRAY, 1, bytes(16))), "metadata of unknown type 9"),
        (start(0, 2) + 2 * value("x", UINT8, b"\1"), "'x' stands twice in it"),
        (start(2, 0) + 2 * tensor("x", 1) + bytes(8), "'x' stands twice in it"),
        (start(1, 0) + tensor("x", 1, 1, 1, 1, 1) + bytes(8), "tensor 'x' has 5 dimensions; allowed: up to 4"),
        (start(1, 0) + tensor("x", 8), "it is truncated: it has"),
        (start(1, 0) + tensor("x", 8, offset=1) + bytes(1), "it is truncated: it has"),
        (start(1, 0) + tensor("x", 2**20, 2**20) + bytes(99), "it is truncated: it has"),
        (start(1, 0) + tensor("x", 24) + bytes(2), "it is truncated: it has"),
        (start(2, 0) + tensor("x", 24) + tensor("y", 8) + bytes(2), "it is truncated: it has"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_gguf_header(written(tmp_path / "bad.gguf", content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        start(0, 0, version=2),
        start(1, 0) + tensor("x", 8) + bytes(1),
        start(1, 0) + tensor("x", 8, offset=7) + bytes(8),
        start(1, 0) + tensor("x", 24) + bytes(3),  # one bit an element
        start(1, 0) + tensor("x", 1, 1, 1, 1) + bytes(1),
    ],
)
def test_the_smallest_files_that_hold_their_tensors_pass(tmp_path: Path, content: bytes) -> None:
    read_gguf_header(written(tmp_path / "good.gguf", content))
