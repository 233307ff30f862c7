"""What a recommendation says of itself."""

from dataclasses import replace

import pytest

from ridgeplan import planner
from ridgeplan.planner import PlanError, recommend
from ridgeplan.planner.quality import Quality, quality_of
from ridgeplan.planner.question import Question, SearchOptions
from ridgeplan.planner.render.text import crossover_context
from ridgeplan.planner.search import families, search
from ridgeplan.roofline.catalog.model_shape import WeightBits
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import KVFormat, Workload
from ridgeplan.roofline.plan.policy import SELECTIONS
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.plan.support import Backend, missing_execution, missing_head, uncalibrated


def explained(profile, context, **changes):
    answer = planner.recommend("meta-llama/Llama-3.1-8B", "h200", context, profile=profile, **changes)
    return answer, answer.explain()


@pytest.mark.parametrize(
    "context, batch, bottleneck",
    [
        (4096, 1, "the weights are the bottleneck"),
        (65536, 1, "the weights are the bottleneck"),
        (114688, 1, "the weights and the KV cache take about equal time"),
        (98304, 2, "the KV cache is the bottleneck"),
        (131072, 4, "the KV cache is the bottleneck"),
    ],
    ids=["0.6 GB of KV", "8.7 GB of KV", "15.1 GB of KV", "25.9 GB of KV", "69 GB of KV"],  # 15 GB of weights
)
def test_the_bottleneck_is_what_a_plain_step_reads_most(h200_profile, context, batch, bottleneck):
    answer, text = explained(h200_profile, context, batch=batch)
    # Reading is all there is to a step at these sizes, and both classes reach 85% of the bandwidth.
    kv_bytes, weight_bytes = (context + 512) * 131_072 * batch, 2 * 7_504_658_432
    share = kv_bytes / (kv_bytes + weight_bytes)
    percent = int(text.split("plain decoding spends ")[1].split("%")[0])
    assert percent == pytest.approx(100 * share, abs=4)
    assert f"on attention: {bottleneck}; at batch " in text
    assert answer.name in text


@pytest.mark.parametrize(("context", "batch"), [(4096, 1), (131_072, 1), (32_768, 8)])
def test_weights_and_kv_cross_where_they_are_as_large(h200_profile, context, batch):
    """7.5 billion weights that products read, of 2 bytes, and 131,072 bytes of KV a token."""
    answer, text = explained(h200_profile, context, batch=batch)
    crossover = crossover_context(answer.baseline, answer.shape, answer.plan.workload)
    expected = 2 * 7_504_658_432 / 131_072 / batch
    assert crossover == pytest.approx(expected, rel=0.03)  # queries and partial results are read, too
    tokens = text.split("helps more than quantizing KV up to about ")[1].split(" tokens")[0]
    assert int(tokens.replace(",", "")) == pytest.approx(crossover, rel=0.005)


@pytest.mark.parametrize("context", [2048, 16_384])
def test_kv_within_a_window_never_outweighs_the_weights(h200_profile, context):
    """At most 4096 tokens of 131,072 bytes, 0.5 GB, beside 14 GB of weights."""
    text = planner.recommend("mistralai/Mistral-7B-v0.1", "h200", context, profile=h200_profile).explain()
    assert "quantizing weights helps more than quantizing KV at any context\n" in text


@pytest.mark.parametrize("context", [2048, 16_384])
def test_of_layers_with_and_without_a_window_both_kinds_count(h200_profile, context):
    """7,110,393,856 weights that products read. Each layer holds 4096 bytes of KV a token, half of them up to 4096."""
    shape = replace(load_shape("mistralai/Mistral-7B-v0.1"), window_layers=16)
    answer = planner.recommend(shape, "h200", context, batch=16, profile=h200_profile)
    layers_bytes = 16 * 16 * 4096
    expected = (2 * 7_110_393_856 - layers_bytes * 4096) / layers_bytes
    crossover = crossover_context(answer.baseline, shape, answer.plan.workload)
    assert crossover == pytest.approx(expected, rel=0.03)


def test_it_names_the_rounds_arithmetic_and_the_memory(h200_profile):
    answer, text = explained(h200_profile, 131072)
    predicted = answer.predicted
    assert f"{predicted.gamma} tokens are drafted" in text
    assert f"yields {predicted.tokens_per_round:.2f} tokens" in text
    assert f"{predicted.speedup:.2f}x plain decoding" in text
    gigabytes = predicted.best.peak_memory_bytes / 1e9
    assert f"peak memory: {gigabytes:.3g} GB of {answer.memory_limit_bytes / 1e9:.3g} GB" in text
    assert "quality cost: INT8 KV" in text
    assert text.count("\n  rejected: ") == 5


def test_plain_decoding_has_no_round(h200_profile):
    _, text = explained(h200_profile, 131072, quality="exact", objective="memory")
    assert "no speculation: a step decodes one token" in text


