"""Published cells beside their predictions: errors, flags, and a summary of each table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ridgeplan.planner.published.case import Case
from ridgeplan.planner.published.memory import fits
from ridgeplan.planner.published.metrics import METRICS, Bound, Metric
from ridgeplan.planner.published.rows import (
    NOT_PRINTED,
    OUT_OF_MEMORY,
    PAPERS,
    PublishedError,
    PublishedTable,
    Row,
    load_tables,
)

ROUNDING = 0.005  # cells are printed with three digits


@dataclass(frozen=True)
class Cell:
    """One cell: `published` is a number, "OOM" or "-"; `predicted` is None where `flag` says why it cannot be."""

    case: str
    method: str
    metric: str
    published: float | str
    predicted: float | str | None
    flag: str = ""

    @property
    def error(self) -> float | None:
        """Predicted over published, minus 1; None unless both are numbers."""
        if isinstance(self.published, str) or isinstance(self.predicted, str) or self.predicted is None:
            return None
        return self.predicted / self.published - 1

    @property
    def memory_right(self) -> bool | None:
        """Whether an out-of-memory cell is predicted to be one; None where neither side says so."""
        if OUT_OF_MEMORY not in (self.published, self.predicted) or self.published == NOT_PRINTED:
            return None
        return self.published == self.predicted

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True)
class TableResult:
    """A published table with predictions."""

    paper: str
    name: str
    title: str
    cells: tuple[Cell, ...]

    @cached_property
    def errors(self) -> tuple[float, ...]:
        """Signed errors of all cells that are numbers on both sides."""
        return tuple(cell.error for cell in self.cells if cell.error is not None)

    @property
    def median_error(self) -> float | None:
        """Median absolute error."""
        return statistics.median(map(abs, self.errors)) if self.errors else None

    @property
    def unpredicted(self) -> tuple[Cell, ...]:
        """Printed cells that the model cannot predict."""
        return tuple(cell for cell in self.cells if cell.predicted is None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with a summary."""
        return {
            "paper": self.paper,
            "name": self.name,
            "title": self.title,
            "predicted": len(self.cells) - len(self.unpredicted),
            "unpredicted": len(self.unpredicted),
            "median_error": self.median_error,
            "cells": [cell.to_dict() for cell in self.cells],
        }


def compare_all(papers: Iterable[str] = PAPERS) -> tuple[TableResult, ...]:
    """Every table of the papers. Raises PublishedError for an unknown paper."""
    return tuple(compare(table) for paper in papers for table in load_tables(paper))


def compare(table: PublishedTable) -> TableResult:
    """One table's cells; cells that are extremes of others come after all others were predicted."""
    rows = sorted(table.rows, key=lambda row: bool(row.over))
    cells: list[Cell] = []
    for row in rows:
        cells += [_extreme(row, name, cells) for name in row.cells] if row.over else _cells(row)
    return TableResult(table.paper, table.name, table.title, tuple(cells))


def _cells(row: Row) -> Iterator[Cell]:
    if row.unpredictable:
        for name, value in row.cells.items():
            yield Cell(row.case, row.method, name, value, None, row.unpredictable)
        return
    case = Case.of(row)
    ran_out = OUT_OF_MEMORY in row.cells.values() and not fits(case)
    for name, value in row.cells.items():
        metric = _metric(name)
        predicted = OUT_OF_MEMORY if ran_out else metric.of(case)
        flag = "; ".join(filter(None, (_impossible(metric, case, value), row.note)))
        yield Cell(row.case, row.method, name, value, predicted, flag)


def _extreme(row: Row, name: str, others: Iterable[Cell]) -> Cell:
    known = [cell.predicted for cell in others if cell.metric == name and isinstance(cell.predicted, float)]
    predicted = {"max": max, "min": min}[row.over](known)
    return Cell(row.case, row.method, name, row.cells[name], predicted, row.note)


def _metric(name: str) -> Metric:
    if name not in METRICS:
        raise PublishedError(f"unknown metric {name!r}; allowed: {', '.join(METRICS)}")
    return METRICS[name]


def _impossible(metric: Metric, case: Case, value: float | str) -> str:
    """Why bytes do not allow a published number, or that it needs more memory than usable; else ""."""
    if isinstance(value, str):
        return ""
    problems = []
    if metric.bound is not Bound.NONE:
        limit = metric.bytes_limit(case)
        below = value < limit * (1 - ROUNDING) and metric.bound is Bound.LEAST
        above = value > limit * (1 + ROUNDING) and metric.bound is Bound.MOST
        if below or above:
            problems.append(f"exceeds what bytes allow: at {metric.bound.value} {limit:.4g}")
    if metric.whole_model and not fits(case):
        problems.append("predicted to need more than 90% of the memory")
    return "; ".join(problems)
