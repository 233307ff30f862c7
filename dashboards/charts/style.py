"""What all charts share: colours, axes of tokens, legends."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import plotly.graph_objects as go

from ridgeplan.planner.quantities import tokens_text

# Okabe and Ito's colours, which people with any kind of colour blindness tell apart. Each has one meaning on a page.
BLUE, ORANGE, GREEN, PURPLE, RED, GOLD, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#b8a500", "#8c95a3",
)  # fmt: skip
SKY = "#56b4e9"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, GREY)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")  # lines differ in more than their colour
HEAT = "Cividis"
CLEAR = "rgba(0,0,0,0)"
EDGE = "rgba(30,30,30,0.55)"  # behind white texts and light lines, on light and dark pages
PLAIN = "plain decoding"
ROUND = tuple(digit * 10.0**power for power in range(-4, 7) for digit in (1, 2, 5))
MIN_TICKS = 3  # of an axis
POWERS = tuple(1 << power for power in range(25))


def styled(figure: go.Figure, *, height: int = 380, top: int = 12, **layout: object) -> go.Figure:
    """The figure with the page's margins, `top` pixels above it; its background is the page's, light or dark."""
    margin = {"l": 10, "r": 10, "t": top, "b": 40}
    return figure.update_layout(
        template="plotly_white", paper_bgcolor=CLEAR, plot_bgcolor=CLEAR, height=height, margin=margin, **layout
    )


def titled(figure: go.Figure, title: str, x: str = "", y: str = "", height: int = 460) -> go.Figure:
    """The figure with a title, its axes' titles, and a legend at its lower edge."""
    return figure.update_layout(
        template="plotly_white", title=title, xaxis_title=x, yaxis_title=y, height=height,
        margin={"l": 20, "r": 20, "t": 70, "b": 110},
        legend={"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom"},
    )  # fmt: skip


def without_walls(figure: go.Figure) -> go.Figure:
    """The figure on the page's background, light or dark; its scenes lose the walls that plotly paints white."""
    axis = {"showbackground": False, "gridcolor": GREY}
    figure.update_layout(paper_bgcolor=CLEAR, plot_bgcolor=CLEAR)
    return figure.update_scenes(xaxis=axis, yaxis=axis, zaxis=axis)


def below(bottom: float = -0.2) -> dict[str, object]:
    """A horizontal legend under the axis; `bottom` is in plot heights."""
    return {"orientation": "h", "x": 0, "y": bottom, "yanchor": "top", "traceorder": "normal"}


def bar_above(title: str) -> dict[str, object]:
    """A colour bar above its figure, which leaves narrow screens their width."""
    return {
        "title": {"text": title, "side": "top"}, "orientation": "h", "x": 0, "xanchor": "left", "y": 1.01,
        "yanchor": "bottom", "len": 0.7, "thickness": 12,
    }  # fmt: skip


def token_ticks(tokens: Iterable[float], max_ticks: int = 7) -> tuple[list[int], list[str]]:
    """At most `max_ticks` powers of two within the range of tokens, and their texts."""
    known = np.asarray(list(tokens), dtype=float)
    inside = [power for power in POWERS if known.min() <= power <= known.max()]
    kept = inside[:: max(1, -(-len(inside) // max_ticks))]
    return kept, [tokens_text(tick) for tick in kept]


def token_axis(figure: go.Figure, tokens: Iterable[float], title: str = "context (tokens)") -> go.Figure:
    """A logarithmic x axis of tokens with ticks at powers of two."""
    values, texts = token_ticks(tokens)
    return figure.update_xaxes(type="log", tickvals=values, ticktext=texts, title_text=title)


def log_ticks(values: Iterable[float]) -> dict[str, list]:
    """Ticks at 1, 2 and 5 times powers of ten, or finer ones, for a logarithmic axis that holds these values."""
    known, ticks = np.asarray(list(values), dtype=float), list[float]()
    if known.size:
        low, high = known.min(), known.max()
        ticks = [tick for tick in ROUND if low / 2 <= tick <= high * 2]
        if high > low and sum(low <= tick <= high for tick in ticks) < MIN_TICKS:
            step = 10 ** np.floor(np.log10(high - low))
            step *= 2 if high - low > 5 * step else 1
            ticks = [tick for tick in np.arange(low // step, high // step + 2) * step if tick > 0]
    return {"tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}


def faded(color: str, opacity: float) -> str:
    """`#rrggbb` with an opacity."""
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"
