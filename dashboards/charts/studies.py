"""Plotly figures of studies. Pure functions: JSON values in, figure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

Rows = Sequence[Mapping[str, Any]]  # of `validate.studies.dapq.summary`


def similarities(rows: Rows) -> go.Figure:
    """Bars of Table 1: content x position, after and before RoPE."""
    figure = go.Figure()
    for when in ("after", "before"):
        own = [row for row in _of(rows, "similarity") if row["figure"][3] == when]
        names = [f"{row['figure'][1]} content, {row['figure'][2]} position" for row in own]
        figure.add_bar(x=names, y=_means(own), error_y={"array": _deviations(own)}, name=f"{when} RoPE")
    return _titled(figure, "Cosine similarity of queries to the true ones", "")


def offsets(rows: Rows) -> go.Figure:
    """The curve of Figure 2b."""
    own = _of(rows, "offset")
    figure = go.Figure(go.Scatter(x=[row["figure"][1] for row in own], y=_means(own),
                                  error_y={"array": _deviations(own)}, mode="lines+markers"))  # fmt: skip
    figure.update_xaxes(type="log")
    return _titled(figure, "Similarity of the true tokens' queries at earlier positions", "positions too early")


def recalls(rows: Rows) -> go.Figure:
    """Figure 3, a panel for each budget."""
    own = _of(rows, "recall")
    budgets = sorted({row["figure"][3] for row in own})
    figure = make_subplots(cols=len(budgets), shared_yaxes=True, subplot_titles=[f"budget {one}" for one in budgets])
    for column, budget in enumerate(budgets, start=1):
        _lines(figure, [row for row in own if row["figure"][3] == budget], {"row": 1, "col": column})
    return _titled(figure, "Recall of the prompt tokens that the continuation reads most", "window")


def attentions(rows: Rows) -> go.Figure:
    """The figures of Table 8."""
    figure = go.Figure()
    _lines(figure, _of(rows, "attention"), {})
    return _titled(figure, "Cosine similarity of attention to the continuation's", "window")


def _lines(figure: go.Figure, rows: Rows, place: Mapping[str, int]) -> None:
    """A line for each method, over windows."""
    for method in dict.fromkeys(row["figure"][1] for row in rows):
        own = [row for row in rows if row["figure"][1] == method]
        line = go.Scatter(x=[row["figure"][2] for row in own], y=_means(own), name=method, mode="lines+markers",
                          legendgroup=method, showlegend=place.get("col", 1) == 1)  # fmt: skip
        figure.add_trace(line, **place)


def _of(rows: Rows, kind: str) -> Rows:
    return [row for row in rows if row["figure"][0] == kind]


def _means(rows: Rows) -> list[float]:
    return [row["mean"] for row in rows]


def _deviations(rows: Rows) -> list[float]:
    return [row["deviation"] for row in rows]


def _titled(figure: go.Figure, title: str, horizontal: str) -> go.Figure:
    return figure.update_layout(template="plotly_white", title=title, xaxis_title=horizontal, height=460)
