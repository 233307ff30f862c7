"""Time per token of several plans or machines over the context, with bands and the points where they cross."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from ridgeplan.dashboards.charts.style import DASHES, GREY, SERIES, below, faded, styled, token_axis
from ridgeplan.planner import Prediction
from ridgeplan.planner.curves.crossings import Crossing, crossings
from ridgeplan.planner.interface.quantities import time_text, tokens_text


def times_over_context(
    contexts: Sequence[int], curves: Mapping[str, Sequence[Prediction]], limits: Mapping[str, float], asked: int
) -> go.Figure:
    """Milliseconds per token over the context, a line with its band for each name.

    curves: predictions at every context. limits: the bytes that each may use; beyond them its line ends.
    """
    figure = go.Figure()
    best = {}
    for place, (name, predicted) in enumerate(curves.items()):
        color, dash = SERIES[place % len(SERIES)], DASHES[place % len(DASHES)]
        low, best[name], high = fitting_times(predicted, limits[name])
        _add_band(figure, contexts, low, high, color, name)
        figure.add_scatter(
            name=name, x=contexts, y=best[name], mode="lines", legendgroup=name,
            line={"color": color, "dash": dash, "width": 2.5},
            hovertemplate=f"{name}: %{{y:.3g}} ms<extra></extra>",
        )  # fmt: skip
    _add_crossings(figure, crossings(contexts, best))
    figure.add_vline(asked, line_color=GREY, line_dash="dot")
    figure.update_yaxes(title_text="ms per token", rangemode="tozero")
    token_axis(figure, contexts)
    return styled(figure, height=440, hovermode="x unified", legend=below(-0.18))


def fitting_times(predicted: Sequence[Prediction], limit_bytes: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Low, best and high milliseconds per token, each [contexts]; NaN where the plan does not fit."""
    fits = np.array([one.best.peak_memory_bytes <= limit_bytes for one in predicted])
    times = np.array([[one.low.tpot_ms, one.best.tpot_ms, one.high.tpot_ms] for one in predicted])
    low, best, high = np.where(fits[:, None], times, np.nan).T
    return low, best, high


def _add_band(
    figure: go.Figure, contexts: Sequence[int], low: np.ndarray, high: np.ndarray, color: str, name: str
) -> None:
    """The area between two curves, where they have values."""
    known = ~np.isnan(low)
    x, below_y, above_y = np.asarray(contexts)[known], low[known], high[known]
    figure.add_scatter(
        x=[*x, *x[::-1]], y=[*above_y, *below_y[::-1]], fill="toself", mode="lines", line={"width": 0},
        fillcolor=faded(color, 0.18), hoverinfo="skip", showlegend=False, legendgroup=name,
    )  # fmt: skip


def _add_crossings(figure: go.Figure, found: Sequence[Crossing]) -> None:
    if found:
        figure.add_scatter(
            name="crossing", x=[one.x for one in found], y=[one.y for one in found], mode="markers",
            marker={"symbol": "x", "size": 10, "color": GREY}, text=[crossing_text(one) for one in found],
            hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip


def crossing_text(one: Crossing) -> str:
    """Which is faster from where on."""
    context = tokens_text(round(one.x)) if one.x < 1024 else f"{one.x / 1024:.3g}k"
    return f"from {context} tokens on {one.after} is faster than {one.before} ({time_text(one.y)})"
