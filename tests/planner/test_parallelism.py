"""Degrees of parallelism: which are tried, which is chosen, and that every question follows."""

import pytest

from ridgeplan.planner import (
    NothingFits,
    PlanError,
    SearchOptions,
    Traffic,
    compare,
    estimate,
    fit,
    grid_sweep,
    recommend,
    serving_capacity,
)
from ridgeplan.planner.parallelism import possible_degrees
from ridgeplan.planner.queries import fit as fitting
from ridgeplan.planner.queries.cost import serving_cost
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.parallel import SINGLE, Parallel

LLAMA, QWEN = "Llama-3.1-70B", "Qwen3-235B-A22B"


def test_degrees_divide_the_gpus_and_named_ones_stay():
    llama, qwen = load_shape(LLAMA), load_shape(QWEN)
    assert set(possible_degrees(SearchOptions(gpus=4), llama)) == {
        SINGLE, Parallel(2), Parallel(4), Parallel(1, 2), Parallel(2, 2), Parallel(1, 4),
    }  # fmt: skip
    assert possible_degrees(SearchOptions(tensor_parallel=2, pipeline_parallel=3), llama) == (Parallel(2, 3),)
    routed = possible_degrees(SearchOptions(gpus=2, tensor_parallel=1), qwen)
    assert {Parallel(1, 1, 2), Parallel(1, 1, 2, expert=True)} <= set(routed)
    with pytest.raises(PlanError, match="the degrees 3 do not divide 4 GPUs"):
        possible_degrees(SearchOptions(gpus=4, tensor_parallel=3), llama)
    with pytest.raises(PlanError, match="the degrees 2 do not divide 2 GPUs into ranks of tp or dp for whole experts"):
        possible_degrees(SearchOptions(pipeline_parallel=2, expert_parallel=True), qwen)


def test_recommend_chooses_degrees_and_says_why_others_lost():
    answer = recommend(LLAMA, "h100", "32k", gpus=4, quality="exact")
    chosen, *others = answer.degrees
    assert (answer.plan.parallel, answer.backend, chosen.verdict) == (Parallel(4), "vllm", "")
    assert chosen.tpot_ms == pytest.approx(answer.predicted.best.tpot_ms)
    verdicts = {choice.parallel: choice.verdict for choice in others}
    assert verdicts[SINGLE].startswith("does not fit") and "stages in turn" in verdicts[Parallel(2, 2)]
    assert any("4 GPUs (tp 4) over NVLink 4: vLLM executes the plan" in note for note in answer.notes)
    assert "degrees: tp 4: " in answer.explain() and answer.to_dict()["degrees"][0]["degrees"] == "tp 4"


def test_the_chosen_degrees_have_the_recommended_plan_and_ratios_are_of_what_is_minimized():
    answer = recommend(LLAMA, "a100-80gb", 4096, gpus=4)  # where INT8 KV is faster, within the noise
    best = answer.predicted.best
    assert answer.name == "int8-weights" == answer.degrees[0].plan
    assert (answer.degrees[0].tpot_ms, answer.degrees[0].peak_bytes) == pytest.approx(
        (best.tpot_ms, best.peak_memory_bytes)
    )
    chosen, *others = recommend(LLAMA, "a100-80gb", 4096, gpus=4, objective="memory").degrees
    other = next(choice for choice in others if choice.fits)
    assert other.verdict.startswith(f"{other.peak_bytes / chosen.peak_bytes:.2f}x the memory")


def test_degrees_within_the_tolerance_lose_to_fewer_kinds_of_parallelism():
    chosen, nearest, *_ = recommend("Qwen/Qwen3-235B-A22B", "h200", "32k", gpus=8, batch=4).degrees
    assert chosen.parallel == Parallel(8) and nearest.tpot_ms < chosen.tpot_ms
    assert nearest.verdict.endswith("x the time; within 5%, and tp 8 has fewer kinds of parallelism")


