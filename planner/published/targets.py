"""What the predictions of published tables must reach."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ridgeplan.planner.published.comparison import Cell, TableResult


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

    def told(self, result: TableResult) -> str:
        """`result` as one line."""
        found = self.result(result)
        return f"target: {self.text}: {found['reached']} of {found['of']}, {'met' if found['met'] else 'not met'}"


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