def test_times_have_three_digits_and_no_exponent(h200_profile):
    roomy = replace(h200_profile, hardware=replace(h200_profile.hardware, memory_bytes=10**15))
    _, text = explained(roomy, 2048, batch=4096)
    assert "e+" not in text


# The best plan that runs and the fastest estimated one, and what counts as running.

LLAMA = "meta-llama/Llama-3.1-8B"


def ask(profile, context=131072, **changes):
    return planner.recommend(changes.pop("model", LLAMA), "h200", context, profile=profile, **changes)


def test_the_best_of_all_is_the_fastest_that_fits_and_is_allowed(h200_profile, monkeypatch):
    """Where the selection of the fastest plan's drafts is not executed."""
    quality = Quality.NEAR_LOSSLESS
    selection = ask(h200_profile, context=16384, quality=quality).plan.speculation.selection.name
    monkeypatch.setattr(SELECTIONS[selection], "executable", False)
    answer = ask(h200_profile, context=16384, quality=quality)
    options = SearchOptions(quality=quality)
    question = Question.of(load_shape(LLAMA), h200_profile, answer.plan.workload, options)
    allowed = [candidate for candidate in search(question) if quality.allows(quality_of(candidate.plan))]
    fastest = min(
        (candidate for candidate in allowed if candidate.peak_bytes <= answer.memory_limit_bytes),
        key=lambda candidate: candidate.tpot_s,
    )
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
    needing = [alternative for alternative in answer.alternatives if alternative.preset == "specontext-resident"]
    assert [candidate.rejected.partition(":")[0] for candidate in needing] == ["estimated only"]
    assert not missing_head(answer.plan)


def test_without_a_faster_one_there_is_no_second_answer(h200_profile):
    answer = ask(h200_profile, objective="memory")
    assert answer.best_estimated is None
    assert answer.to_dict()["best_estimated"] is None
    assert "fastest estimated: no plan that is only estimated is faster" in answer.explain()


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
    running = [option.template for option in question if not missing_execution(option.template)]
    for target_bits, draft_bits in ((16, 16), (16, 4), (8, 8), (8, 4), (4, 4)):
        caches = {plan.kv.format for plan in running
                  if (plan.weights.target_bits, plan.weights.draft_bits) == (target_bits, draft_bits)}  # fmt: skip
        assert caches == set(KVFormat)


def test_other_qualities_do_not_search_what_they_forbid(h200_profile):
    workload = ask(h200_profile).plan.workload
    for quality in Quality:
        unnamed = [
            family for family in families(workload, offload=True, quality=quality) if family.name not in planner.PRESETS
        ]
        assert unnamed
        assert all(quality.allows(quality_of(family.template)) for family in unnamed)


def converted(profile, **bits):
    """An 8B model as a GGUF of 4.5 bits: the runtime converts it to bf16, other engines read it as it is."""
    bits = {"attention": 4.5, "mlp": 4.5, "embedding": 4.5, "head": 8.5, "format": "gguf", **bits}
    return ask(profile, 4096, model=replace(load_shape(LLAMA), weight_bits=WeightBits(**bits)))


def test_a_converted_checkpoint_runs_in_the_plans_format_and_is_estimated_as_it_is(h200_profile):
    plain, recommendation = ask(h200_profile, 4096), converted(h200_profile)
    assert (recommendation.plan, recommendation.predicted.best) == (plain.plan, plain.predicted.best)
    best = recommendation.best_estimated
    assert "gguf weights as they are stored" in best.rejected
    assert best.predicted.memory_bytes["weights"] < 0.6 * recommendation.predicted.memory_bytes["weights"]
    assert best.predicted.best.tpot_ms < recommendation.predicted.best.tpot_ms
    assert any("weights stored as gguf are decoded while loading" in note for note in recommendation.notes)


def test_a_checkpoint_that_the_runtime_does_not_load_is_planned_as_it_is_with_a_note(h200_profile):
    recommendation = converted(h200_profile, format="bitsandbytes")
    assert any("the runtime does not load weights in 'bitsandbytes' yet" in note for note in recommendation.notes)
    assert recommendation.baseline.memory_bytes["weights"] < 5.2e9


def test_what_no_kernel_was_timed_for_is_not_called_calibrated(h200_profile):
    full, stored = ask(h200_profile, 4096), converted(h200_profile, format="bitsandbytes")
    assert full.baseline.source == "calibrated"
    assert stored.baseline.source == stored.predicted.source == "prior"
    widths = [prediction.baseline.high.tpot_ms / prediction.baseline.best.tpot_ms for prediction in (full, stored)]
    assert widths[1] > widths[0]


def test_weights_of_an_architecture_that_is_not_executed_stay_as_they_are():
    """DeepSeek-V3.2's 672 billion weights are in fp8, 8.002 bits each, but for the tables and routers."""
    shape = load_shape("deepseek-ai/DeepSeek-V3.2")
    memory = planner.estimate(shape, "h200", 4096, preset="autoregressive").predicted.memory_bytes["weights"]
    assert memory == pytest.approx(672e9, rel=0.01)
    with pytest.raises(planner.NothingFits, match=r"needs at least 67\d GB"):
        planner.recommend(shape, "h200", 4096)


