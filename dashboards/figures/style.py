"""The look that all figures of papers share: colours, axes, legends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import plotly.graph_objects as go

# Okabe and Ito's colours, which people with any kind of colour blindness tell apart.
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#666666")
LIMIT_COLOR = "#d55e00"  # a capacity or a roof
POWERS_OF_TWO = tuple(1 << power for power in range(21))


def colors_of(names: Iterable[str]) -> Mapping[str, str]:
    """A colour for each distinct name, in the order of their first appearance."""
    return {name: COLORS[index % len(COLORS)] for index, name in enumerate(dict.fromkeys(names))}


def styled(figure: go.Figure, title: str, x: str = "", y: str = "", height: int = 460) -> go.Figure:
    """The figure with a title, its axes' titles, and a legend at its lower edge."""
    return figure.update_layout(
        template="plotly_white", title=title, xaxis_title=x, yaxis_title=y, height=height,
        margin={"l": 20, "r": 20, "t": 70, "b": 110},
        legend={"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom"},
    )  # fmt: skip


def tokens_axis(figure: go.Figure, tokens: Sequence[float]) -> go.Figure:
    """A logarithmic x axis of token counts, with ticks at powers of two."""
    ticks = [power for power in POWERS_OF_TWO if min(tokens) <= power <= max(tokens)]
    return figure.update_xaxes(type="log", tickvals=ticks, ticktext=[tokens_text(tick) for tick in ticks])


def tokens_text(tokens: int) -> str:
    """`131072` as `128k`."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)
