"""Answers as files: a table as CSV, Markdown or JSON, or its figure as PNG."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeplan.dashboards.files import FileProblem, json_text, write_atomically
from ridgeplan.dashboards.rows import csv_text
from ridgeplan.planner.render.tables import Bars, Lines, Table, cell_text

if TYPE_CHECKING:
    import plotly.graph_objects as go

PNG_HEIGHT = 480  # pixels, at least


@dataclass(frozen=True, repr=False)
class RowTable(Table):
    """Rows that no class of answers holds. drawn: how they are drawn, None for words that no figure shows."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    drawn: Bars | Lines | None
    row_names: tuple[str, ...] = ()

    def table(self) -> list[dict[str, Any]]:
        """The rows."""
        return [dict(row) for row in self.rows]

    def summary(self) -> str:
        """The title."""
        return self.title

    def plot(self) -> go.Figure:
        """A plotly figure of the rows. Raises FileProblem for rows of words."""
        if self.drawn is None:
            raise FileProblem(f"{self.title} have no figures to draw; allowed: .csv, .md, .json")
        from ridgeplan.planner.render.plots import draw

        return draw(self.rows, self.drawn, self.row_names, self.title)


def write_table(path: Path | None, result: Table, document: Any) -> None:
    """Writes an answer in the format of the path's suffix, where a path is given.

    document: the whole answer as JSON values, for .json. Raises FileProblem, and FigureError where PNG needs a package.
    """
    if path is None:
        return
    if path.suffix == ".png":
        from ridgeplan.dashboards.figures.paper_figure import write_pngs  # imports plotly

        figure = result.plot()
        write_pngs({path: figure.update_layout(height=max(figure.layout.height or 0, PNG_HEIGHT))})
        return
    texts = {
        ".json": lambda: json_text(document), ".csv": lambda: csv_text(result.table()),
        ".md": lambda: _markdown(result.table()),
    }  # fmt: skip
    write_atomically(path, texts[path.suffix]())


def write_plan(path: Path | None, result: Table, plan_text: Callable[[], str]) -> None:
    """Writes the text of a plan file where the path's suffix is .json, else the table of its answer."""
    if path is not None and path.suffix == ".json":
        write_atomically(path, plan_text())
    else:
        write_table(path, result, None)


def _markdown(rows: list[dict[str, Any]]) -> str:
    """Rows as a table; names from files show as they are and make no column, link or HTML."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    body = [[re.sub(r"([\\|<\[])", r"\\\1", cell_text(row.get(name))) for name in columns] for row in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (columns, ["---"] * len(columns), *body))
