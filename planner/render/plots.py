"""Plotly figures of the rows of an answer. A pure function: values in, figure out."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from ridgeplan.planner.render.tables import Bars, Lines, labels

Rows = Sequence[Mapping[str, Any]]
COLOR, BAND_COLOR = "#0072b2", "#444444"
BAR_HEIGHT = 26  # pixels
TITLE_COLUMNS = 110  # characters of a title's line, which plotly does not wrap


def draw(rows: Rows, chart: Bars | Lines, names: Sequence[str], title: str) -> go.Figure:
    """Bars or lines of the rows; `names` are the columns that identify a row."""
    figure = _bars(rows, chart, names) if isinstance(chart, Bars) else _lines(rows, chart)
    lines = "<br>".join(textwrap.wrap(title, TITLE_COLUMNS, break_long_words=False))
    return figure.update_layout(template="plotly_white", title=lines, title_font_size=14)


def _bars(rows: Rows, chart: Bars, names: Sequence[str]) -> go.Figure:
    """A horizontal bar for each row, the first at the top."""
    lengths = [row[chart.length] for row in rows]
    band = None
    if chart.low:
        band = {
            "type": "data", "symmetric": False, "color": BAND_COLOR, "thickness": 1,
            "array": [row[chart.high] - length for row, length in zip(rows, lengths, strict=True)],
            "arrayminus": [length - row[chart.low] for row, length in zip(rows, lengths, strict=True)],
        }  # fmt: skip
    figure = go.Figure(go.Bar(x=lengths, y=labels(rows, names), orientation="h", marker_color=COLOR, error_x=band))
    figure.update_xaxes(title_text=chart.unit)
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure.update_layout(height=160 + BAR_HEIGHT * len(rows))


def _lines(rows: Rows, chart: Lines) -> go.Figure:
    """A line for each combination of the columns that vary, apart from the horizontal axis."""
    varying = [name for name in chart.over if len({row[name] for row in rows}) > 1] or list(chart.over[:1])
    across, others = varying[0], [*varying[1:], *chart.by]
    row_labels = labels(rows, others) if others else [""] * len(rows)
    figure = go.Figure()
    for name in dict.fromkeys(row_labels):
        points = sorted(
            (row for row, label in zip(rows, row_labels, strict=True) if label == name), key=lambda row: row[across]
        )
        figure.add_scatter(name=name, x=[row[across] for row in points], y=[row[chart.height] for row in points],
                           mode="lines+markers")  # fmt: skip
    figure.update_xaxes(type="log", title_text=across)
    figure.update_yaxes(title_text=chart.unit)
    return figure.update_layout(showlegend=len(figure.data) > 1, legend_title_text=", ".join(others))
