"""Where nothing fits, the answer is true: nothing that runs is smaller, and what it offers fits."""

import re
from dataclasses import replace
from functools import cache, partial

import pytest
from gguf_headers import llama_8b_q4_k_m

from ridgeplan import planner
from ridgeplan.planner.capacity import Capacity, peak_bytes, usable_bytes
from ridgeplan.planner.feasibility import (
    NothingFits,
    context_limits,
    executable_families,
    on_device,
    search_regrouped,
    smallest_gpu,
    smallest_plans,
)
from ridgeplan.planner.quality import Quality, quality_of
from ridgeplan.planner.question import Question, ask
from ridgeplan.planner.recommendation import READING_TPOT_MS
from ridgeplan.roofline.catalog.hardware import list_hardware, load_hardware
from ridgeplan.roofline.execution import QUANTIZATION_GROUPS
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import KVCache, KVFormat, Placement, Plan, PlanError, Weights
from ridgeplan.roofline.plan.policy import KV_BUDGET
from ridgeplan.roofline.plan.presets import PRESETS, preset
from ridgeplan.roofline.plan.support import missing_execution

LLAMA = "meta-llama/Llama-3.1-8B"
SMALL = "Qwen/Qwen2.5-0.5B"


recommended = cache(planner.recommend)  # of questions that several tests ask


@cache
def refusal(gpu, context, **changes):
    with pytest.raises(planner.NothingFits) as caught:
        planner.recommend(LLAMA, gpu, context, offload=False, **changes)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_no_preset_that_runs_is_smaller_with_any_group():
    text = refusal("rtx4090", 130_000, batch=4)
    gigabytes = float(re.search(r"needs at least ([\d.]+) GB", text).group(1))
    question = ask(LLAMA, "rtx4090", 130_000, batch=4)
    for name in PRESETS:
        plan = preset(name, question.workload)
        if missing_execution(plan) or not Quality.NEAR_LOSSLESS.allows(quality_of(plan)):
            continue
        for group in QUANTIZATION_GROUPS:
            grouped = replace(plan, kv=KVCache(plan.kv.format, group), weights=replace(plan.weights, group=group))
            assert peak_bytes(grouped, question.shape, question.machine) > (gigabytes - 0.05) * 1e9
    assert "of 23.2 GB on rtx4090" in text


def test_the_sizes_that_it_offers_fit_to_the_token():
    text = refusal("rtx4090", 60_000, batch=4)
    context = int(re.search(r"context up to (\d+) with batch 4", text).group(1))
    batch = int(re.search(r"batch up to (\d+) with context 60000", text).group(1))
    for changes in ({"ctx": context, "batch": 4}, {"ctx": 60_000, "batch": batch}):
        fitting = planner.recommend(LLAMA, "rtx4090", offload=False, **changes)
        assert fitting.predicted.best.peak_memory_bytes <= fitting.memory_limit_bytes
    for changes in ({"ctx": context + 1, "batch": 4}, {"ctx": 60_000, "batch": batch + 1}):
        with pytest.raises(planner.NothingFits):
            planner.recommend(LLAMA, "rtx4090", offload=False, **changes)


@pytest.mark.parametrize("offload", [False, True])
def test_what_it_offers_is_the_most_that_fits_the_device(offload):
    """With or without layers on the host, which would fit more, and `fit` says the same."""
    recommend = partial(planner.recommend, SMALL, "rtx4060-laptop", batch=8, yarn=True, offload=offload)
    fixes = on_device(ask(SMALL, "rtx4060-laptop", 400_000, batch=8, yarn=True, offload=offload))
    (context,) = (fix.changes["context"] for fix in fixes if list(fix.changes) == ["context"])
    answer = recommend(context)
    assert answer.predicted.best.peak_memory_bytes <= answer.memory_limit_bytes
    assert answer.fits_device
    with pytest.raises(planner.NothingFits):
        recommend(context + 1, offload=False)
    (row,) = planner.fit(SMALL, "rtx4060-laptop", batches=(8,), yarn=True).contexts
    assert row.context == context


