"""The best plan that runs and the best of all, and what counts as running."""

from dataclasses import replace

import pytest

from ridgeplan import planner
from ridgeplan.planner.quality import Quality, quality_of
from ridgeplan.planner.question import Objective, Question
from ridgeplan.planner.search import families, search
from ridgeplan.roofline.catalog.model_shape import WeightBits
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import KVFormat
from ridgeplan.roofline.plan.policies import SELECTIONS
from ridgeplan.roofline.plan.support import missing_execution, missing_head

LLAMA = "meta-llama/Llama-3.1-8B"


def ask(profile, context=131072, **changes):
    return planner.recommend(changes.pop("model", LLAMA), "h200", context, profile=profile, **changes)


def test_the_best_of_all_is_the_fastest_that_fits_and_is_allowed(h200_profile, monkeypatch):
    """Where the selection of the fastest plan's drafts is not executed."""
    quality = Quality.NEAR_LOSSLESS
    selection = ask(h200_profile, context=16384, quality=quality).plan.speculation.selection.name
    monkeypatch.setitem(SELECTIONS, selection, replace(SELECTIONS[selection], executable=frozenset()))
    answer = ask(h200_profile, context=16384, quality=quality)
    question = Question(load_shape(LLAMA), h200_profile, answer.plan.workload, quality, Objective.LATENCY,
                        answer.memory_limit_bytes)  # fmt: skip
    allowed = [one for one in search(question) if quality.allows(quality_of(one.plan))]
    fastest = min((one for one in allowed if one.peak_bytes <= answer.memory_limit_bytes), key=lambda one: one.tpot_s)
    best = answer.best_estimated
    assert best.plan == fastest.plan
    assert missing_execution(best.plan) or missing_head(best.plan)
    assert best.predicted.best.tpot_ms == pytest.approx(1e3 * fastest.tpot_s)
    assert best.predicted.best.tpot_ms < answer.predicted.best.tpot_ms
    assert best.predicted.speedup == pytest.approx(answer.baseline.best.tpot_ms / best.predicted.best.tpot_ms)
    assert best.rejected.startswith("estimated only")
    assert answer.to_dict()["best_estimated"]["preset"] == best.preset


def test_plans_that_need_a_head_are_compared_but_not_recommended(h200_profile):
    answer = ask(h200_profile, quality="lossy")
    needing = [one for one in answer.alternatives if one.preset == "specontext-resident"]
    assert [one.rejected.partition(":")[0] for one in needing] == ["estimated only"]
    assert not missing_head(answer.plan)


def test_without_a_faster_one_there_is_no_second_answer(h200_profile):
    answer = ask(h200_profile, objective="memory")
    assert answer.best_estimated is None
    assert answer.to_dict()["best_estimated"] is None
    assert "best of all: no plan that is only estimated is faster" in answer.explain()


def test_nothing_that_is_lossy_and_only_estimated_is_faster_than_what_runs(h200_profile):
    """Evicted prompts leave little but the weights to read, and 4-bit weights run."""
    answer = ask(h200_profile, quality="lossy")
    assert (answer.plan.eviction.policy, answer.plan.weights.target_bits) == ("dapq", 4)
    assert not missing_execution(answer.plan)
    assert answer.best_estimated is None


def test_lossy_runs_4_bit_weights_with_every_cache(h200_profile):
    answer = ask(h200_profile, quality="lossy")
    assert answer.plan.weights.target_bits == 4
    assert not missing_execution(answer.plan)
    question = families(answer.plan.workload, offload=False, quality=Quality.LOSSY)
    running = [one.template for one in question if not missing_execution(one.template)]
    for target_bits, draft_bits in ((16, 16), (16, 4), (8, 8), (8, 4), (4, 4)):
        caches = {plan.kv.format for plan in running
                  if (plan.weights.target_bits, plan.weights.draft_bits) == (target_bits, draft_bits)}  # fmt: skip
        assert caches == set(KVFormat)


def test_other_qualities_do_not_search_what_they_forbid(h200_profile):
    workload = ask(h200_profile).plan.workload
    for quality in Quality:
        unnamed = [one for one in families(workload, offload=True, quality=quality) if one.name not in planner.PRESETS]
        assert unnamed
        assert all(quality.allows(quality_of(one.template)) for one in unnamed)


def converted(profile, **bits):
    """An 8B model as a GGUF of 4.5 bits: the runtime converts it to bf16, other engines read it as it is."""
    bits = {"attention": 4.5, "mlp": 4.5, "embedding": 4.5, "head": 8.5, "format": "gguf", **bits}
    return ask(profile, 4096, model=replace(load_shape(LLAMA), weight_bits=WeightBits(**bits)))


def test_a_converted_checkpoint_runs_in_the_plans_format_and_is_estimated_as_it_is(h200_profile):
    plain, found = ask(h200_profile, 4096), converted(h200_profile)
    assert (found.plan, found.predicted.best) == (plain.plan, plain.predicted.best)
    best = found.best_estimated
    assert "gguf weights as they are stored" in best.rejected
    assert best.predicted.memory_bytes["weights"] < 0.6 * found.predicted.memory_bytes["weights"]
    assert best.predicted.best.tpot_ms < found.predicted.best.tpot_ms
    assert any("weights stored as gguf are decoded" in note for note in found.notes)


def test_a_checkpoint_that_the_runtime_does_not_load_is_planned_as_it_is_with_a_note(h200_profile):
    found = converted(h200_profile, format="bitsandbytes")
    assert any("the runtime does not load weights in 'bitsandbytes' yet" in note for note in found.notes)
    assert found.baseline.memory_bytes["weights"] < 5.2e9


def test_what_no_kernel_was_timed_for_is_not_called_calibrated(h200_profile):
    full, stored = ask(h200_profile, 4096), converted(h200_profile, format="bitsandbytes")
    assert full.baseline.source == "calibrated"
    assert stored.baseline.source == stored.predicted.source == "prior"
    widths = [one.baseline.high.tpot_ms / one.baseline.best.tpot_ms for one in (full, stored)]
    assert widths[1] > widths[0]


def test_weights_of_an_architecture_that_is_not_executed_stay_as_they_are():
    """DeepSeek-V3's 671 billion weights are in fp8, 8.002 bits each, but for the tables and routers."""
    shape = load_shape("deepseek-ai/DeepSeek-V3")
    memory = planner.estimate(shape, "h200", 4096, preset="autoregressive").predicted.memory_bytes["weights"]
    assert memory == pytest.approx(671e9, rel=0.01)
    with pytest.raises(planner.NothingFits, match=r"needs at least 67\d GB"):
        planner.recommend(shape, "h200", 4096)


def test_a_reserve_is_kept_and_limits_only_lower_it(h200_profile):
    total = h200_profile.hardware.memory_bytes
    assert ask(h200_profile).memory_limit_bytes == 0.9 * total
    assert ask(h200_profile, memory_utilization=0.5).memory_limit_bytes == 0.5 * total
    assert ask(h200_profile, memory_limit=80e9).memory_limit_bytes == 80e9
    clamped = ask(h200_profile, memory_limit=1e12)
    assert clamped.memory_limit_bytes == 0.9 * total
    assert any("the memory limit of 1,000 GB is more than h200 may use, 136 GB of 151 GB" in x for x in clamped.notes)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan"), "0.9", True, None])
def test_a_share_is_a_number_up_to_1(h200_profile, share):
    with pytest.raises(planner.PlanError, match=r"memory_utilization is .*; allowed: above 0 up to 1"):
        ask(h200_profile, memory_utilization=share)
