"""Checked dataclasses: what every kind of field takes and refuses, and what the message then says."""

from dataclasses import FrozenInstanceError, dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import pytest

from ridgeplan.roofline.catalog.validation import (
    Checked,
    InvalidField,
    Mistakes,
    brief,
    build,
    flag,
    name_text,
    number,
    numbers,
    one_of,
    part,
    parts_by_name,
    tables,
    text,
    texts,
    texts_by_name,
    together,
    whole,
    with_options,
)


class OwnError(ValueError):
    """What `Outer` raises."""


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner(Checked):
    width: int = whole(1, 100)
    depth: float = number(0.5, 2, default=1.0)

    def _contradiction(self) -> str | None:
        return "width is 13; allowed: others" if self.width == 13 else None


@dataclass(frozen=True)
class Outer(Checked):
    error = OwnError
    inner: Inner = part(Inner, required=True)
    parts: dict[str, Inner] = parts_by_name(Inner)
    name: str = text("")
    title: str = text("none")
    count: int | None = whole(0, 9, default=None)
    on: bool = flag(False)
    colour: Colour = one_of(Colour, default=Colour.RED)
    bits: int = one_of((4, 8), default=8)
    notes: dict[str, str] = texts_by_name(dict)
    tags: tuple[str, ...] = texts()
    rows: tuple[dict[str, Any], ...] = tables()
    shares: tuple[float, ...] = numbers(0, 1, default=())


GOOD: dict[str, Any] = {"inner": {"width": 3}, "parts": {"left": {"width": 100, "depth": 2}}}
OUTER = build(Outer, GOOD)


def test_parts_are_built_and_values_get_the_declared_types() -> None:
    assert OUTER.inner == Inner(3)
    assert OUTER.parts == {"left": Inner(100, 2.0)}
    assert type(OUTER.parts["left"].depth) is float
    built = build(Outer, {**GOOD, "colour": "blue", "tags": ["a"], "rows": [{"x": 1, "y": "z"}], "shares": [0, 1]})
    assert built.shares == (0.0, 1.0)
    assert (built.colour, built.tags, built.rows) == (Colour.BLUE, ("a",), ({"x": 1, "y": "z"},))


@dataclass(frozen=True)
class Labelled(Checked):
    label: str = name_text()


def test_names_are_short_and_of_one_line() -> None:
    for label in ("H200", "owner/Llama-3.1-8B (tuned)", "名" * 255):
        assert build(Labelled, {"label": label}).label == label
    for label in (3, "", "x" * 256, "a\nb", "\x7f", "\x1b[31m"):
        with pytest.raises(
            InvalidField, match="allowed: a text of 1 to 255 characters without control or invisible ones"
        ):
            build(Labelled, {"label": label})


# Zero-width and filling characters, marks of direction, variation selectors, tags, and marks of annotations.
INVISIBLE = (
    "\xad", "\u034f", "\u061c", "\u115f", "\u180e", "\u200b", "\u200c", "\u200d", "\u200e", "\u200f", "\u202a",
    "\u202e",
    "\u2060", "\u2064", "\u2066", "\u2069", "\u206f", "\u3164", "\ufe0f", "\ufeff", "\uffa0", "\ufff9", "\U0001d173",
    "\U000e0000", "\U000e0041", "\U000e007f", "\U000e0100",
)  # fmt: skip


@pytest.mark.parametrize("character", INVISIBLE, ids=ascii)
def test_names_that_look_like_others_are_refused(character: str) -> None:
    for label in (f"H2{character}00", f"{character}H200", f"H200{character}"):
        for invalid in ({"inner": {"width": 3}, "parts": {label: {"width": 3}}}, {**GOOD, "notes": {"x": label}}):
            with pytest.raises(OwnError, match="characters without control or invisible ones") as caught:
                build(Outer, invalid)
            assert character not in str(caught.value)
        with pytest.raises(InvalidField, match="characters without control or invisible ones"):
            Labelled(label)


