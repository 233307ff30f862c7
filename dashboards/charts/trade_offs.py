"""What a GPU gives against what a user gets: throughput over speed, plan by plan, and the best of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from ridgeplan.dashboards.charts.style import BLUE, GREEN, GREY, ORANGE, below, log_ticks, styled
from ridgeplan.planner.curves.batches import BatchCurve, frontier
from ridgeplan.planner.interface.short_names import briefly
from ridgeplan.planner.quality import Quality, quality_of

QUALITY_COLORS = {Quality.EXACT: GREEN, Quality.NEAR_LOSSLESS: BLUE, Quality.LOSSY: ORANGE}
LABEL_ABOVE = -38  # pixels from a point to its name, clear of the other lines
QUALITY_SYMBOLS = {Quality.EXACT: "circle", Quality.NEAR_LOSSLESS: "square", Quality.LOSSY: "diamond"}


def trade_offs(curves: Mapping[str, BatchCurve], running: Sequence[str], allowed: Sequence[str]) -> go.Figure:
    """Tokens per second of a GPU over those of a user, a line of batches for each named plan (log-log).

    Colour and symbol say what a plan gives up; filled symbols are plans that run here, those in `running`. A broad
    line connects the best of these that are in `allowed`.
    """
    figure = go.Figure()
    shown: set[tuple[Quality, bool]] = set()
    for name, curve in curves.items():
        kind = quality_of(curve.plan), name in running
        figure.add_trace(_line(name, curve, *kind, first=kind not in shown))
        shown.add(kind)
    _add_frontier(figure, {name: curves[name] for name in running if name in allowed})
    x, y = ([value for one in curves.values() for value in getattr(one, axis)] for axis in ("per_user", "per_gpu"))
    figure.update_xaxes(type="log", title_text="tokens/s of one request", **log_ticks(x))
    figure.update_yaxes(type="log", title_text="tokens/s of the GPU", **log_ticks(y))
    return styled(figure, height=480, legend=below(-0.15))


def _line(name: str, curve: BatchCurve, quality: Quality, runs: bool, *, first: bool) -> go.Scatter:
    symbol = QUALITY_SYMBOLS[quality] if runs else f"{QUALITY_SYMBOLS[quality]}-open"
    color = QUALITY_COLORS[quality]
    return go.Scatter(
        name=f"{quality}, {'runs here' if runs else 'estimated only'}", x=curve.per_user, y=curve.per_gpu,
        mode="lines+markers", showlegend=first, legendgroup=f"{quality} {runs}",
        line={"color": color, "width": 1, "dash": "solid" if runs else "dot"},
        marker={"symbol": symbol, "size": 8, "color": color}, text=curve.batches, customdata=curve.gamma,
        hovertemplate=f"{name}<br>batch %{{text}}, gamma %{{customdata}}<br>%{{x:.3g}} tokens/s per request, "
        "%{y:,.0f} of the GPU<extra></extra>",
    )  # fmt: skip


def _add_frontier(figure: go.Figure, curves: Mapping[str, BatchCurve]) -> None:
    """The points of plans that run which no other exceeds, each plan named where it begins to be the best."""
    points = [(name, *pair) for name, one in curves.items() for pair in zip(one.per_user, one.per_gpu, strict=True)]
    if not points:
        return
    names, per_user, per_gpu = zip(*points, strict=True)
    best = frontier(np.array(per_user), np.array(per_gpu))
    x, y = ([axis[place] for place in best] for axis in (per_user, per_gpu))
    figure.add_scatter(name="best that runs and is allowed", mode="lines", opacity=0.5, x=x, y=y, hoverinfo="skip",
                       line={"color": GREY, "width": 7})  # fmt: skip
    middle = (x[0] * x[-1]) ** 0.5
    for at, place in enumerate(best):
        if at == 0 or names[best[at - 1]] != names[place]:
            side = "left" if x[at] < middle else "right"  # away from the edge
            figure.add_annotation(text=briefly(names[place]), x=np.log10(x[at]), y=np.log10(y[at]), xanchor=side,
                                  ax=0, ay=LABEL_ABOVE, arrowwidth=1, arrowhead=0, arrowcolor=GREY)  # fmt: skip
