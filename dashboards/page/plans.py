"""The tabs Compare, Trade-offs and Capacity: plans and GPUs beside each other, and the best plan at every size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import streamlit as st

from ridgeplan.dashboards import charts
from ridgeplan.dashboards.charts.plans import crossing_text, fitting_times
from ridgeplan.dashboards.page.answer import PRICE_SHOWN, Answer, problems_shown, show_alternatives
from ridgeplan.dashboards.page.inputs import BATCH_STEPS, IN_URL, PageQuestion, escaped, optional
from ridgeplan.planner import PRESETS, Plan, Recommendation
from ridgeplan.planner.parallelism import DegreeChoice
from ridgeplan.planner.prediction import predict_question
from ridgeplan.planner.quality import Quality, QualityFloor
from ridgeplan.planner.quantities import duration_s
from ridgeplan.planner.queries.curves import contexts_of, crossings, over_batches, over_contexts
from ridgeplan.planner.queries.maps import PlanMap, plan_map
from ridgeplan.planner.question import Objective, Question
from ridgeplan.planner.recommend import TOLERANCE
from ridgeplan.planner.recommendation import Alternative
from ridgeplan.planner.render.text import plain_words
from ridgeplan.planner.resolution import resolve
from ridgeplan.planner.search import best_of_preset
from ridgeplan.roofline.catalog.hardware import list_hardware, listed
from ridgeplan.roofline.catalog.model_shape import sizes_of
from ridgeplan.roofline.catalog.models import list_models
from ridgeplan.roofline.catalog.validation import together
from ridgeplan.roofline.plan.policies.dense import autoregressive
from ridgeplan.roofline.plan.presets import preset_name, short_name

POINTS = 17  # contexts of a curve
GPUS, MODELS, PLANS, ALL = "GPUs", "Models", "Plans", "All plans"
MAX_CURVES = 5  # curves
Curve = tuple[Plan, Question]


def show_compare(answer: Answer) -> None:
    """The choice of what to compare, the curves, and the figures at the question's context."""
    what = st.segmented_control("Compare", (GPUS, MODELS, PLANS, ALL), default=GPUS, required=True, key="compare",
                                bind=IN_URL, label_visibility="collapsed")  # fmt: skip
    if degrees := answer.recommendation.degrees:
        st.markdown("**Degrees of parallelism**")
        st.dataframe([_degrees(choice) for choice in degrees], hide_index=True, key="degrees")
    if what == ALL:
        show_alternatives(answer)
        return
    curves = {GPUS: _gpus, MODELS: _models, PLANS: _plans}[what](answer)
    if curves:
        # Of models, the one with the shortest context: all are predicted there.
        questions = [question for _, question in curves.values()]
        _show_curves(min(questions, key=lambda question: question.shape.max_context), curves)


def _degrees(choice: DegreeChoice) -> dict[str, str | float]:
    return {
        "": str(choice.parallel), "plan": choice.plan, "ms per token": round(choice.tpot_ms, 3),
        "peak GB of a GPU": round(choice.peak_bytes / 1e9, 2), "why not": choice.verdict or "chosen",
    }  # fmt: skip


def _gpus(answer: Answer) -> Mapping[str, Curve]:
    """Each chosen GPU with its own best plan."""
    gpu = answer.page.gpu
    others = [item.name for item in list_hardware() if item.name != gpu]
    defaults = [name for name in ("h100-sxm", "a100-80gb") if name in others]
    chosen = st.multiselect("Other GPUs", others, defaults, key="gpus", bind=IN_URL, max_selections=MAX_CURVES - 1)
    return _own_plans(answer, "GPU", gpu, {name: replace(answer.page, gpu=name) for name in chosen})


def _models(answer: Answer) -> Mapping[str, Curve]:
    """Each chosen model with its own best plan."""
    current, final = answer.question.shape, answer.question.workload.final_context
    others = [shape for shape in list_models() if shape.name != current.name]
    fitting = [shape for shape in others if shape.max_context >= final and sizes_of(shape) != sizes_of(current)]
    nearest = sorted(
        fitting, key=lambda shape: max(shape.parameters / current.parameters, current.parameters / shape.parameters)
    )
    chosen = st.multiselect("Other models", [shape.name for shape in others],
                            [shape.name for shape in nearest[:2]], key="models", bind=IN_URL,
                            max_selections=MAX_CURVES - 1)  # fmt: skip
    return _own_plans(answer, "model", current.name, {name: replace(answer.page, model=name) for name in chosen})


