"""Where the time of a token goes: stacks of a round's parts, and the way from plain decoding to a plan."""

from __future__ import annotations

from textwrap import wrap

import plotly.graph_objects as go

from ridgeplan.dashboards.charts.style import (
    BLUE,
    GOLD,
    GREEN,
    GREY,
    ORANGE,
    PLAIN,
    PURPLE,
    RED,
    below,
    styled,
)  # fmt: skip
from ridgeplan.planner import Prediction, Recommendation
from ridgeplan.roofline.passes import category

PART_COLORS = {
    "draft": ORANGE, "verification": BLUE, "acceptance": GREEN, "selection": PURPLE, "flush": GOLD, "overhead": GREY,
}  # fmt: skip
WIDEST = 16  # characters of a name on an axis
OPERATION_COLORS = {
    "linear layers": BLUE, "attention": ORANGE, "element-wise": GREEN, "between kernels": GOLD,
    "sampling, flush and host": GREY,
}  # fmt: skip


def round_parts(recommendation: Recommendation) -> go.Figure:
    """Milliseconds per token of each part of a round, of the recommended plan and of plain decoding."""
    bars = {recommendation.name: recommendation.predicted, PLAIN: recommendation.baseline}
    found = [part_ms(one) for one in bars.values()]
    figure = go.Figure()
    for part, color in PART_COLORS.items():
        lengths = [one[part] for one in found]
        if any(lengths):
            figure.add_bar(name=part, y=list(map(wrapped, bars)), x=lengths, marker_color=color, orientation="h",
                           hovertemplate=f"{part}: %{{x:.3g}} ms per token<extra></extra>")  # fmt: skip
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="ms per token")
    return styled(figure, barmode="stack", legend=below(-0.22))


def waterfall(predicted: Prediction, baseline: Prediction, name: str) -> go.Figure:
    """From plain decoding's milliseconds per token to a plan's, by kind of operation: what each saves or adds."""
    ours, plain = operation_ms(predicted), operation_ms(baseline)
    kinds = [kind for kind in OPERATION_COLORS if ours[kind] or plain[kind]]
    changes = [ours[kind] - plain[kind] for kind in kinds]
    values = [sum(plain.values()), *changes, sum(ours.values())]
    texts = [f"{values[0]:.3g} ms", *(f"{change:+.2g}" for change in changes), f"{values[-1]:.3g} ms"]
    figure = go.Figure(
        go.Waterfall(
            y=[wrapped(label) for label in (PLAIN, *kinds, name)], x=values, text=texts, orientation="h",
            measure=["absolute", *["relative"] * len(kinds), "total"], textposition="outside",
            decreasing={"marker": {"color": GREEN}}, increasing={"marker": {"color": RED}},
            totals={"marker": {"color": BLUE}}, connector={"line": {"color": GREY, "width": 1}}, cliponaxis=False,
            hovertemplate="%{y}<br>%{text}<extra></extra>",
        )
    )  # fmt: skip
    figure.update_xaxes(title_text="ms per token", range=[0, 1.18 * max(values[0], values[-1])])
    figure.update_yaxes(autorange="reversed")
    return styled(figure, showlegend=False)


def wrapped(name: str) -> str:
    """A name over several lines, for an axis that leaves narrow screens their width."""
    return "<br>".join(wrap(name, WIDEST))


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
