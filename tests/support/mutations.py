"""Strategies for hypothesis: valid files with a few things wrong in them.

`make test` tries 100 cases of each kind, and 25 of those that load a model or start threads. `make fuzz` tries
RIDGEPLAN_FUZZ_EXAMPLES of each, of which none may take over 10 s.
"""

import json
import os
import re
import struct
from copy import deepcopy
from datetime import timedelta
from functools import cache
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ridgeplan.roofline.catalog.validation import UNPRINTABLE

EXAMPLES = os.environ.get("RIDGEPLAN_FUZZ_EXAMPLES")
FUZZ = settings(
    max_examples=int(EXAMPLES or 100),
    deadline=timedelta(seconds=10) if EXAMPLES else None,  # `make test` must not depend on the machine's load
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
HEAVY_FUZZ = settings(FUZZ, max_examples=int(EXAMPLES or 25))
# Tokens that Python's values cannot stand for: `render` writes them as they are.
RAW = "@raw:"
HUGE = ("1e999", "-1e999", "9" * 350, "9" * 5000, "1" + "0" * 400, "1e308", "5e-324", "-0.0", "1e400000")
EXTREMES = (
    0,
    -1,
    1,
    2,
    3,
    10_000,
    10**9,
    2**31,
    2**32 - 1,
    2**40,
    2**53 + 1,
    2**63,
    2**64,
    -(2**63),
    1e-300,
    1e300,
    0.5,
    -1.5,
)
ENCODINGS = ("utf-16", "utf-32", "utf-8-sig", "latin-1")


@cache  # hypothesis examines every strategy that is new
def scalars(raw: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """Values of every type, numbers at and beyond every range, and these raw tokens."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from(EXTREMES),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
        st.sampled_from(("x" * 5000, "a\nb", "\ud800", "16", "true")),
        st.sampled_from([RAW + token for token in (*HUGE, *raw)]),
    )


@cache
def garbage(raw: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """Scalars, and lists and objects of them."""
    inner = scalars(raw)
    return st.recursive(
        inner,
        lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=8), items, max_size=3),
        max_leaves=5,
    )


def places(document: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a document of dicts and lists."""
    if isinstance(document, dict):
        keys: list[Any] = list(document)
    else:
        keys = list(range(len(document))) if isinstance(document, list) else []
    return [(document, key) for key in keys] + [place for key in keys for place in places(document[key])]


@st.composite
def mutated(draw: st.DrawFn, valid: Any, raw: tuple[str, ...] = ("NaN", "Infinity", "-Infinity")) -> Any:
    """The valid document with one to three values replaced, deleted, moved, wrapped or added."""
    document = deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        nodes = places(document)
        if not nodes:
            break
        container, key = draw(st.sampled_from(nodes))
        change = draw(st.sampled_from(("replace", "replace", "replace", "delete", "add", "swap", "wrap")))
        if change == "replace":
            container[key] = draw(garbage(raw))
        elif change == "delete":
            del container[key]
        elif change == "add" and isinstance(container, dict):
            container[draw(st.text(max_size=8))] = draw(garbage(raw))
        elif change == "swap":
            other, place = draw(st.sampled_from(nodes))
            container[key] = deepcopy(other[place])
        else:
            container[key] = draw(st.sampled_from(([container[key]], {"value": container[key]})))
    return document


@st.composite
def damaged_text(draw: st.DrawFn, text: str) -> bytes:
    """The text with bytes cut, overwritten or repeated, deeply nested, or in another encoding; often as it is."""
    content = text.encode("utf-8", "surrogatepass")
    change = draw(st.sampled_from(("none", "none", "cut", "overwrite", "repeat", "encode", "nest")))
    start = draw(st.integers(0, len(content)))
    if change == "cut":
        return content[:start]
    if change == "overwrite":
        junk = draw(st.binary(min_size=1, max_size=4))
        return content[:start] + junk + content[start + len(junk) :]
    if change == "repeat":
        end = draw(st.integers(start, len(content)))
        return content[:end] + content[start:]
    if change == "encode":
        return text.encode(draw(st.sampled_from(ENCODINGS)), "replace")
    return content[:start] + b"[" * 100_000 + content[start:] if change == "nest" else content


@st.composite
def json_files(draw: st.DrawFn, valid: Any) -> bytes:
    """A valid JSON document, mutated."""
    text = json.dumps(draw(mutated(valid)), indent=draw(st.sampled_from((None, 1))), ensure_ascii=draw(st.booleans()))
    if draw(st.integers(0, 9)) == 0:  # a key that stands twice
        key = draw(st.sampled_from(re.findall(r'"\w+":', text) or ['"x":']))
        text = text.replace(key, f"{key} 1, {key}", 1)
    return draw(damaged_text(raw_tokens(text)))


@st.composite
def toml_files(draw: st.DrawFn, valid: dict[str, Any]) -> bytes:
    """Valid TOML of one level of tables, mutated."""
    tokens = ("nan", "inf", "-inf", "0x7fffffffffffffffffff", "2026-11-22", "07:30:00", "1_0", "'''a\nb'''")
    document = draw(mutated(valid, tokens))
    lines = []
    for name, table in document.items():
        entries = table if isinstance(table, dict) else {"value": table}
        lines += [f"[{json.dumps(name)}]", *(f"{json.dumps(key)} = {toml(value)}" for key, value in entries.items())]
    if draw(st.integers(0, 9)) == 0:
        lines.append(draw(st.sampled_from(lines or ["x = 1"])))
    return draw(damaged_text(raw_tokens("\n".join(lines))))


def toml(value: Any) -> str:
    """A value in TOML, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return '""' if value is None else json.dumps(value)


def raw_tokens(text: str) -> str:
    """`text` with the strings that stand for raw tokens replaced by those tokens."""
    return re.sub(f'"{RAW}([^"]*)"', lambda match: json.loads(f'"{match[1]}"'), text)


@st.composite
def binary_files(draw: st.DrawFn, valid: bytes, header: int) -> bytes:
    """A binary file whose first `header` bytes are overwritten in places, by junk or by integers, or that is cut."""
    content = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, header))
        number = st.sampled_from([value for value in EXTREMES if isinstance(value, int) and 0 <= value < 2**64])
        junk = draw(
            st.binary(min_size=1, max_size=9)
            | number.map(lambda value: struct.pack("<Q", value))
            | st.sampled_from((0, 1, 9, 13, 2**31, 2**32 - 1)).map(lambda value: struct.pack("<I", value))
        )
        content[start : start + len(junk)] = junk
    if draw(st.integers(0, 9)) == 0:
        del content[draw(st.integers(0, len(content))) :]
    if draw(st.integers(0, 9)) == 0:
        content += bytes(draw(st.sampled_from((8, 10_000))))
    return bytes(content)


def assert_one_line(error: Exception, longest: int = 2500) -> None:
    """An error message for a user: one line, of a length that fits a screen."""
    message = str(error)
    assert message.strip() and len(message) <= longest, message[:500]
    assert not re.search(f"[{UNPRINTABLE}]", message), ascii(message[:500])
