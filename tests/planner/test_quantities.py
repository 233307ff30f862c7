"""Quantities as people write them, and as answers print them."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeplan.planner import PlanError
from ridgeplan.planner.quantities import (
    count,
    duration_s,
    size_bytes,
    size_text,
    time_text,
    tokens,
    tokens_text,
    values,
)
from ridgeplan.roofline.plan.plan import MAX_TOKENS


@pytest.mark.parametrize(
    ("text", "number"),
    [("8192", 8192), ("128k", 131_072), ("128K", 131_072), ("1M", 1 << 20), ("1.5k", 1536), ("120_000", 120_000),
     ("120,000", 120_000), ("1e5", 100_000), (7, 7), (-5, -5)],
)  # fmt: skip
def test_tokens_are_binary_as_context_lengths_are_named(text: str | int, number: int) -> None:
    assert tokens(text) == number


def test_round_decimal_numbers_keep_their_digits() -> None:
    """To whoever typed 128000, 125k would be another number."""
    assert [tokens_text(number) for number in (131_072, 122_880, 128_000, 1 << 20, 1_024_000, 1023)] == [
        "128k", "120k", "128000", "1M", "1024000", "1023",
    ]  # fmt: skip


@given(st.integers(1, MAX_TOKENS))
def test_printed_tokens_are_read_back(number: int) -> None:
    assert tokens(tokens_text(number)) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("24GiB", 24 * 2**30), ("80 GB", 80e9), ("1.5gib", 1.5 * 2**30), ("1e9", 1e9), ("512b", 512), (25e9, 25e9)],
)
def test_sizes(text: str | float, number: float) -> None:
    assert size_bytes(text) == number


@pytest.mark.parametrize(("text", "seconds"), [("20ms", 0.02), ("2s", 2.0), ("0.5 s", 0.5), ("1min", 60.0)])
def test_times(text: str, seconds: float) -> None:
    assert duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "parse", "expected"),
    [
        ("8k", tokens, (8192,)),
        ("4k..32k", tokens, (4096, 8192, 16384, 32768)),
        ("4k..20k", tokens, (4096, 8192, 16384, 20480)),  # the last value is always among them
        ("32k,4k,4k", tokens, (4096, 32768)),
        ("4k 8k, 16 k", tokens, (4096, 8192, 16384)),
        ("1..6", count, (1, 2, 4, 6)),
        ("1k..4k:3", tokens, (1024, 2048, 4096)),
        ("7..7", count, (7,)),
    ],
)
def test_lists_and_ranges(text: str, parse: Callable[[Any], int], expected: tuple[int, ...]) -> None:
    assert values(text, parse) == expected


def test_a_range_of_many_points_is_even_in_logarithms() -> None:
    points = values("4k..1M:64")
    assert (len(points), points[0], points[-1]) == (64, 4096, 1 << 20)
    steps = [math.log(late / early) for early, late in pairwise(points)]
    assert steps == pytest.approx([math.log(256) / 63] * 63, rel=0.01)


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (tokens, "12q", "'12q' is not a number of tokens; allowed: one such as 8192, 128k (131072) or 1M"),
        (tokens, "0.3", "is not a number of tokens"),
        (tokens, "", "is not a number of tokens"),
        (tokens, "-4k", "'-4k' is negative; allowed: a positive number"),
        (tokens, True, "is not a number of tokens"),
        (count, "4k", "'4k' is not a whole number"),
        (size_bytes, "24", "'24' is a size without a unit; allowed: one with a unit, such as 24GB or 24GiB"),
        (size_bytes, 24, "24 is a size without a unit"),
        (size_bytes, "0GB", "'0GB' is not a size above 0"),
        (size_bytes, "1e999GB", "is not a size"),
        (size_bytes, "24 gold", "'24 gold' is not a size"),
        (duration_s, "20", "'20' is not a time; allowed: one with a unit, such as 20ms or 2s"),
        (duration_s, "-2s", "'-2s' is negative; allowed: a positive number"),
        (values, "8k..4k", "'8k..4k' is not a range"),
        (values, "0..4k", "'0..4k' is not a range"),
        (values, "4k..8k:0", "asks for 0 values"),
        (values, "4k..8k:99999", "asks for 99999 values"),
        (values, "", "is not a number of tokens"),
    ],
)
def test_what_is_no_quantity_is_refused(parse: Callable[[Any], Any], text: Any, words: str) -> None:
    with pytest.raises(PlanError) as refusal:
        parse(text)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0.0123, "0.0123 ms"), (4.154, "4.15 ms"), (999.4, "999 ms"), (9123.4, "9.12 s"), (13_250, "13.2 s"),
        (999_400, "999 s"), (999_600, "16.7 min"), (5_996_000, "99.9 min"), (5_998_000, "1.67 h"),
        (11_471_000, "3.19 h"), (1e11, "27,778 h"),
    ],
)  # fmt: skip
def test_times_have_the_unit_of_their_size(milliseconds: float, text: str) -> None:
    assert time_text(milliseconds) == text


@pytest.mark.parametrize(("number", "text"), [(28.71e9, "28.7 GB"), (80 * 2**30, "85.9 GB"), (1.5e15, "1,500,000 GB")])
def test_sizes_are_decimal(number: float, text: str) -> None:
    assert size_text(number) == text
