"""Where the time of a token goes: stacks of a round's parts, and the way from plain decoding to a plan."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ridgeplan.dashboards.charts.style import BLUE, GOLD, GREEN, GREY, ORANGE, PLAIN, PURPLE, RED, styled
from ridgeplan.planner import Prediction, Recommendation
from ridgeplan.roofline.passes import category

PART_COLORS = {
    "draft": ORANGE, "verification": BLUE, "acceptance": GREEN, "selection": PURPLE, "flush": GOLD, "overhead": GREY,
}  # fmt: skip
OPERATION_COLORS = {
    "linear layers": BLUE, "attention": ORANGE, "element-wise": GREEN, "between kernels": GOLD,
    "sampling, flush and host": GREY,
}  # fmt: skip


def round_breakdown(recommendation: Recommendation) -> go.Figure:
    """Milliseconds per token of the recommended plan and plain decoding, by part of a round and kind of operation."""
    bars = {recommendation.name: recommendation.predicted, PLAIN: recommendation.baseline}
    figure = make_subplots(1, 2, shared_yaxes=True, subplot_titles=("by part", "by operation"))
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
    return styled(figure, top=40, barmode="stack", legend={"groupclick": "toggleitem", "traceorder": "grouped"})


def waterfall(predicted: Prediction, baseline: Prediction, name: str) -> go.Figure:
    """From plain decoding's milliseconds per token to a plan's, by kind of operation: what each saves or adds."""
    ours, plain = operation_ms(predicted), operation_ms(baseline)
    kinds = [kind for kind in OPERATION_COLORS if ours[kind] or plain[kind]]
    changes = [ours[kind] - plain[kind] for kind in kinds]
    values = [sum(plain.values()), *changes, sum(ours.values())]
    texts = [f"{values[0]:.3g} ms", *(f"{change:+.2g}" for change in changes), f"{values[-1]:.3g} ms"]
    figure = go.Figure(
        go.Waterfall(
            x=[label.replace(" ", "<br>") for label in (PLAIN, *kinds, name)], y=values, text=texts,
            measure=["absolute", *["relative"] * len(kinds), "total"], textposition="outside",
            decreasing={"marker": {"color": GREEN}}, increasing={"marker": {"color": RED}},
            totals={"marker": {"color": BLUE}}, connector={"line": {"color": GREY, "width": 1}}, cliponaxis=False,
            hovertemplate="%{x}<br>%{text}<extra></extra>",
        )
    )  # fmt: skip
    figure.update_yaxes(title_text="ms per token", range=[0, 1.15 * max(values[0], values[-1])])
    return styled(figure, showlegend=False)


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


def _operation(kind: str) -> str:
    """The entry of `OPERATION_COLORS` for a kernel class."""
    if kind == "gap":
        return "between kernels"
    return {"linear": "linear layers", "attention": "attention", "other": "element-wise"}[category(kind)]
