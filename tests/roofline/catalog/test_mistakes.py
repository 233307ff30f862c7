"""Values in error messages: short, on one line, whatever they are."""

import numpy as np
import pytest

from ridgeplan.roofline.catalog.validation import brief


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (-1.5, "-1.5"),
        (float("nan"), "nan"),
        ("it's", '"it\'s"'),
        ("a\nb", r"'a\nb'"),
        (None, "None"),
        (10**49, "1" + "0" * 49),
        (10**50, "a huge number"),
        (-(10**5000), "a huge number"),
        ([10**5000], "[a huge number]"),
        ({"a": [1, 2]}, "{'a': [1, 2]}"),
    ],
    ids=[*"abcdefghijk"],
)
def test_short_values_are_shown_whole(value: object, shown: str) -> None:
    assert brief(value) == shown


def nested(depth: int) -> list[object]:
    found: list[object] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**6,
        "\n" * 100,
        list(range(10**6)),
        nested(100_000),
        np.zeros((50, 50)),
        {str(i): i for i in range(99)},
        ["x" * 75, "y" * 75],
    ],
    ids=["text", "newlines", "list", "nested", "array", "dict", "texts"],
)
def test_long_values_are_cut_at_80_characters_of_one_line(value: object) -> None:
    assert "\n" not in brief(value)
    assert len(brief(value)) <= 80


def test_a_cut_shows_that_something_is_missing() -> None:
    assert len(brief("x" * 79)) == 80 and "..." in brief("x" * 79)
    assert brief("x" * 78) == repr("x" * 78)
