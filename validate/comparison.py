"""Predicted against measured, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_UNITS = {"ms": (1.0, "{:.2f} ms"), "bytes": (1 / 2**20, "{:.0f} MiB"), "": (1.0, "{:.3f}"), "x": (1.0, "{:.2f}x")}


@dataclass(frozen=True)
class ComparisonRow:
    """One figure. `unit` is "ms", "bytes", "x" or "" for a plain number; `measured` is None where it was not."""

    name: str
    unit: str
    predicted: float
    measured: float | None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction: positive where it was too high."""
        return self.predicted / self.measured - 1 if self.measured else None

    def texts(self) -> tuple[str, str, str, str]:
        """Name, predicted, measured and error as people read them."""
        scale, form = _UNITS[self.unit]
        measured = "not measured" if self.measured is None else form.format(scale * self.measured)
        error = "" if self.error is None else f"{self.error:+.0%}"
        return self.name, form.format(scale * self.predicted), measured, error


@dataclass(frozen=True)
class Comparison:
    """A plan's prediction beside what its engine did, for the workload that it really had."""

    preset: str
    context: int
    new_tokens: int
    batch: int
    source: str  # of the prediction, as the planner names it
    rows: tuple[ComparisonRow, ...]

    def row(self, name: str) -> ComparisonRow:
        """The row of this name. Raises KeyError for a name that is not there."""
        return {row.name: row for row in self.rows}[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        rows = [
            {"name": row.name, "unit": row.unit, "predicted": row.predicted, "measured": row.measured,
             "error": row.error}
            for row in self.rows
        ]  # fmt: skip
        workload = {"context": self.context, "new_tokens": self.new_tokens, "batch": self.batch}
        return {"preset": self.preset, **workload, "source": self.source, "rows": rows}

    def __str__(self) -> str:
        """A plain table."""
        title = f"{self.preset}, context {self.context}, {self.new_tokens} new tokens, batch {self.batch}"
        lines = [("", "predicted", "measured", "error"), *(row.texts() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
        ]
        return "\n".join([title, *table])
