"""Untrusted JSON and TOML text, parsed to plain values. `checks.build` validates their meaning.

Every error is a one-line ValueError; the caller adds the name of the file.
"""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog.mistakes import brief

MAX_DOCUMENT_BYTES = 16 << 20  # plans, profiles and hardware files are a few kilobytes
MAX_DIGITS = 4000  # a little below Python's own limit


def read_document(path: Path) -> bytes:
    """The bytes of a small file. Raises OSError, or ValueError for a large one without reading all of it."""
    with path.open("rb") as file:
        content = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"it is larger than {MAX_DOCUMENT_BYTES >> 20} MiB")
    return content


def parse_json(document: str | bytes) -> Any:
    """The value of UTF-8 JSON. Raises ValueError, also for duplicate keys and for NaN."""
    return _parsed(document, _json_value)


def parse_toml(document: str | bytes) -> dict[str, Any]:
    """The tables of UTF-8 TOML. Raises ValueError."""
    tables: dict[str, Any] = _parsed(document, tomllib.loads)
    return tables


def fields_of_schema(document: object, schema: int, advice: str, error: type[ValueError]) -> dict[str, Any]:
    """The fields of an object except "schema". Raises `error` for another schema, with advice for an older one."""
    if not isinstance(document, dict):
        raise error(f"it is {brief(document)}; allowed: an object with named fields")
    found = document.get("schema")
    if type(found) is not int or found < 1:
        raise error(f"schema is {brief(found)}; allowed: {schema}")
    if found > schema:
        raise error(f"schema {brief(found)} is newer than this version reads; allowed: up to {schema}")
    if found < schema:
        raise error(f"schema {found} is of an older version; {advice}")
    return {name: value for name, value in document.items() if name != "schema"}


def _parsed(document: str | bytes, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(document if isinstance(document, str) else document.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _json_value(text: str) -> Any:
    if not text.strip():
        raise ValueError("it is empty")
    return json.loads(text, object_pairs_hook=_object, parse_int=_integer, parse_constant=_no_number)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {brief(key)} stands twice in one object")
        found[key] = value
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits; allowed: up to {MAX_DIGITS}")
    return int(digits)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} stands for a number; allowed: finite numbers")
