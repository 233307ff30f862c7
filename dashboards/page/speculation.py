"""The tab Speculation: the speed-up over gamma and acceptance."""

from __future__ import annotations

import numpy as np
import streamlit as st

from ridgeplan.dashboards import charts
from ridgeplan.dashboards.page.answer import Answer
from ridgeplan.dashboards.page.inputs import IN_URL
from ridgeplan.dashboards.page.text import escaped
from ridgeplan.planner import PRESETS, Plan, preset
from ridgeplan.planner.curves.speculation_map import speculation_map

ACCEPTANCES = tuple(np.linspace(0.3, 1.0, 71))


def show(answer: Answer) -> None:
    """The map of one plan that drafts."""
    drafting = drafting_plans(answer)
    name = st.selectbox("Drafts of", list(drafting), key="drafts", bind=IN_URL)
    found = speculation_map(drafting[name], answer.question, ACCEPTANCES)
    st.plotly_chart(charts.speculation(found), key="speculation", alt="Speed-up over gamma and acceptance")
    known = found.predicted
    band = f"{known.best:.3f} ({known.low:.3f} to {known.high:.3f})"
    st.caption(escaped(f"Predicted acceptance {band}, {known.source}: {known.where}."))


def drafting_plans(answer: Answer) -> dict[str, Plan]:
    """Plans that draft: the recommended one first, if it does, then the presets that do."""
    found = answer.recommendation
    presets = {name: preset(name, answer.question.workload) for name in PRESETS}
    listed = {one.preset: one.plan for one in found.alternatives if one.preset in PRESETS}
    plans = {found.name: found.plan} | presets | listed | {found.name: found.plan}
    return {name: plan for name, plan in plans.items() if plan.speculation.active}
