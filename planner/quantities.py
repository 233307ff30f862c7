"""Quantities as people write and read them: 128k tokens, 24GB, 20ms, 4k..1M.

The one place that parses them, for the command line, the page and Python; and that prints them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from itertools import takewhile

from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.plan.plan import MAX_TOKENS, require

# Context lengths are named in binary: a "128k" model takes 131,072 tokens. Vendors name memory in decimal.
TOKEN_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
BYTE_UNITS = {"b": 1} | {
    f"{letter}{suffix}": base**power
    for suffix, base in (("b", 1000), ("ib", 1024))
    for power, letter in enumerate("kmgt", start=1)
}
SECOND_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
MIN_BARE_BYTES = 1_000_000  # a smaller number without a unit was meant in another unit
MAX_VALUES = 4096
GB = 1e9


def tokens(value: int | str) -> int:
    """A number of tokens: 131072, "131072", "128k" (the same, as models name it) or "1M" (2^20). Raises PlanError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number, unit = _split(value)
    scaled = number * TOKEN_UNITS[unit] if number is not None and unit in TOKEN_UNITS else None
    is_whole = scaled is not None and scaled == int(scaled)
    require(is_whole, f"{brief(value)} is not a number of tokens; allowed: one such as 8192, 128k (131072) or 1M")
    return int(scaled or 0)


def count(value: int | str) -> int:
    """A whole number: 64 or "64". Raises PlanError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number, unit = _split(value)
    require(number is not None and not unit and number == int(number), f"{brief(value)} is not a whole number")
    return int(number or 0)


def size_bytes(value: float | str) -> float:
    """A size: "24GB" (24e9), "24GiB" (24 x 2^30) or a number of bytes. Raises PlanError.

    A small number without a unit, such as 24, is refused: it could be GB or GiB, and was never meant as bytes.
    """
    number, unit = _split(value)
    allowed = "allowed: one with a unit, such as 24GB or 24GiB"
    require(number is not None and (not unit or unit in BYTE_UNITS), f"{brief(value)} is not a size; {allowed}")
    size = float(number or 0) * BYTE_UNITS.get(unit, 1)
    require(0 < size < math.inf, f"{brief(value)} is not a size above 0; {allowed}")
    require(bool(unit) or size >= MIN_BARE_BYTES, f"{brief(value)} is a size without a unit; {allowed}")
    return size


def duration_s(value: str) -> float:
    """A time in seconds: "20ms", "2s" or "0.5s". Raises PlanError, also without a unit."""
    number, unit = _split(value)
    seconds = float(number or 0) * SECOND_UNITS.get(unit, 0)
    require(0 < seconds < math.inf, f"{brief(value)} is not a time; allowed: one with a unit, such as 20ms or 2s")
    return seconds


def values(text: str, parse: Callable[[str], int] = tokens) -> tuple[int, ...]:
    """Several numbers: "8k", "4k,32k", "4k 32k", "4k..1M" (doubling), or "4k..1M:64" (64, evenly spaced in their logs).

    Each once and ascending. Raises PlanError.
    """
    pieces = re.split(r",|(?<=\w)\s+(?=\d)", text)
    numbers = sorted({number for piece in pieces for number in _range(piece, parse)})
    require(0 < len(numbers) <= MAX_VALUES, f"{brief(text)} holds {len(numbers)} values; allowed: 1 to {MAX_VALUES}")
    return tuple(numbers)


def _range(text: str, parse: Callable[[str], int]) -> Iterable[int]:
    low, dots, rest = text.partition("..")
    if not dots:
        return (parse(text),)
    high, colon, number = rest.partition(":")
    first, last = parse(low), parse(high)
    require(
        1 <= first <= last <= MAX_TOKENS, f"{brief(text)} is not a range; allowed: from a smaller number, 1 or more"
    )
    if not colon:
        return (*takewhile(lambda value: value < last, (first << power for power in range(64))), last)
    points = count(number)
    require(1 <= points <= MAX_VALUES, f"{brief(text)} asks for {points} values; allowed: 1 to {MAX_VALUES}")
    ratio = math.log(last / first) / max(points - 1, 1)
    return (round(first * math.exp(ratio * index)) for index in range(points))


def _split(value: object) -> tuple[Decimal | None, str]:
    """Number and unit of a text such as `1.5 GiB`, in lower case; no number where it is none.

    Raises PlanError for a negative one.
    """
    text = str(value).strip().replace("_", "").replace(",", "").lower()
    require(not re.match(r"-\s*\d", text), f"{brief(value)} is negative; allowed: a positive number")
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{0,9})?(?:e\+?\d{1,2})?)\s*([a-z]*)", text, re.ASCII)
    return (Decimal(match[1]), match[2]) if match else (None, "")


def tokens_text(number: int) -> str:
    """`128k` and `1M` where that is exact, else all digits; also of 128000, which nobody calls 125k."""
    for unit in ("m", "k"):
        if number >= TOKEN_UNITS[unit] and number % TOKEN_UNITS[unit] == 0 and number % 1000:
            return f"{number // TOKEN_UNITS[unit]}{'M' if unit == 'm' else unit}"
    return str(number)


def time_text(milliseconds: float) -> str:
    """Three digits of milliseconds below 1 s, of seconds below 1000 s, of minutes below 100 minutes, else of hours."""
    limits = ((999.5, 1.0, "ms"), (999_500.0, 1e3, "s"), (5_997_000.0, 6e4, "min"))
    size_ms, unit = next(((size, unit) for limit, size, unit in limits if milliseconds < limit), (3.6e6, "h"))
    return f"{three_digits(milliseconds / size_ms)} {unit}"


def size_text(number: float) -> str:
    """GB of 10^9 bytes, as vendors count."""
    return f"{three_digits(number / GB)} GB"


def parameters_text(number: int) -> str:
    """Billions of parameters, such as `8.03B`."""
    return f"{three_digits(number / 1e9)}B"


def probability_text(share: float) -> str:
    """A sampled probability in percent, which is never certain."""
    return "over 99%" if share > 0.99 else f"{100 * share:.0f}%"


def three_digits(number: float) -> str:
    """Never in scientific notation."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:,.0f}"
