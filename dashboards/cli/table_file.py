"""Answers as files: a table as CSV, Markdown or JSON, or its figure as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridgeplan.dashboards.files import json_text, write_atomically
from ridgeplan.dashboards.rows import csv_text
from ridgeplan.planner.render.tables import Table, cell_text

PNG_HEIGHT = 480  # pixels


def write_table(path: Path | None, result: Table, document: Any) -> None:
    """Writes an answer in the format of the path's suffix, where a path is given.

    document: the whole answer as JSON values, for .json. Raises FileProblem, and FigureError where PNG needs a package.
    """
    if path is None:
        return
    if path.suffix == ".png":
        from ridgeplan.dashboards.figures.paper_figure import write_pngs  # imports plotly

        write_pngs({path: result.plot().update_layout(height=PNG_HEIGHT)})
        return
    rows = result.table()
    texts = {".json": lambda: json_text(document), ".csv": lambda: csv_text(rows), ".md": lambda: _markdown(rows)}
    write_atomically(path, texts[path.suffix]())


def _markdown(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    body = [[cell_text(row.get(name)).replace("|", "\\|") for name in columns] for row in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (columns, ["---"] * len(columns), *body))
