"""Grids of test cases that stay strong when they are thinned."""

from collections.abc import Sequence
from typing import Any

import pytest


def pairs(rows: Sequence[Any], columns: Sequence[Any], always: int = 1) -> list[Any]:
    """Every row with the first `always` columns and with one other column in turn; the rest of the grid is slow.

    A row or a column may be a tuple, whose values become parameters of their own.
    """
    cases, others = [], len(columns) - always
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            values = [value for part in (row, column) for value in (part if isinstance(part, tuple) else (part,))]
            fast = j < always or j - always == i % others
            cases.append(pytest.param(*values, marks=[] if fast else [pytest.mark.slow]))
    return cases