def _own_plans(answer: Answer, what: str, name: str, pages: Mapping[str, PageQuestion]) -> Mapping[str, Curve]:
    """The question's plan, under its name, and the best one of each other GPU or model; a message where none fits."""
    st.caption(f"Each {what} runs the plan that is best for it.")
    curves = {name: (answer.recommendation.plan, answer.question)}
    for other, page in pages.items():
        with problems_shown():
            plan = page.answer().plan
            curves[other] = plan, page.to_question(plan.parallel)
    return curves


def _plans(answer: Answer) -> Mapping[str, Curve]:
    """The recommended plan and each chosen preset, at its fastest gamma and ratio."""
    recommendation, question = answer.recommendation, answer.question
    others = [name for name in PRESETS if name != recommendation.name]
    defaults = [name for name in ("autoregressive", "magicdec-streaming") if name in others]
    chosen = st.multiselect("Other plans", others, defaults, key="plans", bind=IN_URL,
                            max_selections=MAX_CURVES - 1)  # fmt: skip
    plans = {recommendation.name: recommendation.plan} | {name: best_of_preset(name, question).plan for name in chosen}
    return {name: (plan, question) for name, plan in plans.items()}


def _show_curves(question: Question, curves: Mapping[str, Curve]) -> None:
    contexts = contexts_of(question, POINTS)
    predicted = {name: over_contexts(*curve, contexts) for name, curve in curves.items()}
    limits = {name: other.memory_limit_bytes for name, (_, other) in curves.items()}
    figure = charts.times_over_context(contexts, predicted, limits, question.workload.context)
    st.plotly_chart(figure, key="curves", alt="Time per token over the context, with bands")
    best = {name: fitting_times(times, limits[name])[1] for name, times in predicted.items()}
    for crossing in crossings(contexts, best):
        st.markdown(f"- {escaped(crossing_text(crossing))}")
    st.dataframe([_row(name, *curve) for name, curve in curves.items()], hide_index=True, key="figures")
    _say_changes(plan for plan, _ in curves.values())


def _say_changes(plans: Iterable[Plan]) -> None:
    """What each plan does, in words that wrap, as cells of a table do not."""
    texts = {short_name(preset_name(plan)): plain_words(plan) for plan in plans}
    st.markdown("\n".join(f"- **{escaped(name)}**: {escaped(text)}" for name, text in texts.items()))


def _row(name: str, plan: Plan, question: Question) -> dict[str, str | float]:
    """The figures at the question's context; the plan where the name is another's."""
    (prediction,) = predict_question([plan], question)
    best, short = prediction.best, short_name(preset_name(plan))
    is_plan = name in PRESETS or short_name(name) == short
    last = {"batch's last, s": round(best.ttft_ms / 1e3, 3)} if question.workload.batch > 1 else {}
    return {
        **({"": short} if is_plan else {"": name.rpartition("/")[2], "plan": short}),
        "ms per token": round(best.tpot_ms, 3),
        "range": f"{prediction.low.tpot_ms:.3g} to {prediction.high.tpot_ms:.3g}",
        "first token, s": round(best.ttft_request_ms / 1e3, 3), **last, "tokens/s": round(best.tokens_per_s, 1),
        "peak GB": round(best.peak_memory_bytes / 1e9, 2),
        "fits": "yes" if best.peak_memory_bytes <= question.memory_limit_bytes else "no", "source": prediction.source,
    }  # fmt: skip


BATCHES = tuple(1 << power for power in range(10))
MAX_PLANS = 12  # plans
PLAIN = "autoregressive"


