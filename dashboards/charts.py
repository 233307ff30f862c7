"""Plotly figures of recommendations and predictions. Pure functions: values in, figure out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ridgeplan.planner import Prediction, Recommendation
from ridgeplan.roofline.catalog.hardware import Hardware
from ridgeplan.roofline.device import GIB
from ridgeplan.roofline.passes import category

# A colour has the same meaning in all figures of a page.
BLUE, ORANGE, GREEN, PURPLE, RED, GOLD, GREY = (
    "#2a6fdb", "#e8833a", "#2f9e6e", "#8a5cd1", "#d1495b", "#d4a72c", "#8c95a3",
)  # fmt: skip
PART_COLORS = {
    "draft": ORANGE, "verification": BLUE, "acceptance": GREEN, "selection": PURPLE, "flush": GOLD, "overhead": GREY,
}  # fmt: skip
OPERATION_COLORS = {
    "linear layers": BLUE, "attention": ORANGE, "element-wise": GREEN, "between kernels": GOLD,
    "sampling, flush and host": GREY,
}  # fmt: skip
MEMORY_COLORS = {
    "weights": BLUE, "draft weights": PURPLE, "kv": ORANGE, "buffers": GREEN, "libraries": GOLD, "workspace": GREY,
}  # fmt: skip
PASS_COLORS = {"prefill": GREEN, "draft": ORANGE, "target": BLUE}
VERDICT_COLORS = {"recommended": BLUE, "within the noise": GREEN, "slower": GREY, "larger": GREY, "quality": GOLD,
                  "does not fit": RED, "estimated only": PURPLE, "not calibrated": PURPLE}  # fmt: skip
PLAIN = "plain decoding"


def round_breakdown(recommendation: Recommendation) -> go.Figure:
    """Milliseconds per token of the recommended plan and plain decoding, by part of a round and kind of operation."""
    bars = {recommendation.name: recommendation.predicted, PLAIN: recommendation.baseline}
    figure = make_subplots(1, 2, shared_yaxes=True, subplot_titles=("by part of a round", "by kind of operation"))
    stacks = (
        ("part", PART_COLORS, [part_ms(one) for one in bars.values()]),
        ("operation", OPERATION_COLORS, [operation_ms(one) for one in bars.values()]),
    )
    for column, (title, colors, values) in enumerate(stacks, start=1):
        for name, color in colors.items():
            heights = [value[name] for value in values]
            if any(heights):
                bar = go.Bar(name=name, x=list(bars), y=heights, marker_color=color, legendgroup=title,
                             legendgrouptitle_text=title, hovertemplate="%{x}<br>%{y:.3g} ms per token")  # fmt: skip
                figure.add_trace(bar, 1, column)
    figure.update_yaxes(title_text="ms per token", col=1)
    return _styled(figure, barmode="stack", legend={"groupclick": "toggleitem", "traceorder": "grouped"})


def part_ms(prediction: Prediction) -> dict[str, float]:
    """Milliseconds per token of each part of a round; a plain step is all verification."""
    return {part: 1e3 * seconds / prediction.tokens_per_round for part, seconds in prediction.round_s.items()}


def operation_ms(prediction: Prediction) -> dict[str, float]:
    """Milliseconds per token of each kind of operation; the last is the rest of the round."""
    spent = dict.fromkeys(OPERATION_COLORS, 0.0)
    times = {"draft": prediction.gamma, "target": 1}
    for op in prediction.breakdown:
        if op.part in times:
            spent[_operation(op.kind)] += times[op.part] * 1e3 * op.seconds / prediction.tokens_per_round
    total = prediction.round_ms / prediction.tokens_per_round
    *_, rest = OPERATION_COLORS
    # Operations are evaluated halfway through the generation, the round is its average, so the rest may be negative.
    return {**spent, rest: max(0.0, total - sum(spent.values()))}


def memory_bars(predictions: Mapping[str, Prediction], capacity_bytes: float) -> go.Figure:
    """GiB by purpose, a bar per named prediction, against the available memory."""
    figure = go.Figure()
    parts = [memory_gib(one) for one in predictions.values()]
    for name, color in MEMORY_COLORS.items():
        figure.add_bar(name=name, y=list(predictions), x=[part[name] for part in parts], orientation="h",
                       marker_color=color, hovertemplate="%{y}<br>%{x:.2f} GiB")  # fmt: skip
    capacity = capacity_bytes / GIB
    figure.add_vline(capacity, line_dash="dash", line_color=RED, annotation_text=f"{capacity:.1f} GiB",
                     annotation_position="top left")  # fmt: skip
    longest = max(capacity, *(sum(part.values()) for part in parts))
    figure.update_xaxes(title_text="GiB", range=[0, 1.05 * longest])
    figure.update_yaxes(autorange="reversed")
    return _styled(figure, barmode="stack", legend=_below())


def memory_gib(prediction: Prediction) -> dict[str, float]:
    """GiB by purpose at the peak, with the larger of the prefill and decode workspaces."""
    held = dict(prediction.memory_bytes)
    held["workspace"] = max(held.pop("prefill_workspace"), held.pop("decode_workspace"))
    return {name.replace("_", " "): value / GIB for name, value in held.items()}


def roofline(prediction: Prediction, hardware: Hardware) -> go.Figure:
    """Achieved FLOP/s of every operation over its intensity, under the machine's roofline (log-log)."""
    figure = go.Figure()
    dots = [op for op in prediction.breakdown if op.flops > 0]
    low = min(0.5, *(op.intensity for op in dots))
    high = max(10 * hardware.ridge_point, *(2 * op.intensity for op in dots))
    intensities = np.geomspace(low, high, 200)
    roof = np.minimum(hardware.compute_flops, intensities * hardware.bandwidth_bytes_per_s)
    figure.add_scatter(name="roof", x=intensities, y=roof, mode="lines", line_color=GREY, hoverinfo="skip")
    for part, color in PASS_COLORS.items():
        ops = [op for op in dots if op.part == part]
        if ops:
            figure.add_scatter(
                name=part, x=[op.intensity for op in ops], y=[op.flops / op.seconds for op in ops], mode="markers",
                marker={"color": color, "size": 10, "opacity": 0.8}, text=[f"{op.op} [{op.kind}]" for op in ops],
                hovertemplate="%{text}<br>%{x:.3g} FLOP/byte, %{y:.3s}FLOP/s",
            )  # fmt: skip
    figure.add_scatter(name="ridge", x=[hardware.ridge_point], y=[hardware.compute_flops], mode="markers+text",
                       marker={"color": RED, "size": 10, "symbol": "diamond"}, textposition="bottom right",
                       text=[f"{hardware.ridge_point:.0f} FLOP/byte"], hoverinfo="skip")  # fmt: skip
    figure.update_xaxes(type="log", title_text="FLOP/byte")
    figure.update_yaxes(type="log", title_text="FLOP/s", exponentformat="SI")
    return _styled(figure, legend=_below())


