"""Plotly figures of a suite's results. Pure functions: JSON values in, figure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from ridgeplan.dashboards.charts.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED

Row = Mapping[str, Any]
SECTION_COLORS = {"kernels": BLUE, "steps": ORANGE, "generations": GREEN, "regret": PURPLE}
WITHIN = 0.1  # the band around a perfect prediction


def scatter(rows: Sequence[Row], unit: str) -> go.Figure:
    """Predicted over measured of all rows of one unit, by kind, with a band of 10% around equality (log-log)."""
    figure = go.Figure()
    ends = _ends(rows)
    for factor, dash in ((1 - WITHIN, "dot"), (1.0, "solid"), (1 + WITHIN, "dot")):
        figure.add_scatter(
            x=ends, y=[factor * end for end in ends], mode="lines", hoverinfo="skip", showlegend=False,
            line={"color": GREY, "dash": dash, "width": 1},
        )  # fmt: skip
    for kind in dict.fromkeys(row["kind"] for row in rows):
        alike = [row for row in rows if row["kind"] == kind]
        figure.add_scatter(
            name=kind, x=[row["measured"] for row in alike], y=[row["predicted"] for row in alike], mode="markers",
            marker={"size": 7, "opacity": 0.7}, text=[hover(row) for row in alike],
            hovertemplate="%{text}<br>measured %{x:.4g}, predicted %{y:.4g}",
        )  # fmt: skip
    label = f", {unit}" if unit else ""
    figure.update_xaxes(type="log", title_text=f"measured{label}")
    figure.update_yaxes(type="log", title_text=f"predicted{label}")
    return figure.update_layout(template="plotly_white", height=520)


def errors(rows: Sequence[Row]) -> go.Figure:
    """Signed errors in percent, a box with all points for each kind."""
    figure = go.Figure()
    for kind in dict.fromkeys(row["kind"] for row in rows):
        alike = [row for row in rows if row["kind"] == kind]
        figure.add_box(
            name=kind, x=[100 * row["relative_error"] for row in alike], boxpoints="all", jitter=0.4, pointpos=0,
            marker={"size": 4, "color": SECTION_COLORS[alike[0]["section"]]}, text=[hover(row) for row in alike],
            hovertemplate="%{text}<br>%{x:+.1f}%",
        )  # fmt: skip
    figure.add_vline(0, line_color=RED, line_width=1)
    figure.update_xaxes(title_text="predicted over measured minus 1, %")
    figure.update_yaxes(autorange="reversed", automargin=True)
    kinds = len({row["kind"] for row in rows})
    return figure.update_layout(template="plotly_white", height=160 + 34 * kinds, showlegend=False)


def regrets(rows: Sequence[Row]) -> go.Figure:
    """Regret in percent of every workload."""
    figure = go.Figure()
    figure.add_bar(
        x=[100 * row["regret"] for row in rows], y=[f"{row['model']} {row['context']}x{row['batch']}" for row in rows],
        orientation="h", marker_color=PURPLE, text=[f"{row['recommended']}; best: {row['best']}" for row in rows],
        textposition="none", hovertemplate="%{y}: %{x:.1f}%<br>%{text}",
    )  # fmt: skip
    figure.update_xaxes(title_text="time per token of the recommended plan over the best candidate's minus 1, %")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure.update_layout(template="plotly_white", height=140 + 24 * len(rows))


def hover(row: Row) -> str:
    """What a point is."""
    return " ".join(filter(None, (row["model"], row["case"], f"[{row['source']}]")))


def _ends(rows: Sequence[Row]) -> list[float]:
    values = [row[name] for row in rows for name in ("predicted", "measured") if row[name] > 0]
    return [min(values), max(values)]
