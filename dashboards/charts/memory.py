"""A plan's memory by purpose over the context, against the usable memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from ridgeplan.dashboards.charts import style
from ridgeplan.planner.quantities import GB, size_text, tokens_text
from ridgeplan.planner.queries.curves import OffloadStep
from ridgeplan.roofline.memory import MemoryBreakdown

MEMORY_COLORS = {
    "weights": style.BLUE, "draft weights": style.PURPLE, "kv": style.ORANGE, "buffers": style.GREEN,
    "libraries": style.GOLD, "workspace": style.GREY,
}  # fmt: skip
LABELS = {"kv": "KV cache"}  # where a purpose's name is not its field's


def by_purpose(memory_bytes: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Bytes by purpose at the peak: the fields of a MemoryBreakdown, with the larger of its two workspaces."""
    held = {name: np.asarray(value, dtype=float) for name, value in memory_bytes.items()}
    held["workspace"] = np.maximum(held.pop("prefill_workspace"), held.pop("decode_workspace"))
    return {name.replace("_", " "): value for name, value in held.items()}


def memory_over_context(
    contexts: Sequence[int], memory: MemoryBreakdown, capacity_bytes: float, context: int,
    staircase: Sequence[OffloadStep] = (),
) -> go.Figure:  # fmt: skip
    """GB by purpose, stacked over the context, against the available memory.

    memory: each figure [contexts]. `staircase` adds the layers that must be on the host, on an axis of its own.
    """
    figure = go.Figure()
    parts = by_purpose(vars(memory))
    for name, color in MEMORY_COLORS.items():
        if parts[name].any():
            label = LABELS.get(name, name)
            figure.add_scatter(
                name=label, x=contexts, y=parts[name] / GB, stackgroup="memory", mode="lines",
                line={"color": color, "width": 0.5}, fillcolor=style.faded(color, 0.75),
                hovertemplate=f"{label}: %{{y:.3g}} GB<extra></extra>",
            )  # fmt: skip
    capacity = capacity_bytes / GB
    figure.add_hline(capacity, line_dash="dash", line_color=style.RED, annotation_position="top left",
                     annotation_text=f"{size_text(capacity_bytes)} usable")  # fmt: skip
    figure.add_vline(context, line_color=style.GREY, line_dash="dot")
    total = max(map(sum, zip(*parts.values(), strict=True))) / GB
    figure.update_yaxes(title_text="GB", range=[0, 1.12 * max(capacity, min(total, 2 * capacity))])
    _add_staircase(figure, staircase, contexts)
    style.token_axis(figure, contexts)
    return style.styled(figure, hovermode="x unified", legend=style.below(-0.22))


def _add_staircase(figure: go.Figure, staircase: Sequence[OffloadStep], contexts: Sequence[int]) -> None:
    """Layers on the host over the context, as a line of steps on the right axis, if any step is within the contexts."""
    inside = [step for step in staircase if step.layers and step.first <= contexts[-1]]
    if not inside:
        return
    x = [*(max(step.first, contexts[0]) for step in inside), min(inside[-1].last, contexts[-1])]
    y = [*(step.layers for step in inside), inside[-1].layers]
    figure.add_scatter(
        name="layers that must leave the GPU", x=x, y=y, yaxis="y2", mode="lines",
        line={"shape": "hv", "color": style.RED, "width": 2}, hovertemplate="%{y} layers on the host<extra></extra>",
    )  # fmt: skip
    figure.update_layout(
        yaxis2={"overlaying": "y", "side": "right", "title": "layers on the host", "rangemode": "tozero",
                "showgrid": False, "tickmode": "auto", "tickformat": "d", "range": [0, 1.12 * max(y)]}
    )  # fmt: skip


def staircase_text(staircase: Sequence[OffloadStep], longest: int) -> str:
    """The staircase in words: up to which context all layers stay, and how far offloading all of them reaches.

    longest: the model's longest context.
    """
    first, last = staircase[0], staircase[-1]
    if first.layers == 0 and first.last >= longest:
        return f"The whole KV cache fits the GPU up to the model's longest context, {tokens_text(longest)} tokens."
    if last.layers == 0:
        return f"A KV cache of up to {about(last.last)} tokens fits."
    stay = f"The whole KV cache fits up to {about(first.last)} tokens" if first.layers == 0 else "No size fits"
    return (
        f"{stay}; with {last.layers} layer{'' if last.layers == 1 else 's'} on the host, {about(last.last)} tokens fit."
    )


def about(tokens: int) -> str:
    """A number of tokens with three digits, such as 98.7k or 1.33M."""
    unit, name = (1 << 20, "M") if tokens >= 1 << 20 else (1 << 10, "k") if tokens >= 1 << 10 else (1, "")
    return f"{tokens / unit:.3g}{name}"
