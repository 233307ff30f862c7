"""The tab Compare: GPUs with one plan, or plans on one GPU, over the context."""

from __future__ import annotations

from collections.abc import Mapping

import streamlit as st

from ridgeplan.dashboards import charts
from ridgeplan.dashboards.charts.compare import crossing_text, fitting_times
from ridgeplan.dashboards.page.answer import Answer, show_alternatives
from ridgeplan.dashboards.page.inputs import IN_URL
from ridgeplan.dashboards.page.text import escaped
from ridgeplan.planner import PRESETS, Plan, Prediction
from ridgeplan.planner.curves.contexts import contexts_of, over_contexts
from ridgeplan.planner.curves.crossings import crossings
from ridgeplan.planner.prediction import predict_all
from ridgeplan.planner.search.candidates import best_of_preset
from ridgeplan.planner.search.question import Question
from ridgeplan.roofline.catalog.hardware import list_hardware

POINTS = 17  # contexts of a curve
GPUS, PLANS, ALL = "GPUs", "Plans", "All plans here"
MOST = 5  # curves
Curve = tuple[Plan, Question]


def show(answer: Answer) -> None:
    """What is compared, the curves, and the figures at the asked context."""
    what = st.segmented_control("Compare", (GPUS, PLANS, ALL), default=GPUS, required=True, key="compare", bind=IN_URL,
                                label_visibility="collapsed")  # fmt: skip
    if what == ALL:
        show_alternatives(answer)
        return
    curves = _gpus(answer) if what == GPUS else _plans(answer)
    if curves:
        _show_curves(answer.question, curves)


def _gpus(answer: Answer) -> Mapping[str, Curve]:
    """The recommended plan on each chosen GPU."""
    names = [item.name for item in list_hardware()]
    own = answer.page.gpu
    wanted = [name for name in ("h100-sxm", "a100-80gb") if name in names and name != own]
    chosen = st.multiselect("GPUs beside yours", [name for name in names if name != own], wanted, key="gpus",
                            bind=IN_URL, max_selections=MOST - 1)  # fmt: skip
    st.caption(escaped(f"Each runs {answer.recommendation.name}, which is best on {own}."))
    questions = {own: answer.question} | {name: answer.page.on(name).asked() for name in chosen}
    return {name: (answer.recommendation.plan, question) for name, question in questions.items()}


def _plans(answer: Answer) -> Mapping[str, Curve]:
    """The recommended plan and each chosen preset, at its fastest gamma and ratio."""
    found, question = answer.recommendation, answer.question
    others = [name for name in PRESETS if name != found.name]
    wanted = [name for name in ("autoregressive", "magicdec-streaming") if name in others]
    chosen = st.multiselect("Plans beside the recommended one", others, wanted, key="plans", bind=IN_URL,
                            max_selections=MOST - 1)  # fmt: skip
    plans = {found.name: found.plan} | {name: best_of_preset(name, question).plan for name in chosen}
    return {name: (plan, question) for name, plan in plans.items()}


def _show_curves(question: Question, curves: Mapping[str, Curve]) -> None:
    contexts = contexts_of(question, POINTS)
    predicted = {name: over_contexts(plan, asked, contexts) for name, (plan, asked) in curves.items()}
    limits = {name: asked.memory_limit_bytes for name, (_, asked) in curves.items()}
    figure = charts.times_over_context(contexts, predicted, limits, question.workload.context)
    st.plotly_chart(figure, key="curves", alt="Time per token over the context, with bands")
    best = {name: fitting_times(one, limits[name])[1] for name, one in predicted.items()}
    for one in crossings(contexts, best):
        st.markdown(f"- {escaped(crossing_text(one))}")
    st.dataframe([_row(name, *curve) for name, curve in curves.items()], hide_index=True, key="figures")


def _row(name: str, plan: Plan, question: Question) -> dict[str, str | float]:
    """The figures at the asked context."""
    (found,) = predict_all([plan], question.shape, question.profile, question.machine)
    return _cells(name, found, question.memory_limit_bytes)


def _cells(name: str, found: Prediction, limit_bytes: float) -> dict[str, str | float]:
    best = found.best
    return {
        "": name,
        "ms per token": round(best.tpot_ms, 3),
        "low": round(found.low.tpot_ms, 3),
        "high": round(found.high.tpot_ms, 3),
        "first token, s": round(best.ttft_ms / 1e3, 3),
        "tokens/s": round(best.tokens_per_s, 1),
        "peak GB": round(best.peak_memory_bytes / 1e9, 2),
        "fits": "yes" if best.peak_memory_bytes <= limit_bytes else "no",
        "source": found.source,
    }
