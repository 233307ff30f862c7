"""A published table as a figure: every printed value beside the model's prediction for the same row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go

from ridgeplan.dashboards.charts.style import titled, token_axis
from ridgeplan.dashboards.figures.paper_figure import Row, colors_of
from ridgeplan.dashboards.rows import grouped
from ridgeplan.validate.papers import rows as published
from ridgeplan.validate.papers.case import Case, fits
from ridgeplan.validate.papers.metrics import METRICS

ROW_HEIGHT = 30  # pixels of a line of `dumbbells`


def table_rows(paper: str, table: str, metric: str, *, case: str = "", **changes: Any) -> list[Row]:
    """The rows of a table that have a metric, printed and predicted, both with "OOM" where memory does not suffice.

    case: how the rows' cases start. changes: replace fields of the rows that have them, such as the GPU. A
    printed value does not apply to a changed row and is left out.
    """
    rows = (row for row in table_of(paper, table).rows if row.model and row.case.startswith(case))
    return [_row(row, metric, changes) for row in rows if metric in row.cells]


def table_of(paper: str, name: str) -> published.PublishedTable:
    """A paper's table by its name."""
    (table,) = (table for table in published.load_tables(paper) if table.name == name)
    return table


def extra_row(method: str, **fields: Any) -> published.PublishedRow:
    """A row of no table, for what a paper's figure shows and its tables do not."""
    return published.PublishedRow(
        case="no table", method=method, cells={"tokens_per_s": published.NOT_PRINTED}, **fields
    )


def _row(row: published.PublishedRow, metric: str, changes: dict[str, Any]) -> Row:
    applied = {name: value for name, value in changes.items() if getattr(row, name)}
    changed = replace(row, **applied)
    printed = row.cells[metric] if changed == row else published.NOT_PRINTED
    columns = ("model", "gpu", "gpus", "context", "batch", "gamma", "budget")
    return {
        "case": row.case, "method": row.method, **{name: getattr(changed, name) for name in columns}, "metric": metric,
        "published": None if printed == published.NOT_PRINTED else printed,
        "predicted": _predicted(changed, metric, printed),
    }  # fmt: skip


def _predicted(row: published.PublishedRow, metric: str, printed: float | str) -> float | str | None:
    """The prediction; a size that the paper ran is predicted even if by our count it needs too much memory."""
    if row.unpredictable:
        return None
    case = Case.of(row)
    if isinstance(printed, str) and METRICS[metric].whole_model and not fits(case):
        return published.OUT_OF_MEMORY
    return METRICS[metric].of(case)


def number(value: float | str | None) -> float | None:
    """A cell as a figure shows it: a number, or nothing."""
    return None if isinstance(value, str) else value


def _absent(row: Row) -> str:
    """Why a row has neither value: `OOM; predicted: OOM`, which a narrow screen has room for."""
    printed = "not printed" if row["published"] is None else "OOM"
    return f"{printed}; {'not predicted' if row['predicted'] is None else 'predicted: OOM'}"


def dumbbells(rows: Sequence[Row], title: str, x: str, **x_axis: Any) -> go.Figure:
    """A line for each row: a ring for the published value, a dot for the prediction, joined; or why it has neither.

    The title may name columns of the first row, such as {gpu}. x_axis: settings of plotly's axis.
    """
    names = [f"{row['case']},<br>{row['method']}" for row in rows]  # in two lines, for narrow screens
    figure = go.Figure()
    for name, row in zip(names, rows, strict=True):
        ends = [number(row[side]) for side in ("published", "predicted")]
        if None not in ends:
            figure.add_scatter(x=ends, y=[name, name], mode="lines", line={"color": "#bbb"}, hoverinfo="skip",
                               showlegend=False)  # fmt: skip
        elif ends == [None, None]:
            figure.add_annotation(x=0, xref="paper", xanchor="left", y=name, text=_absent(row), showarrow=False)
    colors = colors_of(row["method"] for row in rows)
    for side, symbol in (("published", "circle-open"), ("predicted", "circle")):
        figure.add_scatter(
            name=side, x=[number(row[side]) for row in rows], y=names, mode="markers",
            marker={"symbol": symbol, "size": 10, "color": [colors[row["method"]] for row in rows]},
            hovertemplate=f"%{{y}}<br>{side} %{{x:.3g}}<extra></extra>",
        )  # fmt: skip
    for method, color in colors.items() if len(colors) > 1 else ():
        figure.add_scatter(name=method, x=[None], y=[None], mode="markers", marker={"symbol": "square", "color": color})
    figure.update_yaxes(autorange="reversed", automargin=True, tickfont_size=10)
    figure.update_xaxes(**x_axis)
    return titled(figure, title.format(**rows[0]), x, height=160 + ROW_HEIGHT * len(rows))


def lines(rows: Sequence[Row], over: str, title: str, x: str, y: str, **y_axis: Any) -> go.Figure:
    """A line of predictions for each method over a column of the rows, with rings at published values.

    The title may name columns of the first row, such as {gpu}. y_axis: settings of plotly's axis. A context has
    a logarithmic axis.
    """
    figure = go.Figure()
    colors = colors_of(row["method"] for row in rows)
    for method, method_rows in grouped(rows, "method").items():
        color, places = colors[method], [row[over] for row in method_rows]
        figure.add_scatter(name=method, x=places, y=[number(row["predicted"]) for row in method_rows],
                           mode="lines+markers", marker={"size": 4}, line_color=color, legendgroup=method)  # fmt: skip
        printed = [number(row["published"]) for row in method_rows]
        if any(value is not None for value in printed):
            figure.add_scatter(
                name=f"{method}, published", x=places, y=printed, mode="markers", legendgroup=method, showlegend=False,
                marker={"symbol": "circle-open", "size": 10, "color": color},
            )  # fmt: skip
    figure.update_yaxes(**y_axis)
    if over == "context":
        token_axis(figure, [row["context"] for row in rows])
    return titled(figure, f"{title.format(**rows[0])}<br><sup>lines: predicted; rings: published</sup>", x, y)