CROWDED = [  # model, GPU, context and options of questions that no plan answers on the device alone
    ("meta-llama/Llama-3.1-70B", "h100-sxm", 32768, {}),
    ("Qwen/Qwen3-32B", "rtx4090", 32768, {}),
    (LLAMA, "rtx4090", 2048, {"batch": 64, "new_tokens": 4096}),
    (LLAMA, "h200", 131_072, {"memory_limit": 17e9}),
    (LLAMA, "rtx4060-laptop", 131_072, {"batch": 8, "host_memory": 0}),
    ("microsoft/Phi-4-mini-instruct", "rtx3090", 65_536, {"batch": 16, "backend": "vllm+plugin"}),
    ("Qwen/Qwen2.5-72B", "l4", 1024, {"backend": "vllm"}),
    (LLAMA, "h200", 65_536, {"batch": 64, "backend": "sglang"}),
    ("zai-org/GLM-4.5-Air", "h200", 4096, {"batch": 64, "backend": "sglang", "kv_format": "int4x2"}),
]
MORE_CROWDED = [
    ("Qwen/Qwen3-8B", "rtx4090", 16384, {"batch": 16}),
    ("mistralai/Mixtral-8x7B-v0.1", "l4", 2048, {"backend": "vllm+plugin"}),
    ("moonshotai/Kimi-K2-Instruct", "gh200", 1024, {"gpus": 2}),
]


@pytest.mark.parametrize(
    ("model", "gpu", "context", "options"),
    [*CROWDED, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CROWDED)],
)
def test_every_remedy_fits_the_device_and_is_usable(model, gpu, context, options):
    try:
        fixes = recommended(model, gpu, context, **options).on_device
    except planner.NothingFits as error:
        fixes = error.fixes
    assert fixes
    for fix in fixes:
        changed = {"model": model, "gpu": gpu, "ctx": context, **options, **fix.changes}
        changed["ctx"] = changed.pop("context", changed["ctx"])
        answer = planner.recommend(**changed)
        assert answer.fits_device or "host_memory" in fix.changes
        assert answer.predicted.best.tpot_ms <= READING_TPOT_MS


def test_no_gpu_is_offered_on_which_the_kernels_have_not_run():
    for model, context in (("zai-org/GLM-4.5-Air", 131_000), ("meta-llama/Llama-3.1-70B", 131_000)):
        question = ask(model, "h200", context, quality="exact", batch=4)
        gpus = [load_hardware(fix.changes["gpu"]) for fix in on_device(question) if "gpu" in fix.changes]
        assert not any(gpu.is_amd for gpu in gpus)


def test_small_changes_are_offered_first_and_gpus_of_the_same_size_never():
    fixes = recommended("meta-llama/Llama-3.1-70B", "h100-sxm", 32768).on_device
    assert list(fixes[0].changes) == ["quality"]
    question = ask(LLAMA, "rtx4090", 130_000, batch=4)
    (gpu,) = (fix.changes["gpu"] for fix in on_device(question) if "gpu" in fix.changes)
    assert load_hardware(gpu).memory_bytes >= 1.15 * load_hardware("rtx4090").memory_bytes


def remedies(model, gpu, context, **options):
    return [dict(fix.changes) for fix in on_device(ask(model, gpu, context, **options))]


def test_dropped_tokens_are_offered_last_and_never_for_exact_plans():
    changes = remedies("Qwen/Qwen2.5-14B", "l4", 65_536, batch=32)
    assert [list(change) for change in changes[:3]] == [["quality", "batch"], ["gpus"], ["gpu", "memory_limit"]]
    assert changes[0]["quality"] == "4-bit"
    assert changes[-1] == {"quality": "lossy"}
    exact = remedies(LLAMA, "rtx3090", 100_000, batch=16, quality="exact")
    assert exact[0] == {"quality": "near-lossless", "batch": 1}
    assert {"quality": "lossy"} not in exact


def test_contexts_of_no_use_are_not_offered():
    for model, gpu, context, batch in (("Qwen/Qwen2.5-14B", "l4", 65_536, 32), (LLAMA, "rtx3090", 8192, 64)):
        offered = [change["context"] for change in remedies(model, gpu, context, batch=batch) if "context" in change]
        assert all(size >= max(1024, context / 4) for size in offered)


def test_a_floor_of_quality_that_rules_out_what_fits_is_answered_with_a_step():
    changes = remedies("Qwen/Qwen3-30B-A3B", "a6000", 4096, batch=2, quality="RULER>=80")
    assert changes[0] == {"quality": "near-lossless"}


