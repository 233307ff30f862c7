"""Figures of simulated traffic: percentiles against the rate, and throughput against the time per token."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ridgeplan.dashboards.charts.style import BLUE, GREEN, GREY, RED, log_ticks
from ridgeplan.planner.traffic.serving import PERCENTILES, ServingCapacity, pareto_front

COLORS = dict(zip(PERCENTILES, (GREEN, BLUE, RED), strict=True))
TITLES = ("time to first token", "time per output token", "throughput against time per token")


def capacity_figure(result: ServingCapacity) -> go.Figure:
    """TTFT and TPOT by percentile over the rate with their limits, and tokens/s of a GPU over the median TPOT."""
    rows, limits = result.table(), result.limits
    rates = [row["rate"] for row in rows]
    figure = make_subplots(rows=1, cols=3, subplot_titles=TITLES, horizontal_spacing=0.08)
    for column, name, limit_s in ((1, "ttft", limits.ttft_s), (2, "tpot", limits.tpot_s)):
        for percentile in PERCENTILES:
            figure.add_scatter(
                row=1, col=column, name=f"p{percentile}", legendgroup=f"p{percentile}", showlegend=column == 1, x=rates,
                y=[row[f"{name}_p{percentile}_ms"] for row in rows], mode="lines+markers",
                line={"color": COLORS[percentile]}, text=[f"{row['gpus']} GPUs" for row in rows],
                hovertemplate="%{x:g} requests/s: %{y:.4g} ms<br>%{text}",
            )  # fmt: skip
        if limit_s is not None:
            figure.add_hline(1e3 * limit_s, row=1, col=column, line={"color": GREY, "dash": "dot"})
        values = [row[f"{name}_p{percentile}_ms"] for row in rows for percentile in PERCENTILES]
        figure.update_yaxes(row=1, col=column, type="log", title_text="ms", **log_ticks(filter(None, values)))
        figure.update_xaxes(row=1, col=column, title_text="requests/s")
    figure.add_scatter(
        row=1, col=3, x=[row["tpot_p50_ms"] for row in rows], y=[row["output_tokens_per_s_per_gpu"] for row in rows],
        mode="lines+markers+text", text=[f"{rate:g}/s" for rate in rates], textposition="top center", showlegend=False,
        line={"color": BLUE}, hovertemplate="%{text}: %{x:.4g} ms, %{y:,.0f} tokens/s",
    )  # fmt: skip
    figure.update_xaxes(row=1, col=3, title_text="median TPOT, ms")
    figure.update_yaxes(row=1, col=3, title_text="output tokens/s per GPU", rangemode="tozero")
    return figure.update_layout(template="plotly_white", title=result.summary(), title_font_size=14)


def front_figure(results: Sequence[ServingCapacity]) -> go.Figure:
    """Output tokens/s of a GPU over the median TPOT at each rate, by degrees of parallelism, and their Pareto front."""
    figure = go.Figure()
    points = [
        (row.tpot_p50_ms, row.output_tokens_per_s_per_gpu, result.degrees, row.rate)
        for result in results
        for row in result.rows
    ]
    for result in results:
        shown = [point for point in points if point[2] == result.degrees]
        figure.add_scatter(
            x=[point[0] for point in shown], y=[point[1] for point in shown], name=result.degrees, mode="markers",
            text=[f"{rate:g}/s" for *_, rate in shown], hovertemplate="%{text}: %{x:.4g} ms, %{y:,.0f} tokens/s",
        )  # fmt: skip
    front = [points[place] for place in pareto_front([point[:2] for point in points])]
    figure.add_scatter(
        x=[point[0] for point in front], y=[point[1] for point in front], name="Pareto front", mode="lines",
        line={"color": GREY, "dash": "dot"}, hoverinfo="skip",
    )  # fmt: skip
    figure.update_xaxes(title_text="median TPOT, ms")
    figure.update_yaxes(title_text="output tokens/s per GPU", rangemode="tozero")
    return figure.update_layout(template="plotly_white")
