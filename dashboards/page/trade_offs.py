"""The tab Trade-offs: what a GPU gives against what a user gets."""

from __future__ import annotations

import streamlit as st

from ridgeplan.dashboards import charts
from ridgeplan.dashboards.page.answer import Answer
from ridgeplan.planner import Plan, Recommendation
from ridgeplan.planner.curves.batches import over_batches
from ridgeplan.planner.policies.selection.all import autoregressive
from ridgeplan.planner.quality import Quality, quality_of
from ridgeplan.planner.recommendation import Alternative

BATCHES = tuple(1 << power for power in range(10))
MOST = 12  # plans
PLAIN = "autoregressive"


def show(answer: Answer) -> None:
    """Throughput of the GPU over speed of a request."""
    question = answer.question
    plans = compared(answer.recommendation, question.quality)
    curves = {name: over_batches(plan, question, BATCHES) for name, plan in plans.items()}
    curves = {name: curve for name, curve in curves.items() if len(curve.batches)}
    running = [name for name, curve in curves.items() if not question.unsupported(curve.plan)]
    allowed = [name for name, plan in plans.items() if question.quality.allows(quality_of(plan))]
    figure = charts.trade_offs(curves, running, allowed)
    st.plotly_chart(figure, key="trade_offs", alt="Tokens per second of the GPU over those of one request")
    st.caption("Each line is a plan over batches, as far as they fit. Up and to the right is better.")


def compared(found: Recommendation, quality: Quality) -> dict[str, Plan]:
    """The recommended plan, plain decoding, the best of all, and the fastest others, first those that are allowed."""
    plans = {found.name: found.plan, PLAIN: autoregressive(found.plan.workload)}
    if found.best_estimated:
        plans[found.best_estimated.preset] = found.best_estimated.plan
    for one in sorted(found.alternatives, key=lambda one: _place(one, quality)):
        if len(plans) < MOST:
            plans.setdefault(one.preset, one.plan)
    return plans


def _place(one: Alternative, quality: Quality) -> tuple[bool, float]:
    return not quality.allows(quality_of(one.plan)), one.predicted.best.tpot_ms
