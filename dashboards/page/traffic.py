"""The tab Traffic: percentiles against the rate of requests, and throughput of a GPU against the time per token."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import streamlit as st

from ridgeplan.dashboards import charts
from ridgeplan.dashboards.charts.traffic import LATENCIES
from ridgeplan.dashboards.page.inputs import IN_URL, PageQuestion, escaped, optional
from ridgeplan.planner.engines.formats import ENGINES
from ridgeplan.planner.quantities import duration_s
from ridgeplan.planner.queries.cost import LatencyLimits
from ridgeplan.planner.render.verdict import sentence
from ridgeplan.planner.traffic.requests import parse_lengths, parse_rates
from ridgeplan.planner.traffic.serving import ServingCapacity, Traffic, capacity_by_degrees, serving_capacity
from ridgeplan.roofline.catalog.validation import together
from ridgeplan.roofline.plan.support import Backend

REQUESTS = 1000  # simulated at every rate
KEPT, MINUTE = 16, 60.0


def show_traffic(page: PageQuestion) -> None:
    """The inputs of the simulation, both figures, and its caveats."""
    rate, isl, osl, ttft, tpot = st.columns(5)
    rates = rate.text_input("Requests per second", "0.25,0.5,1,2", key="rates", bind=IN_URL)
    prompts = isl.text_input("Prompt lengths", "lognormal:8k", key="isl", bind=IN_URL)
    outputs = osl.text_input("Output lengths", "512", key="osl", bind=IN_URL)
    ttft_limit = ttft.text_input("Limit: first token, p99", key="ttft_p99", bind=IN_URL, placeholder="such as 2s")
    tpot_limit = tpot.text_input("Limit: per token, p99", key="tpot_p99", bind=IN_URL, placeholder="such as 30ms")
    parsers = (parse_rates, parse_lengths, parse_lengths, optional(duration_s), optional(duration_s))
    numbers, _, _, *longest = together(map(partial, parsers, (rates, prompts, outputs, ttft_limit, tpot_limit)))
    result, by_degrees = simulated(page, numbers, prompts, outputs, LatencyLimits(*longest))
    st.markdown("\n".join(f"- {escaped(verdict)}" for verdict in result.verdicts))
    server = f"{result.model} on {result.gpu} in {ENGINES[result.backend].title}, without drafts"
    st.caption(escaped(f"{server}; {REQUESTS:,} requests are simulated at each rate."))
    for column, (name, title) in zip(st.columns(2), LATENCIES.items(), strict=True):
        with column:
            st.markdown(f"**{title.capitalize()}**")
            st.plotly_chart(charts.latency_figure(result, name), key=name, alt=f"Percentiles of the {title} by rate")
    st.markdown("**Throughput of a GPU against the time per token**, with one copy of the model")
    st.plotly_chart(charts.front_figure(by_degrees), key="front", alt="Pareto front of throughput and time per token")
    lines = (*(row.spending for row in result.rows if row.spending), *result.notes)
    st.caption("\n".join(f"- {escaped(sentence(line))}" for line in lines))


@st.cache_data(max_entries=KEPT, ttl=10 * MINUTE, show_spinner="Simulating requests")
def simulated(
    page: PageQuestion, rates: tuple[float, ...], prompts: str, outputs: str, limits: LatencyLimits
) -> tuple[ServingCapacity, tuple[ServingCapacity, ...]]:
    """The fewest GPUs within the limits at each rate, and one replica of every degree. Engines serve: vLLM by default.

    Raises ValueErrors that say what to change.
    """
    backend = Backend.SGLANG if page.options.backend is Backend.SGLANG else Backend.VLLM
    options, traffic = replace(page.options, backend=backend), Traffic(requests=REQUESTS)
    lengths: dict[str, Any] = {"isl": prompts, "osl": outputs, "options": options}
    result = serving_capacity(page.model, page.gpu, rates, traffic=traffic, limits=limits, **lengths)
    single = replace(traffic, replicas=1)
    return result, capacity_by_degrees(page.model, page.gpu, rates, traffic=single, **lengths)