def show_trade_offs(answer: Answer) -> None:
    """Throughput of the GPU over speed of a request."""
    question = answer.question
    plans = compared(answer.recommendation, question.options.quality)
    curves = {name: over_batches(plan, question, BATCHES) for name, plan in plans.items()}
    curves = {name: curve for name, curve in curves.items() if len(curve.batches)}
    running = {name: curve for name, curve in curves.items() if not question.unsupported(curve.plan)}
    quality, backend = question.options.quality, question.options.backend
    front = charts.front_of({name: curve for name, curve in running.items() if quality.admits(plans[name], backend)})
    figure = charts.trade_offs(curves, [*running], front)
    st.plotly_chart(figure, key="trade_offs", alt="Tokens per second of the GPU over those of one request")
    st.caption("Each line is one plan at every batch that fits. Points further up and to the right are better.")
    st.markdown("**The best choices**, as numbered in the figure")
    rows = [
        {"": number, "plan": short_name(point.plan), "batch": point.batch,
         "tokens/s of one request": round(point.per_user, 1), "tokens/s of the GPU": round(point.per_gpu)}
        for number, point in enumerate(front, 1)
    ]  # fmt: skip
    st.dataframe(rows, hide_index=True, key="front_points")
    _say_changes(plans[point.plan] for point in front)
    name = answer.recommendation.name
    if all(point.plan != name for point in front):
        st.caption(escaped(f"The recommended plan, {short_name(name)}, is not among them: others are a little faster. "
                           f"Of plans within {TOLERANCE:.0%} of the fastest the planner takes the most exact one, or "
                           "else the simplest."))  # fmt: skip


def compared(recommendation: Recommendation, quality: Quality | QualityFloor) -> dict[str, Plan]:
    """The recommended plan, plain decoding, the fastest estimated one, and the fastest others, allowed ones first."""
    plans = {recommendation.name: recommendation.plan, PLAIN: autoregressive(recommendation.plan.workload)}
    if recommendation.best_estimated:
        plans[recommendation.best_estimated.preset] = recommendation.best_estimated.plan
    backend = recommendation.backend
    for alternative in sorted(recommendation.alternatives, key=lambda other: _place(other, quality, backend)):
        if len(plans) < MAX_PLANS:
            plans.setdefault(alternative.preset, alternative.plan)
    return plans


def _place(alternative: Alternative, quality: Quality | QualityFloor, backend: str) -> tuple[bool, float]:
    return not quality.admits(alternative.plan, backend), alternative.predicted.best.tpot_ms


COLUMNS = 22  # contexts of the map: a third of an octave apart for a model of 128k tokens
KEPT = 32  # maps that the server remembers
MINUTE = 60.0


def show_capacity(page: PageQuestion) -> None:
    """The map, with inputs for its contours. It is shown even if no plan fits the question."""
    price, tpot, ttft = st.columns(3)
    catalog = listed(resolve(page.model, page.gpu)[1].hardware).dollars_per_hour
    typed = price.number_input("Price of a GPU-hour ($)", 0.0, value=None, step=0.25, key="price", bind=IN_URL,
                               placeholder=f"{catalog:.2f}, the catalog's" if catalog else "unknown")  # fmt: skip
    if typed != st.session_state.get(PRICE_SHOWN, typed):
        st.session_state[PRICE_SHOWN] = typed
        st.rerun()  # of the whole page, whose tile has the price, too
    tpot_limit = tpot.text_input("Time per token limit", key="tpot_max", bind=IN_URL, placeholder="such as 20ms")
    ttft_limit = ttft.text_input("First token limit", key="ttft_max", bind=IN_URL, placeholder="such as 2s")
    limits_s = together(partial(optional(duration_s), text) for text in (tpot_limit, ttft_limit))
    # The map does not depend on the question's context and batch, so their sliders reuse it.
    plan_map = best_plans(replace(page, context=1, options=replace(page.options, batch=1, objective=Objective.LATENCY)))
    figure = charts.capacity_map(
        plan_map, (page.context, page.options.batch), typed or catalog or None,
        *(limit_s and 1e3 * limit_s for limit_s in limits_s),
    )  # fmt: skip
    st.plotly_chart(figure, key="map", alt="Time per token of the best plan over context and batch")
    st.caption("Colour: time per token of the recommended plan. Hatched: no plan fits. The ring marks your question.")


@st.cache_data(max_entries=KEPT, ttl=10 * MINUTE, show_spinner="Searching all sizes")
def best_plans(page: PageQuestion) -> PlanMap:
    """The recommended plans of a question at all sizes."""
    question = page.to_question()
    return plan_map(question, contexts_of(question, COLUMNS), BATCH_STEPS)
