"""Where the time of a token goes: the parts of a round, and the speed-up of speculation."""

from __future__ import annotations

from textwrap import wrap

import numpy as np
import plotly.graph_objects as go

from ridgeplan.dashboards.charts import style
from ridgeplan.planner import Prediction, Recommendation
from ridgeplan.planner.queries.curves import SpeculationMap
from ridgeplan.roofline.passes import category
from ridgeplan.roofline.plan.presets import short_name

PART_COLORS = {
    "draft": style.ORANGE, "verification": style.BLUE, "acceptance": style.GREEN, "selection": style.PURPLE,
    "flush": style.GOLD, "overhead": style.GREY,
}  # fmt: skip
WIDEST = 16  # characters of a name on an axis
OPERATION_COLORS = {
    "linear layers": style.BLUE, "attention": style.ORANGE, "element-wise": style.GREEN, "between kernels": style.GOLD,
    "sampling, flush and host": style.GREY,
}  # fmt: skip


def round_parts(recommendation: Recommendation) -> go.Figure:
    """Milliseconds per token of each part of a round, of the recommended plan and of plain decoding."""
    bars = {recommendation.name: recommendation.predicted, style.PLAIN: recommendation.baseline}
    parts_ms = [part_ms(prediction) for prediction in bars.values()]
    figure = go.Figure()
    for part, color in PART_COLORS.items():
        lengths = [part_times[part] for part_times in parts_ms]
        if any(lengths):
            figure.add_bar(name=part, y=list(map(wrapped, bars)), x=lengths, marker_color=color, orientation="h",
                           hovertemplate=f"{part}: %{{x:.3g}} ms per token<extra></extra>")  # fmt: skip
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="ms per token")
    return style.styled(figure, barmode="stack", legend=style.below(-0.22))


def waterfall(predicted: Prediction, baseline: Prediction, name: str) -> go.Figure:
    """From plain decoding's milliseconds per token to a plan's, by kind of operation: what each saves or adds."""
    ours, plain = operation_ms(predicted), operation_ms(baseline)
    kinds = [kind for kind in OPERATION_COLORS if ours[kind] or plain[kind]]
    changes = [ours[kind] - plain[kind] for kind in kinds]
    values = [sum(plain.values()), *changes, sum(ours.values())]
    texts = [f"{values[0]:.3g} ms", *(f"{change:+.2g}" for change in changes), f"{values[-1]:.3g} ms"]
    figure = go.Figure(
        go.Waterfall(
            y=[wrapped(label) for label in (style.PLAIN, *kinds, name)], x=values, text=texts, orientation="h",
            measure=["absolute", *["relative"] * len(kinds), "total"], textposition="outside",
            decreasing={"marker": {"color": style.GREEN}}, increasing={"marker": {"color": style.RED}},
            totals={"marker": {"color": style.BLUE}}, connector={"line": {"color": style.GREY, "width": 1}},
            cliponaxis=False, hovertemplate="%{y}<br>%{text}<extra></extra>",
        )
    )  # fmt: skip
    figure.update_xaxes(title_text="ms per token", range=[0, 1.18 * max(values[0], values[-1])])
    figure.update_yaxes(autorange="reversed")
    return style.styled(figure, showlegend=False)


def wrapped(name: str) -> str:
    """A name, shortened where a plan's, over several lines: for an axis that leaves narrow screens their width."""
    return "<br>".join(wrap(short_name(name), WIDEST))


def part_ms(prediction: Prediction) -> dict[str, float]:
    """Milliseconds per token of each part of a round; a plain step is all verification."""
    return {part: 1e3 * seconds / prediction.tokens_per_round for part, seconds in prediction.round_s.items()}


def operation_ms(prediction: Prediction) -> dict[str, float]:
    """Milliseconds per token of each kind of operation; the last is the rest of the round."""
    spent, whole = dict.fromkeys(OPERATION_COLORS, 0.0), part_ms(prediction)
    *_, rest = OPERATION_COLORS
    for part, of_round in (("draft", "draft"), ("target", "verification")):
        ops = [op for op in prediction.breakdown if op.part == part]
        steps = prediction.gamma if part == "draft" else 1
        each_ms = {op: 1e3 * steps * op.seconds / prediction.tokens_per_round for op in ops}
        # Operations are evaluated halfway through the generation, the round is its average, which may be shorter.
        scale = min(1.0, whole[of_round] / (sum(each_ms.values()) or 1.0))
        for op, op_ms in each_ms.items():
            spent[_operation(op.kind)] += scale * op_ms
    return {**spent, rest: max(0.0, sum(whole.values()) - sum(spent.values()))}


def _operation(kind: str) -> str:
    """The entry of `OPERATION_COLORS` for a kernel class."""
    if kind == "gap":
        return "between kernels"
    return {"linear": "linear layers", "attention": "attention", "other": "element-wise"}[category(kind)]


def speculation(speedups: SpeculationMap) -> go.Figure:
    """A map of the speed-up over plain decoding: drafts of a round by conditional acceptance.

    The dashed line is the best gamma at each acceptance, the star the optimum at the predicted acceptance, whose band
    is the bar through it.
    """
    gamma, gain = speedups.optimum
    figure = go.Figure(
        go.Heatmap(
            x=speedups.gammas, y=speedups.acceptances, z=speedups.speedup, colorscale=style.HEAT,
            colorbar=style.bar_above("speed-up"),
            hovertemplate="gamma %{x}, acceptance %{y:.2f}: %{z:.2f}x<extra></extra>",
        )
    )  # fmt: skip
    figure.add_scatter(
        name="as fast as plain decoding", x=speedups.gammas, y=break_even(speedups), mode="lines", hoverinfo="skip",
        line={"color": style.SKY, "width": 4},
    )  # fmt: skip
    worthwhile = speedups.best_gammas > 0
    figure.add_scatter(
        name="best gamma", x=speedups.best_gammas[worthwhile], y=speedups.acceptances[worthwhile], mode="lines",
        line={"color": style.PURPLE, "dash": "dash", "width": 3}, hoverinfo="skip",
    )  # fmt: skip
    known = speedups.predicted
    figure.add_scatter(
        name=f"optimum: gamma {gamma}, {gain:.2f}x", x=[gamma], y=[known.best], mode="markers",
        marker={"symbol": "star", "size": 18, "color": style.RED, "line": {"color": "white", "width": 1}},
        error_y={"type": "data", "symmetric": False, "array": [known.high - known.best],
                 "arrayminus": [known.best - known.low], "color": style.RED, "thickness": 3},
        hovertemplate=f"predicted acceptance {known.best:.3f} ({known.low:.3f} to {known.high:.3f})<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title_text="gamma (drafts of a round)", tickvals=speedups.gammas, showgrid=False)
    ends = np.array([speedups.acceptances[0], speedups.acceptances[-1]])
    figure.update_yaxes(title_text="conditional acceptance", range=list(ends), showgrid=False)
    return style.styled(figure, height=480, top=70, legend=style.below(-0.16))


def break_even(speedups: SpeculationMap) -> np.ndarray:
    """The acceptance from which each gamma is faster than plain decoding; NaN where none of the map's is: [gammas]."""
    rising = (np.interp(1.0, column, speedups.acceptances, np.nan, np.nan) for column in speedups.speedup.T)
    return np.array(list(rising))
