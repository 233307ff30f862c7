"""The tabs Breakdown and Speculation: where the time of a token goes, and the speed-up over gamma and acceptance."""

from __future__ import annotations

import numpy as np
import streamlit as st

from ridgeplan.dashboards import charts
from ridgeplan.dashboards.page.answer import Answer
from ridgeplan.dashboards.page.inputs import IN_URL, escaped
from ridgeplan.planner import PRESETS, Plan, preset
from ridgeplan.planner.queries.curves import speculation_map
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.validate.papers.quantspec_ridge_plane import decode_plane

BATCHES = tuple(1 << power for power in range(9))
CONTEXTS = tuple(1 << power for power in range(10, 21))


def show_breakdown(answer: Answer) -> None:
    """The way from plain decoding to the plan, the roofline, the ridge plane, and formulas when they are opened."""
    recommendation, question = answer.recommendation, answer.question
    left, right = st.columns(2)
    with left:
        st.markdown("**From plain decoding to the plan**")
        figure = charts.waterfall(recommendation.predicted, recommendation.baseline, recommendation.name)
        st.plotly_chart(figure, key="waterfall", alt="Milliseconds per token by kind of operation")
    with right:
        st.markdown("**A round, part by part**")
        figure = charts.round_parts(recommendation)
        st.plotly_chart(figure, key="round", alt="Milliseconds per token by part of a round")
    left, right = st.columns(2)
    hardware, workload = question.profile.hardware, question.workload
    with left:
        st.markdown("**Roofline**")
        figure = charts.roofline(recommendation.predicted, hardware)
        st.plotly_chart(figure, key="roofline", alt="Operations under the roofline")
    with right:
        st.markdown("**Ridge plane**: a step above it is bound by compute")
        plane = decode_plane(question.shape, hardware, CONTEXTS, BATCHES)
        figure = charts.ridge_plane(plane, (workload.context, workload.batch))
        st.plotly_chart(figure, key="ridge", alt="Arithmetic intensity over context and batch")
    formulas = st.expander("Formulas of each operation", key="formulas", on_change="rerun")
    if formulas.open:
        with formulas:
            _show_formulas(question.shape)


def _show_formulas(shape: ModelShape) -> None:
    """FLOPs and bytes of one launch of every operation of a decode step."""
    st.caption(
        escaped("One launch of each. B sequences, q queries, S tokens; L layers, d hidden, H heads, H_kv of keys and "
        "values, D a head's width, F the MLP's, V tokens of vocabulary; e bytes an element, w_t a weight.")
    )  # fmt: skip
    for name, launches, flops, moved in formula_texts(shape):
        st.markdown(f"**{escaped(name)}**, ${launches}$ launches")
        st.latex(rf"\text{{FLOPs}} = {flops}")
        st.latex(rf"\text{{bytes}} = {moved}")


@st.cache_data(max_entries=16)
def formula_texts(_shape: ModelShape) -> list[tuple[str, str, str, str]]:
    """LaTeX of each operation's launches, FLOPs and bytes read and written."""
    import sympy  # takes a second, which only those wait for who open the formulas

    from ridgeplan.roofline.symbolic import decode_formulas

    return [
        (formula.op, *(sympy.latex(term) for term in (formula.launches, formula.flops)),
         f"{sympy.latex(formula.read_bytes)} + {sympy.latex(formula.write_bytes)}")
        for formula in decode_formulas(_shape)
    ]  # fmt: skip


ACCEPTANCES = tuple(np.linspace(0.3, 1.0, 71))


def show_speculation(answer: Answer) -> None:
    """The map of one plan that drafts."""
    drafting = drafting_plans(answer)
    name = st.selectbox("Plan that drafts", list(drafting), key="drafts", bind=IN_URL)
    speedups = speculation_map(drafting[name], answer.question, ACCEPTANCES)
    st.plotly_chart(charts.speculation(speedups), key="speculation", alt="Speed-up over gamma and acceptance")
    known = speedups.predicted
    band = f"{known.best:.3f} ({known.low:.3f} to {known.high:.3f})"
    st.caption(escaped(f"Predicted acceptance {band}, {known.source}: {known.where}."))


def drafting_plans(answer: Answer) -> dict[str, Plan]:
    """Plans that draft: the recommended one first, if it does, then the presets that do."""
    recommendation = answer.recommendation
    presets = {name: preset(name, answer.question.workload) for name in PRESETS}
    listed = {other.preset: other.plan for other in recommendation.alternatives if other.preset in PRESETS}
    plans = {recommendation.name: recommendation.plan} | presets | listed | {recommendation.name: recommendation.plan}
    return {name: plan for name, plan in plans.items() if plan.speculation.active}
