"""JSON and TOML from outside: what is parsed, and the one line for what is not."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from ridgeplan.roofline.catalog.files import (
    build_catalog,
    existing_path,
    fields_of_schema,
    letters_and_digits,
    parse_json,
    parse_toml,
    read_document,
    read_tables,
)


def test_json_and_toml_as_text_and_as_bytes() -> None:
    assert parse_json('{"a": [1, 2.5, null, "\u00e9"]}') == {"a": [1, 2.5, None, "\u00e9"]}
    assert parse_json('{"\u00e9": {"a": 1}, "b": {"a": 1}}'.encode()) == {"\u00e9": {"a": 1}, "b": {"a": 1}}
    assert parse_toml("[a]\nb = 1_000") == parse_toml(b"[a]\nb = 1_000") == {"a": {"b": 1000}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("", "it is empty"),
        (b" \n ", "it is empty"),
        ("{", "Expecting property name"),
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "the key 'c' stands twice in one object"),
        ("[NaN]", "NaN stands for a number; allowed: finite numbers"),
        ("[-Infinity]", "-Infinity stands for a number"),
        ("1" * 4001, "a number has 4001 digits; allowed: up to 4000"),
        ("1" * 10_000, "a number has 10000 digits"),
        ("[" * 100_000, "it is nested too deeply"),
        (b"\xff{}", "it is not UTF-8 text: byte 0 is 0xff"),
        ('{"a": 1}'.encode("utf-16"), "it is not UTF-8 text: byte 0 is 0xff"),
        (b'{"a": "\xe9"}', "it is not UTF-8 text: byte 7 is 0xe9"),
        ("{} {}", "Extra data"),
    ],
    ids=lambda part: str(part[:12]),
)
def test_json_that_is_refused(document: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_json(document)
    assert "\n" not in str(caught.value) and "; allowed: " in str(caught.value)


def test_numbers_within_a_floats_range_and_somewhat_beyond_are_left_to_the_fields() -> None:
    assert parse_json("1" * 4000) == int("1" * 4000)
    assert parse_json("1e999") == float("inf")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("[a]\n[a]", "Cannot declare"),
        ("[a]\nb = 1\nb = 2", "Cannot overwrite"),
        ("a = " + "[" * 100_000, "it is nested too deeply"),
        (b"a = '\xff'", "it is not UTF-8 text: byte 5 is 0xff"),
        ("a = " + "1" * 10_000, "digits"),
    ],
    ids=lambda part: str(part[:12]),
)
def test_toml_that_is_refused(document: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_toml(document)
    assert "\n" not in str(caught.value) and "; allowed: " in str(caught.value)


def test_files_of_up_to_16_mib_are_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b" " * (16 * 2**20))
    assert len(read_document(path)) == 16 * 2**20
    path.write_bytes(b" " * (16 * 2**20 + 1))
    with pytest.raises(ValueError, match="it is larger than 16 MiB; allowed: up to 16 MiB"):
        read_document(path)
    with pytest.raises(ValueError, match="it is larger than 16 MiB; allowed: up to 16 MiB"):
        read_document(Path("/dev/zero"))


class SchemaError(ValueError):
    """What the caller wants raised."""


def test_the_fields_beside_the_schema() -> None:
    assert fields_of_schema({"schema": 2, "a": 1}, 2, "", SchemaError) == {"a": 1}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "it is []; allowed: an object with named fields"),
        ({"a": 1}, "schema is missing, as ridgeplan did not write this document; allowed: 2"),
        ({"schema": "2"}, "schema is '2'; allowed: 2"),
        ({"schema": True}, "schema is True; allowed: 2"),
        ({"schema": 2.0}, "schema is 2.0; allowed: 2"),
        ({"schema": 0}, "schema is 0; allowed: 2"),
        ({"schema": 1}, "schema 1 is of an older version; do it again"),
        ({"schema": 3}, "schema 3 is newer than this version reads; allowed: up to 2"),
        ({"schema": 10**300}, "schema a huge number is newer than this version reads; allowed: up to 2"),
    ],
)
def test_other_schemas_are_refused(document: object, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        fields_of_schema(document, 2, "do it again", SchemaError)
    assert str(caught.value) == message


# Catalogs of named entries: which entry a name leads to, and which names are suggested.


@dataclass(frozen=True)
class Item:
    name: str


ALPHA, BETA, GAMMA, DELTA = (Item(name) for name in ("alpha-1", "alpha-2", "alpha-3", "alpha-4"))
CATALOG = build_catalog(
    [
        (ALPHA, ("alpha-1", "first")),
        (BETA, ("alpha-2", "first", "second")),
        (GAMMA, ("alpha-3",)),
        (DELTA, ("alpha-4",)),
    ],
    letters_and_digits,
)


def test_names_are_normalized_and_an_alias_of_two_is_the_first_ones() -> None:
    assert CATALOG.find("ALPHA 1") is ALPHA
    assert CATALOG.find("First!") is ALPHA
    assert CATALOG.find("second") is BETA
    assert CATALOG.find("third") is None
    assert CATALOG.entries == (ALPHA, BETA, GAMMA, DELTA)


def test_up_to_three_similar_names_are_suggested() -> None:
    assert CATALOG.suggestion("alpha-9").count("alpha-") == 3
    assert CATALOG.suggestion("secnd") == " Did you mean alpha-2?"
    assert CATALOG.suggestion("zzz") == ""


def test_an_existing_path(tmp_path: Path) -> None:
    assert existing_path(str(tmp_path)) == tmp_path
    for nothing in (str(tmp_path / "absent"), "", "a\0b", "x" * 5000):
        assert existing_path(nothing) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [("", r"it has no \[table\]"), ("x = 1\n[a]", r"'x' stands outside a \[table\]"), (f'"{"x" * 999}" = 1', "x{30}")],
)
def test_files_without_tables(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_tables(path)
    assert len(str(caught.value)) < 140 and str(caught.value).endswith("; allowed: tables alone")
