"""Flat rows of plain values: groups of them, and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

Row = Mapping[str, Any]
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a cell that begins with one is a formula to spreadsheets


def grouped(rows: Iterable[Row], *names: str) -> dict[Any, list[Row]]:
    """The rows of each value of a column, of each tuple of values for several columns, in the order of the rows."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(itemgetter(*names)(row), []).append(row)
    return groups


def csv_text(rows: Sequence[Row]) -> str:
    """Rows as CSV with a header; a value that a row lacks is empty.

    A text that a spreadsheet would run as a formula gets an apostrophe before it: names from files could hold one.
    """
    text = io.StringIO()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value
