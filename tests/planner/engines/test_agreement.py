"""`plan --backend` and `export` of the plan it recommends give the same figures, to the digit."""

from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ridgeplan.planner import (
    NothingFits,
    PlanError,
    SearchOptions,
    best_gamma,
    compare,
    estimate,
    fit,
    recommend,
    resolve,
    serving_cost,
)
from ridgeplan.planner.engines.formats import ENGINES, engine_named
from ridgeplan.planner.engines.measurements import shipped_measurements
from ridgeplan.planner.engines.rates import engine_profile, error
from ridgeplan.planner.export import Exported, ServeCommandOptions, export, schema_for
from ridgeplan.planner.export.carry import served
from ridgeplan.planner.queries.curves import memory_over_contexts, over_batches, over_contexts
from ridgeplan.planner.question import ask
from ridgeplan.planner.recommendation import Recommendation
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import list_models, load_shape

MODELS = [shape.name for shape in list_models()]
GPUS = ("h200", "h100", "b200", "a100", "l40s", "rtx4090", "mi300x")
QUESTIONS = st.fixed_dictionaries({
    "model": st.sampled_from(MODELS), "gpu": st.sampled_from(GPUS), "ctx": st.integers(1, 131_072),
    "batch": st.integers(1, 64), "new_tokens": st.sampled_from([1, 128, 1024, 4000]),
    "quality": st.sampled_from(["exact", "near-lossless"]), "backend": st.sampled_from([*ENGINES]),
})  # fmt: skip


def exported(answer: Recommendation, options: SearchOptions, **drafts: str) -> tuple[Exported, float]:
    """The plan's serve command, and the bytes that the engine needs for it."""
    shape, profile = resolve(answer.shape, answer.plan.workload.hardware)
    backend = str(options.backend)
    command = ServeCommandOptions(
        answer.plan, shape, profile, engine_named(backend), schema_for(backend), shape.name, options.memory_utilization,
        **drafts,
    )  # fmt: skip
    return export(command), served(command)[0].needed_bytes


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(QUESTIONS)
def test_a_plan_and_its_export_agree_to_the_digit(question: dict) -> None:
    shape, workload = load_shape(question["model"]), ("model", "gpu", "ctx")
    assume(question["ctx"] + question["new_tokens"] <= shape.max_context)
    options = SearchOptions(**{name: value for name, value in question.items() if name not in workload})
    try:
        answer = recommend(*(question[name] for name in workload), options)
    except NothingFits:
        assume(False)
        raise
    command, needed_bytes = exported(answer, options)
    agree(answer, command)
    assert answer.predicted.best.peak_memory_bytes == pytest.approx(needed_bytes, rel=1e-12)


@pytest.mark.parametrize(
    ("asked", "drafts"),
    [
        ({"text": "docs"}, {}),
        ({"acceptance_length": 2.8, "drafter": "head"}, {"draft_method": "eagle3", "draft_model": "x/head"}),
    ],
)
def test_a_plan_with_a_drafter_and_its_export_agree(asked: dict, drafts: dict) -> None:
    options = SearchOptions(backend="vllm", new_tokens=1024, **asked)
    answer = recommend("Llama-3.1-8B", "h200", 16384, options)
    assert answer.plan.speculation.drafter.active
    agree(answer, exported(answer, options, **drafts)[0])


def agree(answer: Recommendation, command: Exported) -> None:
    predicted = answer.predicted
    assert command.times is not None
    assert predicted.best.tpot_ms == pytest.approx(command.times.tpot_ms, rel=1e-12)
    assert f"{predicted.best.tpot_ms:.9g}" == f"{command.times.tpot_ms:.9g}"
    bands = (predicted.low.tpot_ms, predicted.high.tpot_ms), (command.times.low_ms, command.times.high_ms)
    assert bands[0] == pytest.approx(bands[1], rel=1e-12)
    assert predicted.source == command.times.source


def test_every_verb_has_the_engines_times() -> None:
    """One question by `plan`, `compare` and `cost`."""
    options = {"new_tokens": 512, "backend": "vllm"}
    answer = recommend("Llama-3.1-8B", "h200", 65_536, batch=4, **options)
    (column,) = compare("Llama-3.1-8B", "h200", 65_536, batch=4, **options).plans
    (row,) = serving_cost("Llama-3.1-8B", {"h200": 2.5}, 65_536, batches=(4,), **options).rows
    assert column.predicted.best == answer.predicted.best
    assert row.tpot_ms == pytest.approx(answer.predicted.best.tpot_ms, rel=1e-12)
    assert row.peak_memory_bytes == pytest.approx(answer.predicted.best.peak_memory_bytes)