def test_code_gets_the_same_conversions_and_the_same_errors() -> None:
    assert replace(OUTER, colour="blue").colour is Colour.BLUE  # type: ignore[arg-type]
    assert type(Inner(3, 1).depth) is float
    with pytest.raises(InvalidField, match=r"^width is 0; allowed: a whole number from 1 to 100$"):
        Inner(0)
    with pytest.raises(OwnError, match=r"^bits is 5; allowed: 4, 8$"):
        replace(OUTER, bits=5)
    with pytest.raises(FrozenInstanceError):
        OUTER.bits = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("width", (1, 100)),
        ("depth", (0.5, 2, 2.0, 1)),
        ("name", ("", "a", "\U0001f600 " * 2048)),
        ("title", ("b",)),
        ("count", (None, 0, 9)),
        ("on", (True, False)),
        ("colour", ("red", Colour.BLUE)),
        ("bits", (4, 8)),
    ],
)
def test_values_at_the_ends_of_a_range_pass(field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        if field in ("width", "depth"):
            assert getattr(build(Inner, {"width": 3, field: value}), field) == value
        else:
            assert getattr(build(Outer, {**GOOD, field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "values", "allowed"),
    [
        ("inner.width", (0, 101, 3.0, True, "3", None, [3], 10**400), "a whole number from 1 to 100"),
        (
            "inner.depth",
            (0.4999, 2.001, float("nan"), float("inf"), True, "1", None, 10**400),
            "a number from 0.5 to 2",
        ),
        ("name", (3, None, b"a", "x" * 4097), "a text of 0 to 4096 characters without control or invisible ones"),
        ("title", ("",), "a text of 1 to 4096 characters without control or invisible ones"),
        # A line break, an escape, a line separator, a mark that reorders the line, and half of a character, which no
        # file can hold.
        (
            "title",
            ("a\nb", "\x1b]0;x", "a\u2028b", "\u202eb", "\x85", "\ud800"),
            "a text of 1 to 4096 characters without control or invisible ones",
        ),
        ("rows[0].y", ("a\nb", "\ud800"), "a text or a finite number"),
        ("count", (-1, 10, False), "a whole number from 0 to 9"),
        ("on", (0, 1, "true", None), "true or false"),
        ("colour", ("green", 1, None, ["red"]), "red, blue"),
        ("bits", (5, "4", 4.0, True), "4, 8"),
        ("parts", (3, [], None), "an object"),
        ("parts.left", (3, [], None), "an object with named fields"),
        ("notes.x", (3, "", None), "a text of 1 to 4096 characters without control or invisible ones"),
        ("tags", (3, "ab", None, {}), "a list"),
        ("rows[0].x", ([], {}, None, float("nan")), "a text or a finite number"),
        ("shares", (0.5, "x", None), "a list"),
        ("shares[1]", (1.01, -0.01, float("nan"), True, "1", None), "a number from 0 to 1"),
    ],
)
def test_wrong_values_are_named_with_their_place_and_what_is_allowed(
    field: str, values: tuple[Any, ...], allowed: str
) -> None:
    for value in values:
        with pytest.raises(OwnError) as caught:
            build(Outer, edited(field, value))
        assert str(caught.value).startswith(f"{field} is ") and str(caught.value).endswith(f"; allowed: {allowed}")


def edited(field: str, value: Any) -> dict[str, Any]:
    if field.startswith("rows[0]."):
        return {**GOOD, "rows": [{field[-1]: value}]}
    if field == "shares[1]":
        return {**GOOD, "shares": [0.5, value]}
    name, _, inner = field.partition(".")
    return {**GOOD, name: {**GOOD.get(name, {}), inner: value} if inner else value}


def test_several_mistakes_are_listed_together() -> None:
    wrong = {"inner": {"width": 0, "depth": "x"}, "bits": 5, "parts": {"a b": {"width": 101}}}
    with pytest.raises(OwnError) as caught:
        build(Outer, wrong, "box: ")
    assert str(caught.value) == (
        "box: 4 mistakes: (1) inner.width is 0; allowed: a whole number from 1 to 100; "
        "(2) inner.depth is 'x'; allowed: a number from 0.5 to 2; "
        "(3) parts.'a b'.width is 101; allowed: a whole number from 1 to 100; (4) bits is 5; allowed: 4, 8"
    )


def test_steps_together_name_all_that_is_wrong_and_defects_stay_defects() -> None:
    def wrong(text: str) -> None:
        raise InvalidField(text)

    assert together([lambda: 1, lambda: 2]) == [1, 2]
    with pytest.raises(InvalidField, match=r"^one$"):
        together([lambda: 1, lambda: wrong("one")])
    with pytest.raises(Mistakes, match=r"^3 mistakes: \(1\) known; \(2\) one; \(3\) two$") as caught:
        together([lambda: wrong("one"), lambda: together([lambda: wrong("two")])], ["known"])
    assert caught.value.mistakes == ("known", "one", "two")
    with pytest.raises(ValueError, match="invalid literal"):
        together([lambda: wrong("one"), lambda: int("x")])


def test_no_more_than_sixteen_mistakes_are_listed() -> None:
    several = {str(index): {"width": 0} for index in range(18)}
    with pytest.raises(
        OwnError, match=r"^18 mistakes: \(1\) .*\(16\) parts\.'15'\.width is 0; .*; and 2 more$"
    ) as caught:
        build(Outer, {**GOOD, "parts": several})
    assert "(17)" not in str(caught.value)
    all_told = r"^16 mistakes: .*\(16\) parts\.'15'\.width is 0; allowed: a whole number[^;]*$"
    with pytest.raises(OwnError, match=all_told):
        build(Outer, {**GOOD, "parts": {str(index): several[str(index)] for index in range(16)}})


MISSING = (
    r"^2 mistakes: \(1\) inner is missing; allowed: an object with named fields; \(2\) parts is missing; allowed: an "
    "object$"
)


def test_missing_and_unknown_fields_are_named() -> None:
    with pytest.raises(OwnError, match=MISSING):
        build(Outer, {})
    with pytest.raises(
        OwnError, match=r"^size is not a field; allowed: inner, parts, name, title, count, on, colour, bits"
    ):
        build(Outer, {**GOOD, "size": 1})
    with pytest.raises(OwnError, match=r"^parts\.left\.size is not a field; allowed: width, depth$"):
        build(Outer, {**GOOD, "parts": {"left": {"width": 3, "size": 1}}})
    with pytest.raises(OwnError, match=r"^inner\.size is not a field; allowed: width, depth$"):
        build(Outer, {**GOOD, "inner": {"width": 3, "size": 1}})
    with pytest.raises(
        OwnError, match=r"\(1\) inner\.size is .*; allowed: width, depth; \(2\) inner\.hue is not a field$"
    ):
        build(Outer, {**GOOD, "inner": {"width": 3, "size": 1, "hue": 1}})
    with pytest.raises(OwnError, match=r"^it is \[\]; allowed: an object with named fields$"):
        build(Outer, [])


def test_fields_that_contradict_each_other_are_named_with_their_place() -> None:
    with pytest.raises(InvalidField, match=r"^width is 13; allowed: others$"):
        Inner(13)
    with pytest.raises(OwnError, match=r"^inner: width is 13; allowed: others$"):
        build(Outer, {**GOOD, "inner": {"width": 13}})


# Values in error messages: short, on one line, whatever they are.


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
    results: list[object] = []
    for _ in range(depth):
        results = [results]
    return results


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


def test_texts_name_arguments_as_options_of_the_command_line() -> None:
    text = "8 GPUs (`gpus=8`), `backend=vllm+plugin`, `kv_format=int8` or `yarn=True`; `auto` and `ridgeplan run` stay"
    options = "8 GPUs (--gpus 8), --backend vllm+plugin, --kv-format int8 or --yarn; `auto` and `ridgeplan run` stay"
    assert with_options(text) == options
