"""A sweep's rows are the answers of single questions, in the order of its axes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ridgeplan.planner import PlanError, predict, sweep, thresholds
from ridgeplan.planner.queries.maps import plan_map
from ridgeplan.planner.queries.sweep import grid_sweep, parse_axes, placement_times
from ridgeplan.planner.question import ask
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import KVCache, KVFormat, Placement, Plan, Workload
from ridgeplan.roofline.plan.presets import preset

LLAMA = "meta-llama/Llama-3.1-8B"


def test_axes_are_read_with_their_values() -> None:
    axes = parse_axes("ctx=4k..16k,batch=1,4,gpu=h100,h200,new-tokens=1k,memory-limit=24GB,40GB")
    assert axes == {
        "ctx": (4096, 8192, 16384), "batch": (1, 4), "gpu": ("h100", "h200"), "new_tokens": (1024,),
        "memory_limit": ("24GB", "40GB"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no axis; allowed: such as ctx=4k..1M,batch=1..64"),
        ("4k..8k", "is not a grid"),
        ("ctx=", "is not a grid"),
        ("width=3", "axis 'width'; allowed: each of ctx, batch"),
        ("ctx=4k,batch=1,ctx=8k", "axis 'ctx'; allowed: each of"),
        ("batch=4k", "'4k' is not a whole number"),
    ],
)
def test_what_is_no_grid_is_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError) as refusal:
        parse_axes(text)
    assert words in str(refusal.value)


def test_every_point_is_the_answer_to_its_question() -> None:
    over = {"gpu": ("h100", "h200"), "quality": ("exact", "near-lossless"), "ctx": (4096, 32_768), "batch": (1, 16)}
    rows = grid_sweep(LLAMA, "", over, new_tokens=256).table()
    request = [(row["gpu"], row["quality"], row["context"], row["batch"]) for row in rows]
    assert request == [
        (gpu, quality, context, batch)
        for gpu in ("h100-sxm", "h200") for quality in ("exact", "near-lossless")
        for context in (4096, 32_768) for batch in (1, 16)
    ]  # fmt: skip
    for row in rows[::5]:
        question = ask(LLAMA, row["gpu"], 1, quality=row["quality"], new_tokens=256)
        grid = plan_map(question, (row["context"],), (row["batch"],))
        assert row["tpot_ms"] == pytest.approx(1e3 * grid.tpot_s[0, 0])
        assert row["plan"] == grid.names[0, 0]
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / grid.tpot_s[0, 0])


def test_what_does_not_vary_is_as_given() -> None:
    (row,) = grid_sweep(LLAMA, "h200", {"preset": ("int8",)}, context="16k", batch=3).table()
    assert (row["preset"], row["plan"], row["context"], row["batch"]) == ("int8", "int8", 16_384, 3)


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"width": (1,)}, "unknown axis width; allowed: ctx, batch"),
        ({"ctx": range(1, 1000), "batch": range(1, 1000)}, "the grid has 998001 points; allowed: up to 100000"),
    ],
)
def test_grids_out_of_range_are_refused(over: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as refusal:
        grid_sweep(LLAMA, "h200", over)
    assert words in str(refusal.value)


def test_contexts_beyond_the_limit_are_stretched_by_yarn() -> None:
    """Llama-3.1's limit is 131072; each context has the factor that its own last token needs."""
    swept = grid_sweep(LLAMA, "h200", {"ctx": (8192, 262_144)}, yarn=True)
    (point,) = swept.points
    assert [row["context"] for row in swept.table()] == [8192, 262_144]
    assert [point.plans.plan(row, 0).workload.yarn_factor for row in (0, 1)] == [1.0, 2.5]


