"""The tab Capacity: the best plan for every context and batch."""

from __future__ import annotations

from dataclasses import replace

import streamlit as st

from ridgeplan.dashboards import charts
from ridgeplan.dashboards.page.inputs import BATCH_STEPS, IN_URL, PageQuestion
from ridgeplan.planner.curves.contexts import contexts_of
from ridgeplan.planner.interface.quantities import duration_s
from ridgeplan.planner.search.plan_map import PlanMap, plan_map

COLUMNS = 22  # contexts of the map: a third of an octave apart for a model of 128k tokens
KEPT = 32  # maps that the server remembers
MINUTE = 60.0


def show(page: PageQuestion) -> None:
    """The map, with inputs for its contours. It also shows where plans fit if none fits what is asked."""
    price, tpot, ttft = st.columns(3)
    dollars = price.number_input("Price of a GPU-hour ($)", 0.0, value=2.5, step=0.25, key="price", bind=IN_URL)
    tpot_limit = tpot.text_input("Time per token, at most", key="tpot_max", bind=IN_URL, placeholder="such as 20ms")
    ttft_limit = ttft.text_input("First token, at most", key="ttft_max", bind=IN_URL, placeholder="such as 2s")
    # The map does not depend on the context and batch that are asked, so their sliders find it made.
    found = best_plans(replace(page, context=1, batch=1, objective="latency"))
    figure = charts.capacity_map(
        found, (page.context, page.batch), dollars or None, _milliseconds(tpot_limit), _milliseconds(ttft_limit)
    )  # fmt: skip
    st.plotly_chart(figure, key="map", alt="Time per token of the best plan over context and batch")
    st.caption("The fastest plan that runs and fits, at each size. Hatched: nothing fits. The ring is what you ask.")


@st.cache_data(max_entries=KEPT, ttl=10 * MINUTE, show_spinner="Searching all sizes")
def best_plans(page: PageQuestion) -> PlanMap:
    """The fastest plans of a question at all sizes."""
    question = page.asked()
    return plan_map(question, contexts_of(question, COLUMNS), BATCH_STEPS)


def _milliseconds(text: str) -> float | None:
    """Raises PlanError."""
    return 1e3 * duration_s(text) if text.strip() else None
