"""Plans beside each other: the alternatives of an answer, times over the context, and throughput against speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap

import numpy as np
import plotly.graph_objects as go

from ridgeplan.dashboards.charts import style
from ridgeplan.planner import Prediction, Recommendation
from ridgeplan.planner.quality import Quality, quality_of
from ridgeplan.planner.quantities import time_text, tokens_text
from ridgeplan.planner.queries.curves import BatchCurve, Crossing, frontier
from ridgeplan.planner.render.verdict import plan_sentence, reasons, sentence, verdict
from ridgeplan.roofline.plan.presets import short_name

VERDICT_COLORS = {
    "recommended": style.BLUE, "plan of the file": "#222222", "within the noise": style.GREEN,
    "slower": style.GREY, "larger": style.GREY,
    "quality": style.GOLD, "does not fit": style.RED, "estimated only": style.PURPLE, "not calibrated": style.PURPLE,
    "not measured": style.SKY, "offloaded": style.ORANGE, "fits": style.ORANGE,
}  # fmt: skip


def alternatives(recommendation: Recommendation) -> go.Figure:
    """Milliseconds per token of the recommended plan and all others, with bands, coloured by why they lost."""
    rows = [(short_name(recommendation.name), recommendation.predicted, recommendation.verdict)]
    rows += [(short_name(other.preset), other.predicted, other.rejected) for other in recommendation.alternatives]
    figure = go.Figure()
    for kind, color in VERDICT_COLORS.items():
        alike = [row for row in rows if row[2].startswith(kind)]
        if alike:
            names, predicted, rejected = zip(*alike, strict=True)
            figure.add_bar(
                name=kind, y=names, x=[prediction.best.tpot_ms for prediction in predicted], orientation="h",
                marker_color=color,
                error_x={"type": "data", "symmetric": False, "thickness": 1, "color": style.GREY,
                         "array": [prediction.high.tpot_ms - prediction.best.tpot_ms for prediction in predicted],
                         "arrayminus": [prediction.best.tpot_ms - prediction.low.tpot_ms for prediction in predicted]},
                customdata=rejected, hovertemplate="%{y}: %{x:.3g} ms per token<br>%{customdata}",
            )  # fmt: skip
    figure.update_xaxes(title_text="ms per token")
    figure.update_yaxes(categoryorder="array", categoryarray=[name for name, _, _ in rows][::-1], automargin=True)
    return style.styled(figure, height=140 + 22 * len(rows), legend=style.below(-60 / (22 * len(rows))))


BRIEF_PLANS, SLIDE_COLUMNS = 12, 170  # plans of a brief, and characters of a line across its picture


def first_plans(recommendation: Recommendation) -> go.Figure:
    """The bars of `alternatives` of a brief's plans."""
    return alternatives(replace(recommendation, alternatives=recommendation.alternatives[: BRIEF_PLANS - 1]))


def brief_figure(recommendation: Recommendation) -> go.Figure:
    """A slide: the verdict, the first plans as bars, and the reasons as a table."""
    figure = first_plans(recommendation)
    names, texts = zip(*reasons(recommendation), strict=True)
    cells = {"align": "left", "fill_color": "white", "line_color": "#dddddd", "font_size": 13}
    figure.add_table(
        domain={"x": [0.5, 1], "y": [0, 1]}, columnwidth=[1, 3],
        header={"height": 0, "fill_color": "white", "line_color": "white"},
        cells={**cells, "values": [[f"<b>{sentence(name)}</b>" for name in names], texts]},
    )  # fmt: skip
    lines = "<br>".join(wrap(plan_sentence(recommendation), SLIDE_COLUMNS))
    title = f"<b>{verdict(recommendation)}</b><br><span style='font-size:14px'>{lines}</span>"
    return figure.update_layout(
        title={"text": title, "x": 0.02, "y": 0.97, "yanchor": "top"}, xaxis_domain=[0, 0.47], paper_bgcolor="white",
        width=1500, height=820, margin={"l": 20, "r": 20, "t": 130, "b": 60}, legend_y=-0.08,
    )  # fmt: skip