def test_a_few_tokens_less_or_a_higher_utilization_are_offered_where_little_is_missing():
    longest = planner.fit(LLAMA, "rtx4090", batches=(4,)).contexts[0].context
    fixes = [dict(fix.changes) for fix in on_device(ask(LLAMA, "rtx4090", longest, batch=4, new_tokens=2000))]
    assert fixes[:3] == [{"new_tokens": 1000}, {"quality": "4-bit"}, {"memory_utilization": 0.95}]


def test_without_a_memory_limit_as_much_may_be_used_as_the_utilization_says():
    """0.9 of the 150.75 GB that an H200 reports."""
    (fix,) = (fix for fix in on_device(ask(LLAMA, "h200", 131_072, memory_limit=17e9)) if "memory_limit" in fix.changes)
    assert (dict(fix.changes), fix.text) == ({"memory_limit": None}, "no memory limit, as 136 GB may be used")


def test_plans_on_the_host_below_0_7x_plain_lose_to_those_on_the_device():
    for model, gpu, context, options in (CROWDED[0], *CROWDED[2:4]):
        answer = recommended(model, gpu, context, **options)
        assert answer.predicted.offloaded_layers and answer.predicted.speedup < 0.7
        assert not answer.fits_device
        assert answer.verdict == "fits only with offloading"


def test_no_plan_with_layers_on_the_host_is_smaller_than_what_is_needed():
    """Of plain decoding with any formats and groups, each with as many layers on the host as help."""
    with pytest.raises(planner.NothingFits) as refused:
        planner.recommend(SMALL, "rtx4060-laptop", 2_000_000, batch=8, yarn=True)
    needed = float(re.search(r"needs at least ([\d.]+) GB", str(refused.value)).group(1))
    question = ask(SMALL, "rtx4060-laptop", 2_000_000, batch=8, yarn=True)
    peaks = [
        peak_bytes(
            Plan(question.workload, Weights(bits, bits), KVCache(kv, group), placement=Placement(True, KV_BUDGET)),
            question.shape, question.machine,
        )
        for bits in (16, 8)
        for kv in (KVFormat.FULL, KVFormat.INT8)
        for group in QUANTIZATION_GROUPS
    ]  # fmt: skip
    assert (needed - 0.05) * 1e9 < min(peaks) < (needed + 0.5) * 1e9


def test_the_gpu_that_it_names_is_enough_and_smaller_ones_are_not():
    text = refusal("rtx4090", 130_000, batch=4)
    name = re.search(r"a GPU such as ([\w-]+) ", text).group(1)
    planner.recommend(LLAMA, name, 130_000, batch=4)
    smaller = [gpu for gpu in list_hardware() if gpu.memory_bytes < load_hardware(name).memory_bytes]
    assert len(smaller) > 3
    for hardware in sorted(smaller, key=lambda gpu: gpu.memory_bytes)[-3:]:
        refusal(hardware.name, 130_000, batch=4)


def test_no_gpu_is_named_where_none_is_enough():
    with pytest.raises(planner.NothingFits, match="a GPU with more memory than any in the catalog"):
        planner.recommend("meta-llama/Llama-3.1-70B", "h200", 131_072, batch=512, offload=False)


def test_a_lower_quality_is_offered_where_it_fits():
    text = refusal("rtx4060-laptop", 4096)
    assert "quality 4-bit, such as int4-weights-int8" in text
    smaller = planner.recommend(LLAMA, "rtx4060-laptop", 4096, quality="4-bit")
    assert (smaller.plan.weights.target_bits, smaller.plan.eviction.active) == (4, False)
    assert "quality near-lossless, such as int8" in refusal("rtx4090", 60_000, quality="exact")
    assert "quality lossy" not in refusal("rtx4060-laptop", 131_072, batch=64)


def test_a_batch_of_1_is_offered_where_neither_size_alone_would_do():
    text = refusal("rtx4090", 131_072, batch=512, memory_limit=16e9)
    assert re.search(r"allowed: context up to \d+ with batch 1, or", text)


