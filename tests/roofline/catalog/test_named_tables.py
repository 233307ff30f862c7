"""Catalogs of named entries: which entry a name leads to, and which names are suggested."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from ridgeplan.roofline.catalog.documents import build_catalog, existing_path, letters_and_digits, read_tables


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
    assert len(str(caught.value)) < 120
