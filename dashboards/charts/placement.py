"""The figure of placements over the context: layers leave one by one, or all at once (SpeContext, section 6.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from ridgeplan.dashboards.charts.style import BLUE, GREY, ORANGE
from ridgeplan.planner.sweeps import PlacementTimes


def placement_figure(times: PlacementTimes, measured: Sequence[Mapping[str, float]] = ()) -> go.Figure:
    """Time per token over the context, predicted as lines; `measured` rows of the benchmark of offloading as points."""
    figure = go.Figure()
    for name, values, color in (
        ("as many layers on the host as must be", times.adaptive_ms, BLUE),
        ("all layers once one must", times.static_ms, ORANGE),
    ):
        figure.add_scatter(x=times.contexts, y=values, name=name, mode="lines", line_color=color)
    for name, key, color in (("measured", "adaptive_ms", BLUE), ("measured, all at once", "static_ms", ORANGE)):
        points = [(row["context"], row[key]) for row in measured]
        if points:
            xs, ys = zip(*points, strict=True)
            figure.add_scatter(x=xs, y=ys, name=name, mode="markers", marker_color=color)
    layers = go.Scatter(x=times.contexts, y=times.host_layers, name="layers on the host", yaxis="y2", line_color=GREY)
    figure.add_trace(layers)
    figure.update_layout(
        xaxis_title="tokens of context",
        yaxis={"title": "ms per token", "type": "log"},
        yaxis2={"title": "layers", "overlaying": "y", "side": "right", "showgrid": False},
    )
    return figure