def test_groups_of_other_sizes_are_searched_before_giving_up(h200_profile):
    """With groups of 256 tokens keys have half the scales, 67 MB less at 132096 tokens, and a buffer 34 MB larger.

    With groups of 256 inputs 7.5 billion weights in two planes have 234 MB less of scales and zeros.
    """
    question = ask(LLAMA, "h200", 131_072, profile=h200_profile, offload=False)
    usual = Capacity(smallest_plans(executable_families(question)), question.shape, question.machine).peaks().min()
    limit = usual - 250e6
    recommendation = planner.recommend(LLAMA, "h200", 131_072, profile=h200_profile, memory_limit=limit, offload=False)
    assert (recommendation.plan.kv.group, recommendation.plan.weights.group) == (256, 256)
    assert recommendation.predicted.best.peak_memory_bytes <= limit
    tight = replace(question, memory_limit_bytes=limit)
    assert {(candidate.plan.kv.group, candidate.plan.weights.group) for candidate in search_regrouped(tight)} == {
        (256, 256)
    }
    assert search_regrouped(replace(question, memory_limit_bytes=1e9)) == []


def test_prompts_go_through_in_chunks_where_whole_ones_do_not_fit(h200_profile):
    """At 128k tokens the 8B shape's buffers of a whole prompt take 2.7 GB, those of a chunk and its budget 0.1 GB."""

    def ask_at(limit, **changes):
        options = {"profile": h200_profile, "memory_limit": limit, "quality": "lossy", "offload": False} | changes
        return planner.recommend(LLAMA, "h200", 131_072, **options)

    roomy, tight = ask_at(24e9), ask_at(8e9)
    assert (roomy.plan.eviction.policy, roomy.plan.eviction.chunk) == ("dapq", 0)
    assert (tight.plan.eviction.policy, tight.plan.eviction.chunk) == ("dapq", 4096)
    assert "dapq in chunks" in tight.name
    assert tight.predicted.best.peak_memory_bytes <= 8e9 < roomy.predicted.best.peak_memory_bytes
    assert not missing_execution(tight.plan)
    chunked = [
        tight.name,
        *(alternative.preset for alternative in tight.alternatives if alternative.plan.eviction.chunk),
    ]
    assert len(chunked) == len(set(chunked)) > 1  # once each, with the best sizes of groups
    with pytest.raises(planner.NothingFits, match=r"quality lossy, such as .*dapq in chunks"):
        ask_at(8e9, quality="near-lossless")


def test_short_prompts_in_large_batches_have_small_groups():
    """The buffer holds two groups of every sequence in full precision: smaller groups need less."""
    question = ask(LLAMA, "h200", 64, batch=64, new_tokens=8)
    searched = executable_families(question, regroup=True)
    plans = [candidate.template for candidate in searched if candidate.name == "int8"]
    peaks = Capacity(plans, question.shape, question.machine).peaks()
    assert [plan.kv.group for plan in plans] == list(QUANTIZATION_GROUPS)
    assert list(peaks) == sorted(peaks)
    assert {candidate.template.weights for candidate in searched if candidate.name == "quantspec-weights"} == {
        Weights(16, 4, 256)
    }


def test_beyond_a_sliding_window_only_plain_decoding_is_offered_more():
    question = ask("mistralai/Mistral-7B-v0.1", "h200", 2048)
    plans = [preset(name, question.workload) for name in ("autoregressive", "int8", "quantspec")]
    assert list(context_limits(plans, question)) == [32768, 4096 - 1024, 4096 - 1024]


def test_yarn_stretches_what_is_offered():
    question = ask("Qwen/Qwen2.5-0.5B", "h200", 40_000, yarn=True)
    assert list(context_limits([preset("int8", question.workload)], question)) == [64 * 32768 - 1024]


def test_the_smallest_gpu_is_that_with_the_least_memory():
    question = ask("Qwen/Qwen2.5-0.5B", "rtx4060-laptop", 4096)  # which every other GPU's memory outpaces
    plans = [preset("autoregressive", question.workload)]
    smallest = min(list_hardware(), key=lambda gpu: gpu.memory_bytes)
    assert smallest_gpu(question, plans) == smallest
    needed = Capacity(plans, question.shape, Machine.of(question.profile)).peaks()[0]
    enough = [gpu for gpu in list_hardware()
              if usable_bytes(gpu.memory_bytes, 0.1) >= 1.02 * needed and not gpu.unified_memory]  # fmt: skip
    assert smallest_gpu(question.with_options(memory_utilization=0.1), plans) == min(
        enough, key=lambda gpu: gpu.memory_bytes
    )


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"quality": "exact"}, "KV format bf16, or KV format bf16+int4, or quality near-lossless"),
        ({"backend": "sglang", "quality": "exact"}, "KV format bf16, or quality near-lossless"),
    ],
)
def test_a_kv_format_that_no_allowed_plan_has_is_refused_with_those_that_are(options, allowed):
    for ask_planner in (
        lambda **options: planner.recommend(LLAMA, "h200", 8192, **options),
        lambda **options: planner.fit(LLAMA, "h200", batches=(1,), contexts=(8192,), **options),
        lambda **options: planner.grid_sweep(LLAMA, "h200", {"ctx": (8192,)}, **options),
    ):
        with pytest.raises(planner.NothingFits) as caught:
            ask_planner(kv_format="int8", **options)
        assert str(caught.value).endswith(f"has KV format int8; allowed: {allowed}")


