"""Only what a backend runs is recommended for it, and only in the KV format that was asked for."""

import pytest

from ridgeplan.planner import PlanError, recommend
from ridgeplan.roofline.plan.plan import KVFormat
from ridgeplan.roofline.plan.support import Backend, missing_execution

LLAMA = "meta-llama/Llama-3.1-8B"
QUALITIES = ("exact", "near-lossless", "lossy")


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("context", [4096, 120_000])
def test_anything_is_at_least_as_fast_as_what_runs(quality: str, context: int) -> None:
    """`any` allows every plan; within the 3% for which a more exact or simpler one is preferred."""
    everything, ours = (
        recommend(LLAMA, "h200", context, quality=quality, backend=backend) for backend in ("any", "ridgeplan")
    )
    assert everything.predicted.best.tpot_ms <= 1.03 * ours.predicted.best.tpot_ms
    assert everything.best_estimated is None
    assert not missing_execution(ours.plan)


@pytest.mark.parametrize("quality", QUALITIES)
def test_other_engines_get_plans_that_they_have_a_counterpart_of(quality: str) -> None:
    for_vllm, for_sglang = (
        recommend(LLAMA, "h200", 32_768, quality=quality, backend=one) for one in ("vllm", "sglang")
    )
    for found in (for_vllm, for_sglang):
        plan = found.plan
        assert (plan.speculation.active, plan.eviction.active, plan.placement.offload, plan.attention.budget) == (
            False, False, False, 0
        )  # fmt: skip
    assert for_sglang.plan.kv.format is KVFormat.FULL
    assert for_vllm.predicted.best.tpot_ms <= for_sglang.predicted.best.tpot_ms
    assert "for vllm: " in for_vllm.explain()
    assert any("sglang" in note for note in for_sglang.notes)  # that the times are not its own
    lost = next(other for other in for_vllm.alternatives if other.preset == "quantspec")
    assert "vllm has no self-speculation" in lost.rejected or quality == "exact"


@pytest.mark.parametrize("kv_format", list(KVFormat))
def test_only_the_wanted_kv_format_is_recommended(kv_format: KVFormat) -> None:
    found = recommend(LLAMA, "h200", 65_536, kv_format=str(kv_format))
    assert found.plan.kv.format is kv_format
    others = [
        one for one in found.alternatives if one.plan.kv.format is not kv_format and one.preset == "autoregressive"
    ]
    assert [one.rejected for one in others if "KV format" not in one.rejected] == []


def test_sizes_may_be_texts() -> None:
    assert recommend(LLAMA, "h200", "120000", memory_limit="40GB") == recommend(
        LLAMA, "h200", 120_000, memory_limit=40e9
    )
    with pytest.raises(PlanError, match="memory_limit is 24 bytes; allowed"):
        recommend(LLAMA, "h200", "8k", memory_limit=24)
    with pytest.raises(PlanError, match="backend is 'tgi'; allowed: any, ridgeplan, vllm, sglang"):
        recommend(LLAMA, "h200", "8k", backend="tgi")
    assert [str(one) for one in Backend] == ["any", "ridgeplan", "vllm", "sglang"]