def test_the_format_that_was_measured_to_be_the_fastest_is_chosen() -> None:
    """At every size with several formats: the fastest of their predictions is the fastest of their measurements."""
    measured, rates = shipped_measurements(), engine_profile("vllm", load_hardware("h200")).rates
    by_size = defaultdict(list)
    for row in measured.rows:
        by_size[row.model, row.context, row.batch].append(row)
    compared = [rows for rows in by_size.values() if len({(row.weights, row.kv) for row in rows}) > 1]
    assert len(compared) >= 8
    for rows in compared:
        predicted = [row.tpot_ms * (1 + error(rates, measured, row)) for row in rows]
        fastest, chosen = min(rows, key=lambda row: row.tpot_ms), rows[predicted.index(min(predicted))]
        assert (chosen.weights, chosen.kv) == (fastest.weights, fastest.kv)


@pytest.mark.parametrize(
    "question",
    [
        lambda options: compare("Llama-3.1-8B", "h200", 8192, presets="quantspec", options=options),
        lambda options: estimate("Llama-3.1-8B", "h200", 8192, preset="quantspec", options=options),
        lambda options: estimate("Llama-3.1-8B", "h200", 8192, preset="quantspec", gamma=2, options=options),
        lambda options: serving_cost("Llama-3.1-8B", {"h200": 1.0}, 8192, preset="int4-weights", options=options),
        lambda options: best_gamma("Llama-3.1-8B", "h200", options=options),
        lambda options: fit("Llama-3.1-8B", "h200", preset="dapq", options=options),
    ],
)
def test_what_an_engine_does_not_run_has_no_times_there(question: Callable[[SearchOptions], object]) -> None:
    with pytest.raises(PlanError, match=r": vllm has no .*; allowed: `backend=ridgeplan`, or"):
        question(SearchOptions(backend="vllm"))


@pytest.mark.parametrize("preset", ["snapkv", "quantspec", "specattn"])
def test_what_the_plugin_does_not_carry_has_no_times_there(preset: str) -> None:
    with pytest.raises(PlanError, match=r": vllm\+plugin carries no .*; allowed: `backend=ridgeplan`, or"):
        compare("Llama-3.1-8B", "h200", 8192, presets=preset, backend="vllm+plugin")


def test_what_spans_several_gpus_is_refused_with_a_plan_for_one() -> None:
    """`backend=ridgeplan` alone changes nothing there: engines execute it."""
    with pytest.raises(PlanError, match=r": vllm has no .*; allowed: one GPU with `backend=ridgeplan`, or"):
        fit("Llama-3.1-8B", "h200", preset="dapq", options=SearchOptions(gpus=2))


def test_an_fp8_cache_in_sglang_is_unmeasured_and_wins_where_nothing_else_fits() -> None:
    """Its kernels are not vLLM's, on which times are transferred from."""
    answers = [recommend("Llama-3.1-8B", "h200", context, batch=batch, backend="sglang")
               for context, batch in ((122_880, 1), (65_536, 28))]  # fmt: skip
    assert [answer.name for answer in answers] == ["int8-weights", "int8-weights-int8"]
    assert answers[1].predicted.source == "prior"


@pytest.mark.parametrize(("model", "gpu", "context", "batch", "backend"), [
    ("Qwen/Qwen3-4B", "a6000", 16_384, 4, "vllm"),
    ("deepseek-ai/DeepSeek-V2-Lite", "h20", 8192, 64, "sglang"),
    ("Qwen/Qwen3-8B", "h200", 16_384, 2, "sglang"),
])  # fmt: skip
def test_rates_that_nobody_measured_win_in_no_verb(
    model: str, gpu: str, context: int, batch: int, backend: str
) -> None:
    answer = recommend(model, gpu, context, batch=batch, backend=backend)
    (row,) = serving_cost(model, {gpu: 2.5}, context, batches=(batch,), backend=backend).rows
    assert row.name == answer.name


def test_the_pages_curves_are_the_engines() -> None:
    question = ask("Llama-3.1-8B", "h200", 32_768, batch=4, backend="vllm")
    plan = recommend("Llama-3.1-8B", "h200", 32_768, batch=4, backend="vllm").plan
    (predicted,) = over_contexts(plan, question, [32_768])
    curve = over_batches(plan, question, [4, 6])
    memory = memory_over_contexts(plan, question, [32_768])
    assert curve.tpot_ms[0] == pytest.approx(predicted.best.tpot_ms)
    assert memory.peak[0] == pytest.approx(predicted.best.peak_memory_bytes)
    assert curve.tpot_ms[1] > predicted.best.tpot_ms
