"""Figures of simulated traffic: percentiles against the rate, and throughput against the time per token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import plotly.graph_objects as go

from ridgeplan.dashboards.charts.style import BLUE, GREEN, GREY, RED, SERIES, below, log_ticks, styled
from ridgeplan.planner.traffic.serving import PERCENTILES, ServingCapacity, pareto_front

COLORS = dict(zip(PERCENTILES, (GREEN, BLUE, RED), strict=True))
LATENCIES = {"ttft": "time to first token", "tpot": "time per output token"}


def latency_figure(result: ServingCapacity, name: str) -> go.Figure:
    """The percentiles of a name of `LATENCIES` over the rate, with their limit."""
    figure, rows = go.Figure(), result.table()
    for percentile in PERCENTILES:
        figure.add_scatter(
            name=f"p{percentile}", x=[row["rate"] for row in rows], y=[row[f"{name}_p{percentile}_ms"] for row in rows],
            mode="lines+markers", line={"color": COLORS[percentile]}, text=[f"{row['gpus']} GPUs" for row in rows],
            hovertemplate="%{x:g} requests/s: %{y:.4g} ms<br>%{text}",
        )  # fmt: skip
    if limit_s := {"ttft": result.limits.ttft_s, "tpot": result.limits.tpot_s}[name]:
        figure.add_hline(1e3 * limit_s, line={"color": GREY, "dash": "dot"})
    values = [row[f"{name}_p{percentile}_ms"] for row in rows for percentile in PERCENTILES]
    figure.update_yaxes(type="log", title_text="ms", **log_ticks(filter(None, values)))
    figure.update_xaxes(title_text="requests/s")
    return styled(figure, legend=below(-0.25))


def front_figure(results: Sequence[ServingCapacity]) -> go.Figure:
    """Output tokens/s of a GPU over the median TPOT at each rate, by degrees of parallelism, and their Pareto front."""
    figure = go.Figure()
    points = [
        (row.tpot_p50_ms, row.output_tokens_per_s_per_gpu, result.degrees, row.rate)
        for result in results
        for row in result.rows
    ]
    for result, color in zip(results, cycle(SERIES), strict=False):
        shown = [point for point in points if point[2] == result.degrees]
        figure.add_scatter(
            x=[point[0] for point in shown], y=[point[1] for point in shown], name=result.degrees,
            mode="markers+text", textposition="bottom right", cliponaxis=False, marker={"color": color, "size": 9},
            text=[f"{rate:g}/s" for *_, rate in shown], hovertemplate="%{text}: %{x:.4g} ms, %{y:,.0f} tokens/s",
        )  # fmt: skip
    front = [points[place] for place in pareto_front([point[:2] for point in points])]
    figure.add_scatter(
        x=[point[0] for point in front], y=[point[1] for point in front], name="Pareto front", mode="lines",
        line={"color": GREY, "dash": "dot"}, hoverinfo="skip",
    )  # fmt: skip
    figure.update_xaxes(title_text="median TPOT, ms")
    figure.update_yaxes(title_text="output tokens/s per GPU", rangemode="tozero")
    return styled(figure, legend=below(-0.25)).update_layout(margin_r=44)  # room for the last rate