def times_over_context(
    contexts: Sequence[int], curves: Mapping[str, Sequence[Prediction]], limits: Mapping[str, float], context: int
) -> go.Figure:
    """Milliseconds per token over the context, a line with its band for each name.

    curves: predictions at every context. limits: the bytes that each may use; beyond them its line ends.
    """
    figure = go.Figure()
    best = {}
    for place, (name, predicted) in enumerate(curves.items()):
        color, dash = style.SERIES[place % len(style.SERIES)], style.DASHES[place % len(style.DASHES)]
        low, best[name], high = fitting_times(predicted, limits[name])
        _add_band(figure, contexts, low, high, color, name)
        figure.add_scatter(
            name=name, x=contexts, y=best[name], mode="lines", legendgroup=name,
            line={"color": color, "dash": dash, "width": 2.5},
            hovertemplate=f"{name}: %{{y:.3g}} ms<extra></extra>",
        )  # fmt: skip
    figure.add_vline(context, line_color=style.GREY, line_dash="dot")
    figure.update_yaxes(title_text="ms per token", rangemode="tozero")
    style.token_axis(figure, contexts)
    return style.styled(figure, height=440, hovermode="x unified", legend=style.below(-0.18))


def fitting_times(predicted: Sequence[Prediction], limit_bytes: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Low, best and high milliseconds per token, each [contexts]; NaN where the plan does not fit."""
    fits = np.array([prediction.best.peak_memory_bytes <= limit_bytes for prediction in predicted])
    times = np.array([[case.tpot_ms for case in (band.low, band.best, band.high)] for band in predicted])
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
        fillcolor=style.faded(color, 0.18), hoverinfo="skip", showlegend=False, legendgroup=name,
    )  # fmt: skip


def crossing_text(crossing: Crossing) -> str:
    """Which is faster from where on."""
    context = tokens_text(round(crossing.x)) if crossing.x < 1024 else f"{crossing.x / 1024:.3g}k"
    return f"from {context} tokens on {crossing.after} is faster than {crossing.before} ({time_text(crossing.y)})"


QUALITY_COLORS = {Quality.EXACT: style.GREEN, Quality.NEAR_LOSSLESS: style.BLUE, Quality.FOUR_BIT: style.PURPLE,
                  Quality.LOSSY: style.ORANGE}  # fmt: skip
LABELS_ABOVE = (-24, -46)  # pixels from a point to its number: neighbours differ
QUALITY_SYMBOLS = {Quality.EXACT: "circle", Quality.NEAR_LOSSLESS: "square", Quality.FOUR_BIT: "triangle-up",
                   Quality.LOSSY: "diamond"}  # fmt: skip


def trade_offs(curves: Mapping[str, BatchCurve], running: Sequence[str], front: Sequence[FrontPoint]) -> go.Figure:
    """Tokens per second of a GPU over those of a user, a line of batches for each named plan (log-log).

    Colour and symbol say what a plan gives up; filled symbols are plans that run here, those in `running`. A broad
    line connects the points of the front, numbered from 1.
    """
    figure = go.Figure()
    shown: set[tuple[Quality, bool]] = set()
    for name, curve in curves.items():
        kind = quality_of(curve.plan), name in running
        figure.add_trace(_line(name, curve, *kind, first=kind not in shown))
        shown.add(kind)
    _add_front(figure, front)
    x, y = ([value for curve in curves.values() for value in getattr(curve, axis)] for axis in ("per_user", "per_gpu"))
    figure.update_xaxes(type="log", title_text="tokens/s of one request", **style.log_ticks(x))
    figure.update_yaxes(type="log", title_text="tokens/s of the GPU", **style.log_ticks(y))
    return style.styled(figure, height=480, legend=style.below(-0.15))


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


@dataclass(frozen=True)
class FrontPoint:
    """A plan at a batch, and tokens per second of a request and of the GPU, which no other point exceeds in both."""

    plan: str
    batch: int
    per_user: float
    per_gpu: float


def front_of(curves: Mapping[str, BatchCurve]) -> list[FrontPoint]:
    """The best points of all curves, from the slowest for a request to the fastest."""
    points = [
        FrontPoint(name, *values)
        for name, curve in curves.items()
        for values in zip(curve.batches, curve.per_user, curve.per_gpu, strict=True)
    ]
    best = frontier(np.array([point.per_user for point in points]), np.array([point.per_gpu for point in points]))
    return [points[place] for place in best]


def _add_front(figure: go.Figure, front: Sequence[FrontPoint]) -> None:
    """A broad line through the front; its points are numbered in turn at two heights, clear of the curves."""
    figure.add_scatter(name="best of those that run and are allowed", mode="lines", opacity=0.5, hoverinfo="skip",
                       x=[point.per_user for point in front], y=[point.per_gpu for point in front],
                       line={"color": style.GREY, "width": 7})  # fmt: skip
    for number, point in enumerate(front, 1):
        figure.add_annotation(text=f"<b>{number}</b>", x=np.log10(point.per_user), y=np.log10(point.per_gpu), ax=0,
                              ay=LABELS_ABOVE[number % 2], arrowwidth=1, arrowhead=0, arrowcolor=style.GREY,
                              bgcolor=style.EDGE, font={"color": "white", "size": 12})  # fmt: skip