def test_an_unknown_option_is_one_clear_error():
    with pytest.raises(TypeError, match=r"unknown option batches; allowed: batch, new_tokens, quality"):
        planner.recommend(LLAMA, "h200", 8192, batches=4)
    assert planner.recommend(LLAMA, "h200", "8k", planner.SearchOptions(batch=2), batch=4).plan.workload.batch == 4


@pytest.mark.parametrize("gpu", ["h200", "l4", "dgx-spark"])
def test_a_gpu_that_takes_anothers_place_has_memory_about_as_fast(gpu: str) -> None:
    question = ask("meta-llama/Llama-3.1-8B", gpu, 4096)
    plans, listed = [preset("autoregressive", question.workload)], question.profile.hardware
    other = smallest_gpu(question, plans, listed.memory_bytes + 1)
    assert other is not None
    assert other.bandwidth_bytes_per_s >= 0.75 * listed.bandwidth_bytes_per_s
    assert not other.unified_memory


def test_a_cpu_offloads_nothing() -> None:
    """Its memory is the host's, which would count twice."""
    gpu = ask("meta-llama/Llama-3.1-8B", "rtx4090", "128k", batch=4)
    hardware = replace(gpu.profile.hardware, name="cpu", kind="cpu")
    question = Question.of(gpu.shape, replace(gpu.profile, hardware=hardware), gpu.workload, gpu.options)
    assert gpu.options.offload and gpu.host_limit_bytes
    assert not question.options.offload and not question.host_limit_bytes
    assert question.oom_reason(1.0, 1.0) == "does not fit: cpu is a CPU, so no layer can be offloaded"


def test_unified_memory_offloads_nothing() -> None:
    """A layer on the host would lie in the same memory, so plans that need one do not fit."""
    answer = planner.recommend("meta-llama/Llama-3.1-8B", "dgx-spark", "32k", batch=4)
    assert not answer.predicted.host_bytes and answer.fits_device
    assert all(not other.predicted.host_bytes for other in answer.alternatives if "fit" not in other.rejected)
    with pytest.raises(NothingFits, match="on dgx-spark; allowed: ") as caught:
        planner.recommend("meta-llama/Llama-3.1-70B", "dgx-spark", "128k", batch=16)
    assert not any("host_memory" in fix.changes for fix in caught.value.fixes)
    question = ask("meta-llama/Llama-3.1-70B", "dgx-spark", "32k")
    assert question.oom_reason(1.0, 1.0) == (
        "does not fit: CPU and GPU of dgx-spark share one memory, so no layer can be offloaded"
    )
    with pytest.raises(PlanError, match="host_memory is set; allowed: none, as CPU and GPU of dgx-spark share one"):
        ask("meta-llama/Llama-3.1-8B", "dgx-spark", 4096, host_memory="64GB")
    with pytest.raises(PlanError, match="offload is set; allowed: without it, as CPU and GPU of dgx-spark share"):
        planner.fit("meta-llama/Llama-3.1-8B", "dgx-spark", offload=True)


def test_a_gguf_file_is_a_way_out_where_its_weights_fit_as_they_are() -> None:
    way_out = "allowed: a GGUF file of the model, such as Q4_K_M"
    with pytest.raises(NothingFits, match=way_out):
        planner.recommend("meta-llama/Llama-3.1-8B", "rtx4060-laptop", "8k")
    answer = planner.recommend(llama_8b_q4_k_m(), "rtx4060-laptop", "8k")
    assert answer.fits_device and answer.plan.weights.stored
    for model in ("Qwen/Qwen3-14B", "openai/gpt-oss-20b"):  # too large, and with weights of its own
        with pytest.raises(NothingFits) as caught:
            planner.recommend(model, "rtx4060-laptop", "8k")
        assert "GGUF" not in str(caught.value)
