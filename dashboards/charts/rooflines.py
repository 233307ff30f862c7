"""Operations under the machine's roofline, and arithmetic intensity over context and batch against the ridge."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from ridgeplan.dashboards.charts import style
from ridgeplan.planner import Prediction
from ridgeplan.planner.prediction import OpTime
from ridgeplan.roofline.catalog.hardware import Hardware
from ridgeplan.validate.papers.quantspec_ridge_plane import Plane

PASS_COLORS = {"prefill": style.GREEN, "draft": style.ORANGE, "target": style.BLUE}
PASS_SYMBOLS = {"prefill": "square", "draft": "triangle-up", "target": "circle"}
ROOFS = ("roof", "roof of FP8")  # by the arithmetic's speed
LABELS, APART = 8, 0.4  # operations that are named, and how far apart their dots are at least
NAME_WIDTH = 1.5  # of a name, in powers of ten on a narrow screen


def roofline(prediction: Prediction, hardware: Hardware) -> go.Figure:
    """Achieved FLOP/s of every operation over its intensity, under the machine's roofline (log-log).

    The operations of each pass that take the most time are named.
    """
    figure = go.Figure()
    dots = [op for op in prediction.breakdown if op.flops > 0]
    low = min(0.5, *(op.intensity for op in dots))
    high = max(10 * hardware.ridge_point, *(2 * op.intensity for op in dots))
    intensities = np.geomspace(low, high, 200)
    for name, dash, speed in zip(ROOFS, style.DASHES, sorted({1.0, *(op.arithmetic for op in dots)}), strict=False):
        roof = np.minimum(speed * hardware.compute_flops, intensities * hardware.bandwidth_bytes_per_s)
        figure.add_scatter(name=name, x=intensities, y=roof, mode="lines", line={"color": style.GREY, "dash": dash},
                           hoverinfo="skip")  # fmt: skip
    named = labelled(dots, hardware.ridge_point)
    for part in PASS_COLORS:
        ops = [op for op in dots if op.part == part]
        if ops:
            figure.add_trace(_dots(part, ops, named, hardware.ridge_point))
    figure.add_scatter(name="ridge", x=[hardware.ridge_point], y=[hardware.compute_flops], mode="markers+text",
                       marker={"color": style.RED, "size": 10, "symbol": "diamond"}, textposition="top center",
                       text=[f"ridge {hardware.ridge_point:.0f} FLOP/byte"], hoverinfo="skip")  # fmt: skip
    figure.update_xaxes(type="log", title_text="FLOP/byte")
    figure.update_yaxes(type="log", title_text="FLOP/s", tickformat="~s")
    return style.styled(figure, height=460, legend=style.below(-0.15))


def labelled(ops: Sequence[OpTime], ridge_point: float) -> set[OpTime]:
    """The operations that are named: those that take the most time, whose names cover no other dot or name."""
    kept: list[OpTime] = []
    for op in sorted(ops, key=lambda op: -op.seconds):
        free = not any(_covers(op, other, ridge_point) for other in ops if other is not op)
        if free and len(kept) < LABELS and all(_apart(op, other) > APART for other in kept):
            kept.append(op)
    return set(kept)


def _covers(op: OpTime, other: OpTime, ridge_point: float) -> bool:
    """Whether a name below the dot of `op`, on the side where there is room, covers the dot of another operation."""
    wide, high = np.log10(other.intensity / op.intensity), _height(op, other)
    return bool(-0.1 < (-wide if op.intensity > ridge_point else wide) < NAME_WIDTH and -2 * APART < high < APART / 4)


def _height(op: OpTime, other: OpTime) -> float:
    """How much higher another dot is, in powers of ten."""
    return float(np.log10(other.flops / other.seconds * op.seconds / op.flops))


def _apart(op: OpTime, other: OpTime) -> float:
    """In powers of ten, along the axis in which two dots are further apart; names are five times as wide as high."""
    return max(abs(np.log10(op.intensity / other.intensity)) / 5, abs(_height(op, other)))


def _dots(part: str, ops: Sequence[OpTime], named: set[OpTime], ridge_point: float) -> go.Scatter:
    """One pass's operations; names stand on the side where there is room."""
    total = sum(op.seconds for op in ops)
    return go.Scatter(
        name=part, x=[op.intensity for op in ops], y=[op.flops / op.seconds for op in ops], mode="markers+text",
        marker={"color": PASS_COLORS[part], "symbol": PASS_SYMBOLS[part], "size": 10, "opacity": 0.8},
        text=[op.op if op in named else "" for op in ops], textfont={"size": 11},
        textposition=["bottom left" if op.intensity > ridge_point else "bottom right" for op in ops],
        customdata=[(f"{op.op} [{op.kind}]", 100 * op.seconds / total) for op in ops],
        hovertemplate="%{customdata[0]}<br>%{x:.3g} FLOP/byte, %{y:.3s}FLOP/s<br>%{customdata[1]:.2g}% of the pass",
    )  # fmt: skip


def ridge_plane(plane: Plane, workload: tuple[int, int]) -> go.Figure:
    """Aggregate arithmetic intensity over context and batch (QuantSpec, Fig 2), cut by the plane of the ridge point.

    Below the plane a step is bound by memory, above it by compute. workload: the marked context and batch.
    """
    x, y = np.log2(plane.contexts), np.log2(plane.batches)
    figure = go.Figure()
    figure.add_surface(
        name="intensity", x=x, y=y, z=np.log10(plane.aggregate).T, surfacecolor=100 * plane.attention_share.T,
        colorscale=style.HEAT, cmin=0, cmax=100, colorbar=style.bar_above("attention, % of the time"),
        customdata=np.round(plane.aggregate.T, 2),
        hovertemplate="%{customdata} FLOP/byte<br>attention takes %{surfacecolor:.0f}% of the time<extra></extra>",
    )  # fmt: skip
    level = np.full((len(y), len(x)), np.log10(plane.ridge_point))
    figure.add_surface(name="ridge", x=x, y=y, z=level, opacity=0.35, showscale=False, hoverinfo="skip",
                       colorscale=[[0, style.RED], [1, style.RED]])  # fmt: skip
    row, column = (int(np.abs(np.log2(sizes / size)).argmin()) for sizes, size in
                   ((plane.contexts, workload[0]), (plane.batches, workload[1])))  # fmt: skip
    height = np.log10(plane.aggregate[row, column])
    figure.add_scatter3d(name="your question", x=[x[row]], y=[y[column]], z=[height], mode="markers",
                         marker={"color": style.RED, "size": 5})  # fmt: skip
    heights = range(1 + int(np.floor(np.log10(plane.aggregate.min()))), int(np.ceil(level.max())) + 1)
    figure.update_scenes(
        xaxis=_axis("context", *style.token_ticks(plane.contexts, 5)),
        yaxis=_axis("batch", *style.token_ticks(plane.batches, 5)),
        zaxis=_axis("FLOP/byte", [2.0**power for power in heights], [f"{10.0**power:g}" for power in heights]),
        camera={"eye": {"x": -1.75, "y": -1.85, "z": 1.05}, "center": {"x": 0, "y": 0, "z": -0.12}},
    )  # fmt: skip
    return style.without_walls(style.styled(figure, height=460, top=70, showlegend=False))


def _axis(title: str, values: Sequence[float], texts: Sequence[str]) -> dict[str, object]:
    """An axis of logs to base 2."""
    return {"title": title, "tickvals": np.log2(values), "ticktext": list(texts)}