def test_contexts_beyond_the_limit_are_marked_and_the_others_answered() -> None:
    """The rows of 8k are those of a sweep of 8k alone; those of 256k have no figures and say why."""
    swept = grid_sweep(LLAMA, "h200", {"ctx": (262_144, 8192), "batch": (1, 4)})
    beyond, answered = swept.table()[:2], swept.table()[2:]
    assert answered == grid_sweep(LLAMA, "h200", {"ctx": (8192,), "batch": (1, 4)}).table()
    assert [(row["context"], row["batch"], row["fits"]) for row in beyond] == [(262_144, 1, False), (262_144, 4, False)]
    assert {value for row in beyond for name, value in row.items() if name.endswith(("_ms", "_s", "_bytes"))} == {None}
    (longest,) = grid_sweep(LLAMA, "h200", {"ctx": (131_072,)}).table()
    assert longest["plan"]
    assert {row["why_not"] for row in beyond} == {"beyond the model's limit of 131072; YaRN stretches it"}
    assert [list(row) for row in beyond] == [list(row) for row in answered]
    assert "4 questions, 2 fit" in swept.summary()


def test_models_have_limits_of_their_own() -> None:
    """SmolLM2's limit is 8192 tokens, Llama-3.1's 131072; where no model reaches any context, nothing is answered."""
    models = ("HuggingFaceTB/SmolLM2-135M", LLAMA)
    rows = grid_sweep("", "h200", {"model": models, "ctx": (65_536,)}).table()
    assert [(row["model"], row["plan"] != "") for row in rows] == list(zip(models, (False, True), strict=True))
    with pytest.raises(PlanError, match="every context is beyond the model's limit of 8192"):
        grid_sweep(models[0], "h200", {"ctx": (16_384, 65_536)})


# Sweeps and thresholds of a plan agree with its predictions.

LLAMA_SHAPE = load_shape("Llama-3.1-8B")


def test_a_sweep_over_gamma_is_the_prediction_of_each(h200_profile):
    plan = preset("quantspec", Workload("Llama-3.1-8B", "h200", 32768))
    gammas = [1, 4, 15]
    plans = [replace(plan, speculation=replace(plan.speculation, gamma=gamma)) for gamma in gammas]
    predicted = [predict(prediction, LLAMA_SHAPE, h200_profile) for prediction in plans]
    acceptance = np.array([prediction.acceptance.best for prediction in predicted])
    swept = sweep(plan, LLAMA_SHAPE, h200_profile, "tpot_s", ["gamma", "acceptance"])(
        gamma=np.array(gammas), acceptance=acceptance
    )
    assert 1e3 * swept == pytest.approx([prediction.best.tpot_ms for prediction in predicted])


def test_thresholds_leave_room_for_a_rounds_tokens(h200_profile):
    """A round of gamma + 1 = 8 tokens still fits after the first threshold, and no more."""
    small = replace(h200_profile, hardware=replace(h200_profile.hardware, memory_bytes=24 * 10**9))
    plan = replace(preset("specattn", Workload("m", "h200", 1000, new_tokens=8)), placement=Placement(True, 2048))
    first, *_ = thresholds(plan, LLAMA_SHAPE, small)

    def offloaded(context):
        workload = replace(plan.workload, context=context, new_tokens=1)
        return predict(replace(plan, workload=workload), LLAMA_SHAPE, small).offloaded_layers

    assert first > 10_000
    assert offloaded(first + 7) == 0
    assert offloaded(first + 9) > 0


def test_a_static_placement_falls_off_a_cliff_and_an_adaptive_one_does_not(h200_profile):
    """SpeContext, section 6.1: with all layers on the host a slightly longer context loses most of the speed."""
    shape = load_shape("Llama-3.1-8B")
    placement = Placement(True, 2048, memory_bytes=24 * 10**9)
    plan = Plan(Workload("m", "h200", 4096, new_tokens=64, batch=4), kv=KVCache(KVFormat.INT8), placement=placement)
    first = thresholds(plan, shape, h200_profile)[0]
    times = placement_times(plan, shape, h200_profile, [first - 200, first + 600, 2 * first])
    assert times.host_layers[0] == 0 < times.host_layers[1] < times.host_layers[2] <= 32
    assert times.adaptive_ms[0] == times.static_ms[0]
    before, after, _ = times.static_ms
    assert after > 5 * before  # more than 80% of the speed is lost
    assert times.adaptive_ms[1] < after / 5
    assert times.adaptive_ms[1] < times.adaptive_ms[2] <= times.static_ms[2]
