"""`plan --backend` and `export` of the plan it recommends give the same figures, to the digit."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ridgeplan.planner import NothingFits, SearchOptions, compare, recommend, resolve, serving_cost
from ridgeplan.planner.engines.formats import ENGINES, engine_named
from ridgeplan.planner.export import Exported, ServeCommandOptions, export, schema_for
from ridgeplan.planner.export.carry import served
from ridgeplan.planner.recommendation import Recommendation
from ridgeplan.roofline.catalog.models import list_models, load_shape

MODELS = [shape.name for shape in list_models()]
GPUS = ("h200", "h100", "b200", "a100", "l40s", "rtx4090", "mi300x")
QUESTIONS = st.fixed_dictionaries({
    "model": st.sampled_from(MODELS), "gpu": st.sampled_from(GPUS), "ctx": st.integers(1, 131_072),
    "batch": st.integers(1, 64), "new_tokens": st.sampled_from([1, 128, 1024, 4000]),
    "quality": st.sampled_from(["exact", "near-lossless"]), "backend": st.sampled_from([*ENGINES]),
})  # fmt: skip


def exported(answer: Recommendation, options: SearchOptions) -> tuple[Exported, float]:
    """The plan's serve command, and the bytes that the engine needs for it."""
    shape, profile = resolve(answer.shape, answer.plan.workload.hardware)
    backend = str(options.backend)
    asked = ServeCommandOptions(
        answer.plan, shape, profile, engine_named(backend), schema_for(backend), shape.name, options.memory_utilization
    )
    return export(asked), served(asked)[0].needed_bytes


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
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
    predicted = answer.predicted
    assert command.times is not None
    assert predicted.best.tpot_ms == pytest.approx(command.times.tpot_ms, rel=1e-12)
    assert f"{predicted.best.tpot_ms:.9g}" == f"{command.times.tpot_ms:.9g}"
    bands = (predicted.low.tpot_ms, predicted.high.tpot_ms), (command.times.low_ms, command.times.high_ms)
    assert bands[0] == pytest.approx(bands[1], rel=1e-12)
    assert (predicted.source, predicted.best.peak_memory_bytes) == (
        command.times.source, pytest.approx(needed_bytes, rel=1e-12)
    )  # fmt: skip


def test_every_verb_has_the_engines_times() -> None:
    """One question by `plan`, `compare` and `cost`."""
    asked = {"new_tokens": 512, "backend": "vllm"}
    answer = recommend("Llama-3.1-8B", "h200", 65_536, batch=4, **asked)
    (column,) = compare("Llama-3.1-8B", "h200", 65_536, batch=4, **asked).plans
    (row,) = serving_cost("Llama-3.1-8B", {"h200": 2.5}, 65_536, batches=(4,), **asked).rows
    assert column.predicted.best == answer.predicted.best
    assert row.tpot_ms == pytest.approx(answer.predicted.best.tpot_ms, rel=1e-12)
    assert row.peak_memory_bytes == pytest.approx(answer.predicted.best.peak_memory_bytes)