def test_a_reserve_is_kept_and_limits_only_lower_it(h200_profile):
    total = h200_profile.hardware.memory_bytes
    assert ask(h200_profile).memory_limit_bytes == 0.9 * total
    assert ask(h200_profile, memory_utilization=0.5).memory_limit_bytes == 0.5 * total
    assert ask(h200_profile, memory_limit=80e9).memory_limit_bytes == 80e9
    clamped = ask(h200_profile, memory_limit=150e9)
    assert clamped.memory_limit_bytes == 0.9 * total
    assert any("the memory limit of 150 GB is more than h200 may use, 136 GB of 151 GB" in x for x in clamped.notes)
    with pytest.raises(planner.PlanError, match="memory_limit is 900 GB; allowed: up to 151 GB, the memory of h200"):
        ask(h200_profile, memory_limit=900e9)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan"), "0.9", True, None])
def test_a_share_is_a_number_up_to_1(h200_profile, share):
    with pytest.raises(planner.PlanError, match=r"memory_utilization is .*; allowed: above 0 up to 1"):
        ask(h200_profile, memory_utilization=share)


# Only what a backend runs is recommended for it, and only in the KV format that was asked for.

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
        recommend(LLAMA, "h200", 32_768, quality=quality, backend=engine) for engine in ("vllm", "sglang")
    )
    for recommendation in (for_vllm, for_sglang):
        plan = recommendation.plan
        assert (plan.speculation.active, plan.eviction.active, plan.placement.offload, plan.attention.budget) == (
            False, False, False, 0
        )  # fmt: skip
    assert for_sglang.plan.kv.format is KVFormat.FULL
    assert for_vllm.predicted.best.tpot_ms <= for_sglang.predicted.best.tpot_ms
    assert "for vLLM: " in for_vllm.explain()
    assert any("no profile of SGLang" in note for note in for_sglang.notes)
    for other in for_vllm.alternatives:  # what it does not run has no times there
        assert not other.plan.speculation.active and other.plan.weights.target_bits != 4


@pytest.mark.parametrize("kv_format", list(KVFormat))
def test_only_the_wanted_kv_format_is_recommended(kv_format: KVFormat) -> None:
    recommendation = recommend(LLAMA, "h200", 65_536, kv_format=str(kv_format))
    assert recommendation.plan.kv.format is kv_format
    others = [
        alternative
        for alternative in recommendation.alternatives
        if alternative.plan.kv.format is not kv_format and alternative.preset == "autoregressive"
    ]
    assert [other_row.rejected for other_row in others if "KV format" not in other_row.rejected] == []


def test_sizes_may_be_texts() -> None:
    assert recommend(LLAMA, "h200", "120000", memory_limit="40GB") == recommend(
        LLAMA, "h200", 120_000, memory_limit=40e9
    )
    with pytest.raises(PlanError, match="memory_limit is 24 bytes; allowed"):
        recommend(LLAMA, "h200", "8k", memory_limit=24)
    with pytest.raises(PlanError, match=r"backend is 'tgi'; allowed: any, ridgeplan, vllm, vllm\+plugin, sglang"):
        recommend(LLAMA, "h200", "8k", backend="tgi")
    assert [str(backend) for backend in Backend] == ["any", "ridgeplan", "vllm", "vllm+plugin", "sglang"]


# Plans whose kernels a profile has no rates of are priced by others' rates, shown, and not recommended.


@pytest.fixture
def streaming(h200_profile):
    """A profile whose sparse kernels read as fast as attention to all upper codes."""
    kinds = ("two_bit_scan", "sparse_attention", "progressive_attention")
    rates = dict.fromkeys(kinds, h200_profile.classes["attention_int4"])
    return replace(h200_profile, classes={**h200_profile.classes, **rates})


@pytest.fixture
def dense(h200_profile):
    """A profile from before sparse drafts."""
    kinds = ("two_bit_scan", "sparse_attention", "progressive_attention", "top_k")
    return replace(h200_profile, classes={k: v for k, v in h200_profile.classes.items() if k not in kinds})


def test_only_sparse_drafts_need_their_own_classes(dense, streaming):
    workload = Workload(LLAMA, "h200", 120_000)
    for name, needed in (("quantspec", False), ("autoregressive", False), ("specattn-int4", True)):
        assert (uncalibrated(preset(name, workload), dense) is not None) == needed
        assert uncalibrated(preset(name, workload), streaming) is None


def test_a_faster_sparse_plan_is_recommended_once_it_is_calibrated(dense, streaming):
    before = planner.recommend(LLAMA, "h200", 120_000, profile=dense)
    assert not before.plan.speculation.sparse
    (sparse,) = (alternative for alternative in before.alternatives if alternative.preset == "specattn-int4")
    assert "not calibrated" in sparse.rejected
    assert "test H200" in sparse.rejected
    assert planner.recommend(LLAMA, "h200", 120_000, profile=streaming).plan.speculation.sparse
