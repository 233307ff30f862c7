"""Plans side by side have the figures that each has alone."""

import pytest

from ridgeplan.planner import NothingFits, predict, preset, recommend, resolve, workload_for
from ridgeplan.planner.plan_file import SavedPlan
from ridgeplan.planner.queries.compare import compare, compare_saved

LLAMA, QWEN = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B"


def test_each_gpu_has_its_recommended_plan() -> None:
    comparison = compare([LLAMA], ["h100", "h200"], "32k", batch=4)
    recommended = [recommend(LLAMA, gpu, 32_768, batch=4) for gpu in ("h100", "h200")]
    assert [plan.plan for plan in comparison.plans] == [plan.plan for plan in recommended]
    assert [plan.predicted.best for plan in comparison.plans] == [plan.predicted.best for plan in recommended]
    assert [plan.predicted.speedup for plan in comparison.plans] == [plan.predicted.speedup for plan in recommended]
    assert [plan.note for plan in comparison.plans] == ["", ""]


def test_what_there_is_one_of_needs_no_list() -> None:
    comparison = compare(LLAMA, "h200", 8192, presets="int8")
    assert comparison.plans == compare([LLAMA], ["h200"], 8192, presets=["int8"]).plans
    assert compare(resolve(LLAMA, "h200")[0], "h200", 8192).plans[0].plan == recommend(LLAMA, "h200", 8192).plan


def test_a_preset_is_compared_as_recommend_lists_it() -> None:
    names = ("quantspec", "int8", "magicdec-quest")
    comparison = compare([LLAMA], ["h200"], 131_072, presets=names)
    listed = {plan.preset: plan for plan in recommend(LLAMA, "h200", 131_072).alternatives}
    assert [plan.name for plan in comparison.plans] == list(names)
    for plan in comparison.plans:
        assert plan.plan == listed[plan.name].plan
        assert plan.predicted.best.tpot_ms == pytest.approx(listed[plan.name].predicted.best.tpot_ms)
    assert [plan.note for plan in comparison.plans] == ["", "", ""]


def test_models_are_the_outer_loop_and_what_does_not_fit_is_missing() -> None:
    comparison = compare([LLAMA, "meta-llama/Llama-3.1-70B", QWEN], ["rtx4090"], 8192)
    assert [plan.plan.workload.model for plan in comparison.plans] == [LLAMA, QWEN]
    ((what, why),) = comparison.missing
    assert what == "meta-llama/Llama-3.1-70B on rtx4090"
    assert why.startswith("nothing fits")


def test_where_nothing_has_an_answer_that_is_the_error() -> None:
    with pytest.raises(NothingFits, match=r"on rtx4090.*; nothing fits.* on l40s"):
        compare(["meta-llama/Llama-3.1-70B"], ["rtx4090", "l40s"], 8192)


def test_saved_plans_keep_their_own_sizes_on_every_gpu() -> None:
    shape, profile = resolve(LLAMA, "h200")
    plans = [preset("quantspec", workload_for(shape, profile, size, 64, 2, yarn=False)) for size in (4096, 16_384)]
    comparison = compare_saved([SavedPlan(plan) for plan in plans], ["h200", "rtx4060-laptop"])
    rows = comparison.table()
    assert [(row["context"], row["gpu"]) for row in rows] == [
        (4096, "h200"), (4096, "rtx4060-laptop"), (16_384, "h200"), (16_384, "rtx4060-laptop")
    ]  # fmt: skip
    assert rows[0]["tpot_ms"] == predict(plans[0], shape, profile).best.tpot_ms
    assert [row["note"] for row in rows] == ["", "does not fit", "", "does not fit"]


def test_saved_plans_are_held_to_no_quality() -> None:
    shape, profile = resolve(LLAMA, "h200")
    plans = [preset(name, workload_for(shape, profile, 8192, 64, 1, yarn=False)) for name in ("int4-weights", "snapkv")]
    assert [row["note"] for row in compare_saved([SavedPlan(plan) for plan in plans]).table()] == ["", ""]