def test_one_gpu_is_the_same_question_as_before():
    plain, single = (recommend("Llama-3.1-8B", "h200", "8k", backend="vllm", **more) for more in ({}, {"gpus": 1}))
    assert single.to_dict() == plain.to_dict() and not single.degrees
    with pytest.raises(PlanError, match="backend is any; allowed on several GPUs: vllm, sglang"):
        recommend("Llama-3.1-8B", "h200", "8k", gpus=2, backend="any")


def test_more_gpus_are_offered_where_one_is_too_small():
    """Every verb names the fewest GPUs that hold the size, and that many do."""
    with pytest.raises(NothingFits, match=r"allowed: 8 x h200 \(`gpus=8`\)$") as caught:
        recommend("DeepSeek-V3", "h200", 8192)
    (fix,) = caught.value.fixes
    assert recommend("DeepSeek-V3", "h200", 8192, **fix.changes).plan.parallel.gpus == 8
    with pytest.raises(NothingFits, match=r"allowed: .*8 x h200") as caught:
        recommend("DeepSeek-V3", "h200", 8192, gpus=4)
    assert {"gpus": 8} in [fix.changes for fix in caught.value.fixes]
    too_small = fit(LLAMA, "h100", batches=(1,), contexts=(32_768,), quality="exact")
    assert {"gpus": 4} in [fix.changes for fix in too_small.fixes]
    assert not fit(LLAMA, "h200", batches=(1,), contexts=(32_768,)).fixes
    with pytest.raises(NothingFits, match=r"without any KV cache; allowed: 2 x h100-sxm \(`gpus=2`\)$"):
        serving_capacity(LLAMA, "h100", [1.0], backend="vllm")
    assert (
        "no batch fits one h100-sxm; `gpus=4` fits batch 1"
        in serving_cost(LLAMA, {"h100": 2.0}, 65_536, preset="autoregressive", backend="vllm").notes
    )


@pytest.mark.parametrize("verb", ["plan", "cost", "compare", "fit", "capacity"])
def test_every_verb_says_that_an_engine_executes_what_spans_gpus(verb):
    options = {"tensor_parallel": 2, "backend": "ridgeplan"}
    answer = {
        "plan": lambda: recommend(LLAMA, "h200", 8192, **options),
        "cost": lambda: serving_cost(LLAMA, {"h200": 2.0}, 8192, batches=(1,), **options),
        "compare": lambda: compare(LLAMA, "h200", 8192, **options),
        "fit": lambda: fit(LLAMA, "h200", batches=(1,), contexts=(8192,), **options),
        "capacity": lambda: serving_capacity(LLAMA, "h200", [1.0], traffic=Traffic(requests=9), **options),
    }[verb]()
    assert any("GPUs" in note and ": vLLM executes the" in note for note in answer.notes)
    assert getattr(answer, "backend", "vllm") == "vllm"


def test_the_other_questions_follow(monkeypatch):
    """What fits, costs and takes how long on 8 GPUs where one is too small."""
    options = SearchOptions(gpus=8, pipeline_parallel=1, expert_parallel=False)
    reached = fit("DeepSeek-V3", "h200", batches=(1,), contexts=(32_768,), options=options)
    assert reached.contexts[0].context == load_shape("DeepSeek-V3").max_context and reached.batches[0].batch > 4
    monkeypatch.setattr(fitting, "list_hardware", lambda: (load_hardware("h200"),))
    (row,) = fitting.fit_gpus("DeepSeek-V3", 32_768, 1)
    assert (row.gpus, row.fits) == (8, True)
    (row,) = serving_cost(LLAMA, {"h100": 2.0}, 8192, batches=(16,), tensor_parallel=4).rows
    assert row.gpus == 4 and row.dollars_per_million == pytest.approx(8 / 3600 / row.tokens_per_s * 1e6)
    swept = grid_sweep(LLAMA, "h100", {"batch": (1, 64)}, gpus=4).table()
    assert {row["plan"].rpartition(", ")[2] for row in swept} == {"tp 4"}
    assert estimate(LLAMA, "h100", 8192, preset="int8", gpus=4).plan.parallel == Parallel(4)
