"""A map of the best plans: context by batch, coloured by time per token, hatched where nothing fits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import plotly.graph_objects as go

from ridgeplan.dashboards.charts import style
from ridgeplan.planner.quantities import size_text, three_digits, time_text, tokens_text
from ridgeplan.planner.queries.maps import PlanMap

MAX_PRICES = 4  # contours of cost


def capacity_map(
    plan_map: PlanMap, workload: tuple[int, int] = (0, 0), dollars_per_hour: float | None = None,
    tpot_limit_ms: float | None = None, ttft_limit_ms: float | None = None,
) -> go.Figure:  # fmt: skip
    """The recommended plan's milliseconds per token at each context and batch, which are evenly spaced in their logs.

    Contours: where a limit on time is met, and what a million tokens cost at a price. workload: the context and batch
    that are marked, unless they are 0.
    """
    x, y = np.log2(plan_map.contexts), np.log2(plan_map.batches)
    tpot_ms, ttft_ms = 1e3 * plan_map.tpot_s, 1e3 * plan_map.request_ttft_s
    figure = go.Figure(_heat(plan_map, x, y))
    for base, length, row in no_fit_runs(plan_map, x):
        figure.add_trace(_hatched(base, length, y[row], _spacing(y)))
    if dollars_per_hour:
        cost = dollars_per_million(plan_map, dollars_per_hour)
        for level in _levels(cost[plan_map.fits]):
            figure.add_traces(_contour("", x, y, cost, level, "white", plan_map))
            end = _end_of_line(x, y, cost, level, plan_map)
            if end:
                _label(figure, f"${level:g} per million tokens", *end)
    of_tpot = tpot_ms, tpot_limit_ms, style.RED, "per token"
    limits = of_tpot, (ttft_ms, ttft_limit_ms, style.SKY, "to the first token")
    for values, limit, color, name in limits:
        if limit:
            figure.add_traces(_contour(f"{time_text(limit)} {name}", x, y, values, limit, color, plan_map))
    if min(workload) > 0:
        figure.add_scatter(name="your question", x=[np.log2(workload[0])], y=[np.log2(workload[1])], mode="markers",
                           hoverinfo="skip",
                           marker={"symbol": "circle-open", "size": 16, "color": style.RED, "line": {"width": 3}}
                           )  # fmt: skip
    _axes(figure, plan_map, x, y)
    styled = style.styled(figure, height=520, top=70, barmode="overlay", legend=style.below(-0.2))
    return styled.update_layout(margin_b=80)  # room for the title, which a narrow margin pushes over the ticks


def dollars_per_million(plan_map: PlanMap, dollars_per_hour: float) -> np.ndarray:
    """Dollars per million output tokens at a GPU's hourly price, as by `serving_cost`: [contexts, batches]."""
    return np.asarray(1e6 * dollars_per_hour / 3600 / plan_map.served_tokens_per_s)


def no_fit_runs(plan_map: PlanMap, x: np.ndarray) -> Iterator[tuple[float, float, int]]:
    """Neighbouring contexts of one batch at which nothing fits: start and length on the axis, and the batch's index."""
    half = _spacing(x) / 2
    for row, fits in enumerate(plan_map.fits.T):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], ~fits, [0])).astype(int)))
        for first, last in edges.reshape(-1, 2):
            start, end = x[first] - half, x[last - 1] + half
            yield float(start), float(end - start), row


def _heat(plan_map: PlanMap, x: np.ndarray, y: np.ndarray) -> go.Heatmap:
    tpot_ms = np.where(plan_map.fits, 1e3 * plan_map.tpot_s, np.nan)
    lowest, highest = (np.nanmin(tpot_ms), np.nanmax(tpot_ms)) if plan_map.fits.any() else (1.0, 10.0)
    rounded = style.ROUND[::3] if highest > 1000 * lowest else style.ROUND  # only powers of ten, where they are enough
    ticks = [tick for tick in rounded if lowest <= tick <= highest] or [lowest]
    return go.Heatmap(
        x=x, y=y, z=np.log10(tpot_ms).T, colorscale=style.HEAT, reversescale=True, text=_hover(plan_map),
        hoverongaps=False, hovertemplate="%{text}<extra></extra>",
        colorbar=style.bar_above("ms per token")
        | {"tickvals": np.log10(ticks), "ticktext": list(map(three_digits, ticks))},
    )  # fmt: skip