def alternatives(recommendation: Recommendation) -> go.Figure:
    """Milliseconds per token of the recommended plan and all others, with bands, coloured by why they lost."""
    rows = [(recommendation.name, recommendation.predicted, "recommended")]
    rows += [(other.preset, other.predicted, other.rejected) for other in recommendation.alternatives]
    figure = go.Figure()
    for verdict, color in VERDICT_COLORS.items():
        alike = [row for row in rows if row[2].startswith(verdict)]
        if alike:
            names, predicted, reasons = zip(*alike, strict=True)
            figure.add_bar(
                name=verdict, y=names, x=[one.best.tpot_ms for one in predicted], orientation="h", marker_color=color,
                error_x={"type": "data", "symmetric": False, "thickness": 1, "color": "#444",
                         "array": [one.high.tpot_ms - one.best.tpot_ms for one in predicted],
                         "arrayminus": [one.best.tpot_ms - one.low.tpot_ms for one in predicted]},
                customdata=reasons, hovertemplate="%{y}: %{x:.3g} ms per token<br>%{customdata}",
            )  # fmt: skip
    figure.update_xaxes(title_text="ms per token")
    figure.update_yaxes(categoryorder="array", categoryarray=[name for name, _, _ in rows][::-1], automargin=True)
    return _styled(figure, height=140 + 22 * len(rows), legend=_below(-60 / (22 * len(rows))))


def _operation(kind: str) -> str:
    """The entry of `OPERATION_COLORS` for a kernel class."""
    if kind == "gap":
        return "between kernels"
    return {"linear": "linear layers", "attention": "attention", "other": "element-wise"}[category(kind)]


def _below(bottom: float = -0.25) -> dict[str, object]:
    """A horizontal legend under the axis; `bottom` is in plot heights."""
    return {"orientation": "h", "x": 0, "y": bottom, "yanchor": "top", "traceorder": "normal"}


def _styled(figure: go.Figure, *, height: int = 380, **layout: object) -> go.Figure:
    margin = {"l": 10, "r": 10, "t": 40, "b": 60}
    return figure.update_layout(template="plotly_white", height=height, margin=margin, **layout)
