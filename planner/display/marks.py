"""What a figure of rows shows, and how values and rows are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bars:
    """A figure with a bar for each row: its length, and the columns of the ends of its band, if it has one."""

    length: str
    unit: str
    low: str = ""
    high: str = ""


@dataclass(frozen=True)
class Lines:
    """A figure of one column over another, with a line for each combination of the other named columns."""

    over: tuple[str, ...]  # the first of them that varies
    height: str
    unit: str
    by: tuple[str, ...] = ()


def cell_text(value: Any) -> str:
    """A value as a table shows it; floats with four digits."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return "" if value is None else str(value)


def labels(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """A text for each row: the values of those of `names` that are not the same in all rows, or else of the last."""
    varying = [name for name in names if len({row.get(name) for row in rows}) > 1] or list(names[-1:])
    return [", ".join(cell_text(row.get(name)) for name in varying) for row in rows]