def _hover(plan_map: PlanMap) -> list[list[str]]:
    """What each cell says, [batches, contexts]."""
    return [
        [
            f"{tokens_text(context)} tokens x {batch}<br>{plan_map.names[i, j]}<br>"
            f"{time_text(1e3 * plan_map.tpot_s[i, j])} per token, {plan_map.tokens_per_s[i, j]:,.0f} tokens/s<br>"
            f"first token after {time_text(1e3 * plan_map.request_ttft_s[i, j])}, of the batch's last request after "
            f"{time_text(1e3 * plan_map.ttft_s[i, j])}<br>{size_text(plan_map.peak_bytes[i, j])}"
            for i, context in enumerate(plan_map.contexts)
        ]
        for j, batch in enumerate(plan_map.batches)
    ]


def _hatched(base: float, length: float, y: float, width: float) -> go.Bar:
    """Cells at which nothing fits."""
    return go.Bar(
        x=[length], base=[base], y=[y], width=[width], orientation="h", showlegend=False,
        marker={"color": style.faded(style.GREY, 0.15), "line": {"width": 0},
                "pattern": {"shape": "/", "fgcolor": style.GREY, "size": 8, "solidity": 0.15}},
        hovertemplate="nothing fits<extra></extra>",
    )  # fmt: skip


def _contour(
    name: str, x: np.ndarray, y: np.ndarray, values: np.ndarray, level: float, color: str, plan_map: PlanMap
) -> list[go.Contour]:
    """The line along which a figure has one value, where plans fit, on a dark edge. A nameless one has no legend."""
    z = np.where(plan_map.fits, values, np.nan).T
    at_level = {"type": "constraint", "operation": "=", "value": level}
    line = go.Contour(x=x, y=y, z=z, contours=at_level, hoverinfo="skip", showlegend=False)
    edge = go.Contour(line).update(line={"color": style.EDGE, "width": 6})
    return [edge, line.update(name=name, line={"color": color, "width": 2.5}, showlegend=bool(name))]


def _end_of_line(
    x: np.ndarray, y: np.ndarray, values: np.ndarray, level: float, plan_map: PlanMap
) -> tuple[float, float] | None:
    """Where a line of equal cost is at the shortest context, and there the smallest batch, at which it passes.

    Cost falls with the batch, and rises where layers leave for the host. None where no column crosses it.
    """
    for column, fits in enumerate(plan_map.fits):
        known = np.flatnonzero(fits)
        above = values[column, known] - level
        crossed = np.flatnonzero(above[:-1] * above[1:] <= 0)
        if crossed.size:
            pair = slice(crossed[0], crossed[0] + 2)
            order = np.argsort(above[pair])
            return float(x[column]), float(np.interp(0, above[pair][order], y[known][pair][order]))
    return None


def _label(figure: go.Figure, text: str, x: float, y: float) -> None:
    figure.add_annotation(
        x=x, y=y, text=text, showarrow=False, xanchor="left", yanchor="bottom", bgcolor=style.EDGE,
        font={"color": "white", "size": 11},
    )  # fmt: skip


def _levels(cost: np.ndarray) -> list[float]:
    """A few round prices within the map's costs."""
    inside = [price for price in style.ROUND if cost.size and 1.1 * cost.min() < price < cost.max() / 1.1]
    return inside[:: max(1, -(-len(inside) // MAX_PRICES))]


def _spacing(values: np.ndarray) -> float:
    return float(values[1] - values[0]) if len(values) > 1 else 1.0


def _axes(figure: go.Figure, plan_map: PlanMap, x: np.ndarray, y: np.ndarray) -> None:
    ticks, texts = style.token_ticks(plan_map.contexts)
    wide, high = _spacing(x) / 2, _spacing(y) / 2
    figure.update_xaxes(title={"text": "context (tokens)", "standoff": 44}, range=[x[0] - wide, x[-1] + wide])
    figure.update_xaxes(tickvals=np.log2(ticks), ticktext=texts, showgrid=False)
    figure.update_yaxes(title_text="batch", range=[y[0] - high, y[-1] + high])
    figure.update_yaxes(tickvals=y, ticktext=list(map(str, plan_map.batches)), showgrid=False)
