"""Published cells beside their predictions: errors, flags, a summary of each table, and targets."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ridgeplan.validate.papers.case import Case, fits
from ridgeplan.validate.papers.metrics import METRICS, Bound, Metric
from ridgeplan.validate.papers.rows import (
    NOT_PRINTED,
    OUT_OF_MEMORY,
    PAPERS,
    PublishedError,
    PublishedRow,
    PublishedTable,
    load_tables,
)

ROUNDING = 0.005  # cells are printed with three digits


@dataclass(frozen=True)
class Cell:
    """One cell: `published` is a number, "OOM" or "-"; `predicted` is None where `flag` says why it cannot be.

    beyond_ms: for times and rates, how much longer a token of a sequence takes as published than by bytes, FLOPs and
    what `engine` is known to add; negative where it is faster.
    """

    case: str
    method: str
    metric: str
    published: float | str
    predicted: float | str | None
    flag: str = ""
    engine: str = ""
    beyond_ms: float | None = None

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


def _cells(row: PublishedRow) -> Iterator[Cell]:
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
        yield Cell(row.case, row.method, name, value, predicted, flag, row.engine, _beyond_ms(metric, case, value))


def _beyond_ms(metric: Metric, case: Case, published: float | str) -> float | None:
    if metric.step_s is None or isinstance(published, str):
        return None
    return 1e3 * (metric.step_s(case, published) - float(case.tpot_s))


def _extreme(row: PublishedRow, name: str, others: Iterable[Cell]) -> Cell:
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
        below = value < limit * (1 - ROUNDING) and metric.bound is Bound.LOWER
        above = value > limit * (1 + ROUNDING) and metric.bound is Bound.UPPER
        if below or above:
            problems.append(f"exceeds what bytes allow: at {metric.bound.value} {limit:.4g}")
    if metric.whole_model and not fits(case):
        problems.append("predicted to need more than 90% of the memory")
    return "; ".join(problems)


@dataclass(frozen=True)
class Target:
    """One target of a table, and whether `result` meets it."""

    paper: str
    table: str
    text: str
    count: Callable[[TableResult], tuple[int, int]]  # met, of all
    required: int

    def result(self, result: TableResult) -> dict[str, Any]:
        """The target, how many of its cells reach it, how many must, and whether they do."""
        reached, total = self.count(result)
        return {
            "target": self.text,
            "reached": reached,
            "of": total,
            "required": self.required,
            "met": reached >= self.required,
        }

    def describe(self, result: TableResult) -> str:
        """`result` as one line."""
        counts = self.result(result)
        met = "met" if counts["met"] else "not met"
        return f"target: {self.text}: {counts['reached']} of {counts['of']}, {met}"


def targets_of(result: TableResult) -> tuple[Target, ...]:
    """The targets of one table."""
    return tuple(target for target in TARGETS if (target.paper, target.table) == (result.paper, result.name))


def within(share: float, metrics: tuple[str, ...], method: str = "") -> Callable[[TableResult], tuple[int, int]]:
    """Counts the cells of these metrics, and of one method if given, whose absolute error is at most `share`."""

    def count(result: TableResult) -> tuple[int, int]:
        errors = [
            cell.error
            for cell in result.cells
            if cell.error is not None and cell.metric in metrics and method in ("", cell.method)
        ]
        return sum(abs(error) <= share for error in errors), len(errors)

    return count


def memory_right(result: TableResult) -> tuple[int, int]:
    """Counts the out-of-memory cells that are predicted as such."""
    known = [cell.memory_right for cell in result.cells if cell.memory_right is not None]
    return sum(known), len(known)


def order_right(result: TableResult) -> tuple[int, int]:
    """Counts the cases whose methods are in the published order, out of memory being slowest."""
    cases: dict[str, list[Cell]] = defaultdict(list)
    for cell in result.cells:
        if cell.metric == "request_tokens_per_s" and cell.predicted is not None:
            cases[cell.case].append(cell)
    return sum(ranking(cells, "published") == ranking(cells, "predicted") for cells in cases.values()), len(cases)


def above(result: TableResult) -> tuple[int, int]:
    """Counts the cells whose prediction is above the published lower bound."""
    errors = [cell.error for cell in result.cells if cell.error is not None]
    return sum(error > 0 for error in errors), len(errors)


def ranking(cells: list[Cell], side: str) -> list[str]:
    """Methods from slowest to fastest by one side's figures."""

    def speed(cell: Cell) -> float:
        value = getattr(cell, side)
        return -1.0 if isinstance(value, str) else float(value)

    return [cell.method for cell in sorted(cells, key=speed)]


TARGETS = (
    Target("quantspec", "Table 3", "QuantSpec's speed-up within 15% in at least 6",
           within(0.15, ("speedup",), "QuantSpec"), 6),
    Target("quantspec", "Table 3", "both out-of-memory cells right", memory_right, 2),
    Target("quantspec", "Table 4", "attention within 12%", within(0.12, ("attention_ms", "draft_attention_ms")), 6),
    Target("specontext", "Table 3", "order of engines right in every row", order_right, 8),
    Target("specontext", "Table 3", "out-of-memory cells right", memory_right, 4),
    Target("specontext", "Cliff", "losses above 80%", above, 2),
    Target("dapq", "Table 7", "out-of-memory cells right", memory_right, 4),
)  # fmt: skip
