"""recommend: what it picks, and why others lose."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from ridgeplan import planner
from ridgeplan.planner.capacity import HOST_MEMORY_BYTES
from ridgeplan.planner.lowering import kernel_class
from ridgeplan.planner.prediction import predict
from ridgeplan.planner.quality import Quality, quality_of
from ridgeplan.planner.question import Objective, Question, SearchOptions, ask
from ridgeplan.planner.recommend import (
    TOLERANCE,
    choose,
    contenders,
    penalize_unmeasured_rates,
    preference,
    sampled_scores,
    why_preferred,
)
from ridgeplan.planner.search import Candidate, search
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import profile_for, shipped_profiles
from ridgeplan.roofline.plan.plan import KVCache, KVFormat, Plan, PlanError, Speculation, Weights, Workload
from ridgeplan.roofline.plan.presets import PRESETS, preset
from ridgeplan.roofline.plan.support import missing_execution

LLAMA = "meta-llama/Llama-3.1-8B"


def recommend_llama(profile, context=131072, **changes):
    return planner.recommend(changes.pop("model", LLAMA), "h200", context, profile=profile, **changes)


def test_long_context_recommends_quantized_kv_speculation(h200_profile):
    answer = recommend_llama(h200_profile)
    assert answer.plan.kv.format is KVFormat.HIERARCHICAL
    assert answer.plan.speculation.active
    assert answer.predicted.speedup > 1.3
    assert answer.baseline.speedup == 1


def test_the_recommendation_is_the_best_of_everything_that_is_allowed(h200_profile):
    """Brute force: every executable preset at every gamma, one prediction at a time, is no faster.

    But one that is faster within the noise loses to one that loses less.
    """
    shape, answer = load_shape(LLAMA), recommend_llama(h200_profile, context=32768)
    for name in PRESETS:
        plan = preset(name, answer.plan.workload)
        if missing_execution(plan) or not Quality.NEAR_LOSSLESS.allows(quality_of(plan)):
            continue
        if plan.speculation.drafter.active:  # searched for texts of a known kind
            continue
        gammas = range(1, 16) if plan.speculation.active else (0,)
        for gamma in gammas:
            other = replace(plan, speculation=replace(plan.speculation, gamma=gamma))
            predicted = planner.predict(other, shape, h200_profile)
            noise = TOLERANCE if preference(answer.plan) < preference(other) else 1e-9
            assert predicted.best.tpot_ms >= answer.predicted.best.tpot_ms * (1 - noise)


def test_vectorized_search_and_single_prediction_agree(h200_profile):
    shape, workload = load_shape(LLAMA), Workload("Llama-3.1-8B", "h200", 65536)
    question = Question(shape, h200_profile, workload, SearchOptions(quality="lossy"), 141e9, HOST_MEMORY_BYTES)
    for candidate in search(question):
        predicted = planner.predict(candidate.plan, shape, h200_profile)
        if predicted.acceptance.source == "prior":  # which competes at the low end
            assert predicted.best.tpot_ms < 1e3 * candidate.tpot_s < predicted.high.tpot_ms
        else:
            assert predicted.best.tpot_ms == pytest.approx(1e3 * candidate.tpot_s, rel=1e-9)
        assert predicted.best.peak_memory_bytes == pytest.approx(candidate.peak_bytes, rel=1e-9)


@pytest.mark.parametrize("quality", Quality)
def test_quality_is_never_exceeded(h200_profile, quality):
    answer = recommend_llama(h200_profile, quality=quality)
    assert quality.allows(quality_of(answer.plan))
    assert not missing_execution(answer.plan)


def test_exact_quality_keeps_the_models_own_distribution(h200_profile):
    answer = recommend_llama(h200_profile, quality="exact")
    assert answer.plan.kv.format in (KVFormat.FULL, KVFormat.SHADOW)
    assert not answer.losses


def test_alternatives_are_ranked_and_say_why_they_lost(h200_profile):
    answer = recommend_llama(h200_profile)
    names = [other.preset for other in answer.alternatives]
    drafters = {"suffix", "cascade", "adaptive-cascade"}  # the first two where a kind of text is given
    assert set(names) >= set(PRESETS) - {answer.name} - drafters
    assert len(names) == len(set(names))
    competing = [other for other in answer.alternatives if other.rejected.startswith(("slower", "not measured"))]
    times = [other.predicted.best.tpot_ms for other in competing if other.rejected.startswith("slower")]
    assert times == sorted(times)
    assert answer.alternatives[: len(competing)] == tuple(competing)
    reasons = ("slower", "not measured", "quality", "does not fit", "estimated only")
    assert all(other.rejected.startswith(reasons) for other in answer.alternatives)


def test_less_memory_changes_the_plan_and_then_nothing_fits(h200_profile):
    roomy, tight = recommend_llama(h200_profile), recommend_llama(h200_profile, memory_limit=29e9)
    assert tight.predicted.best.peak_memory_bytes <= 29e9 < roomy.baseline.best.peak_memory_bytes
    assert any("does not fit: needs" in other.rejected for other in tight.alternatives)
    with pytest.raises(planner.NothingFits, match=r"needs at least .* GB"):
        recommend_llama(h200_profile, memory_limit=5e9)


def test_predictions_keep_to_the_memory_limit_as_the_search_does(h200_profile):
    answer = recommend_llama(h200_profile, memory_limit=21e9)
    offloading = next(other for other in answer.alternatives if other.preset == "specontext")
    assert offloading.predicted.offloaded_layers > 0
    assert offloading.predicted.best.peak_memory_bytes <= 21e9
    tighter = recommend_llama(h200_profile, memory_limit=19e9)
    may_leave = [other for other in tighter.alternatives if "offload" in other.preset]
    assert may_leave
    assert all(other.predicted.offloaded_layers for other in may_leave)


def test_layers_stay_on_the_device_where_larger_groups_fit(h200_profile):
    """At 21 GB the usual groups of 128 tokens do not fit; those of 256 do, and are faster than layers on the host."""
    answer = recommend_llama(h200_profile, memory_limit=21e9)
    assert answer.plan.kv.group == 256
    assert (answer.predicted.offloaded_layers, answer.warning, answer.on_device) == (0, None, ())
    assert min(candidate.predicted.best.tpot_ms for candidate in offloading(answer)) > answer.predicted.best.tpot_ms


def offloading(answer):
    return [alternative for alternative in answer.alternatives if alternative.predicted.offloaded_layers]


def test_what_lies_on_the_host_is_counted_and_must_fit_it(h200_profile):
    """INT8 KV of 131,072 + 1,024 tokens: 2 x 8 x 128 bytes a layer, with a scale and a zero (4 bytes) per 128 of them.

    With room for a few layers nothing fits; the room that is then named, in whole GB, is enough, and a GB less is not.
    """
    answer = recommend_llama(h200_profile, memory_limit=17e9)
    layers, held = answer.predicted.offloaded_layers, answer.predicted.host_bytes
    assert (answer.plan.kv.format, layers > 0) == (KVFormat.INT8, True)
    assert held / layers == pytest.approx(132_096 * 2 * 8 * (128 + 4), rel=0.01)
    with pytest.raises(planner.NothingFits) as refusal:
        recommend_llama(h200_profile, memory_limit=17e9, host_memory=3 * held / layers)
    (room,) = (fix.changes for fix in refusal.value.fixes if "host_memory" in fix.changes)
    gigabytes = int(room["host_memory"].removesuffix("GB"))
    fitting = recommend_llama(h200_profile, memory_limit=17e9, **room)
    assert 0 < fitting.predicted.host_bytes <= min(held, gigabytes * 1e9)
    with pytest.raises(planner.NothingFits):
        recommend_llama(h200_profile, memory_limit=17e9, host_memory=(gigabytes - 1) * 1e9)
    assert "host_memory" not in {name for candidate in answer.on_device for name in candidate.changes}


def test_a_plan_with_layers_on_the_host_names_what_would_fit_without(h200_profile):
    """Each of the questions that it offers has an answer with every layer on the device; the asked one has none."""
    answer = recommend_llama(h200_profile, memory_limit=17e9)
    assert answer.warning.startswith("Does not fit the GPU alone")
    question = {"context": 131_072, "memory_limit": 17e9, "offload": False}
    with pytest.raises(planner.NothingFits):
        recommend_llama(h200_profile, **question)
    assert {name for candidate in answer.on_device for name in candidate.changes} >= {
        "context",
        "quality",
        "memory_limit",
    }
    for candidate in answer.on_device:
        if "gpu" not in candidate.changes:
            assert recommend_llama(h200_profile, **question | candidate.changes).predicted.offloaded_layers == 0


def test_layers_on_the_host_that_only_make_a_plan_faster_are_a_note(h200_profile):
    """Of 20 sequences of 90,802 tokens INT8 KV fits; lower codes of a few layers on the host are faster."""
    answer = recommend_llama(h200_profile, context=90_802, batch=20)
    assert answer.predicted.offloaded_layers
    assert (answer.warning, answer.on_device) == (None, ())
    assert answer.notes[0].startswith(f"KV of {answer.predicted.offloaded_layers} layers is on the host")
    slower = [alternative for alternative in answer.alternatives if alternative.rejected.startswith("slower")]
    assert any(not candidate.predicted.offloaded_layers for candidate in slower)


@pytest.mark.parametrize(("memory", "slow"), [(16e9, False), (21e9, True)])
def test_a_plan_slower_than_reading_speed_says_so(h200_profile, memory, slow):
    answer = recommend_llama(h200_profile, memory_limit=memory, quality="exact" if slow else "near-lossless")
    assert (answer.predicted.best.tpot_ms > 1e3 / 5) is slow  # five tokens a second
    assert ("slower than reading speed" in answer.warning) is slow
    tiny = "HuggingFaceTB/SmolLM2-135M"  # on the GPU whole
    assert recommend_llama(h200_profile, 4096, model=tiny).warning is None


@pytest.mark.parametrize("host_memory", [-1, "24", True])
def test_host_memory_is_a_size(h200_profile, host_memory):
    with pytest.raises(PlanError, match=r"allowed: (bytes|one with a unit)"):
        recommend_llama(h200_profile, host_memory=host_memory)


@pytest.mark.parametrize(("context", "plain"), [(2048, False), (30000, True)])
def test_beyond_a_sliding_window_only_plain_decoding_is_recommended(h200_profile, context, plain):
    shape = load_shape("mistralai/Mistral-7B-v0.1")
    answer = recommend_llama(h200_profile, context, model=shape, batch=16)
    assert (answer.plan.speculation.active or answer.plan.kv.format.quantized) != plain
    assert not missing_execution(answer.plan, shape)


def test_objectives_minimize_what_they_say(h200_profile):
    answers = {name: recommend_llama(h200_profile, objective=name, quality="lossy").predicted for name in Objective}
    memory, latency = answers[Objective.MEMORY].best, answers[Objective.LATENCY].best
    assert memory.peak_memory_bytes <= latency.peak_memory_bytes
    assert latency.tpot_ms <= memory.tpot_ms


def test_bands_hold_the_best_estimate(h200_profile):
    predicted = recommend_llama(h200_profile).predicted
    for name in ("tpot_ms", "ttft_ms", "tokens_per_s", "peak_memory_bytes"):
        low, best, high = (getattr(end, name) for end in (predicted.low, predicted.best, predicted.high))
        assert low < best < high


def test_json_has_what_users_parse(h200_profile):
    data = json.loads(json.dumps(recommend_llama(h200_profile).to_dict(), allow_nan=False))
    assert {"plan", "predicted", "baseline", "alternatives"} <= set(data)
    for predicted in (data["predicted"], data["baseline"], data["alternatives"][0]["predicted"]):
        assert {"tpot_ms", "ttft_ms", "tokens_per_s", "peak_memory_bytes", "speedup", "source"} <= set(predicted)
        assert set(predicted["low"]) == set(predicted["high"]) == {
            "tpot_ms", "ttft_request_ms", "ttft_ms", "tokens_per_s", "peak_memory_bytes"
        }  # fmt: skip
    assert {"preset", "plan", "predicted", "rejected"} <= set(data["alternatives"][0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 0}, "context is 0"),
        ({"batch": -3}, "batch is -3"),
        ({"new_tokens": 0}, "new_tokens is 0"),
        (
            {"quality": "good"},
            "quality is 'good'; allowed: exact, near-lossless, 4-bit, lossy, or a floor",
        ),
        ({"objective": "fun"}, "objective is 'fun'"),
        ({"memory_limit": float("nan")}, "memory_limit is nan"),
        ({"memory_limit": -1}, "memory_limit is -1"),
        ({"memory_limit": 10**400}, "memory_limit is a huge number; allowed: bytes above 0 up to 1e+18"),
        ({"model": "Llama-3.1-9B"}, "Did you mean"),
    ],
)
def test_bad_input_is_one_line_that_names_it(h200_profile, changes, message):
    with pytest.raises(ValueError) as caught:
        recommend_llama(h200_profile, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_beyond_the_models_context_it_refuses_or_warns_and_yarn_stretches(h200_profile):
    with pytest.raises(
        PlanError, match=r"context 32769 is beyond the limit of Qwen/Qwen2\.5-0\.5B; allowed: up to 32k"
    ):
        recommend_llama(h200_profile, context=32769, model="Qwen2.5-0.5B")
    recommendation = recommend_llama(h200_profile, context=30000, model="Qwen2.5-0.5B", new_tokens=8000)
    assert any("beyond the model's limit of 32768 tokens" in note for note in recommendation.notes)
    stretched = recommend_llama(h200_profile, context=120_000, model="Qwen2.5-0.5B", yarn=True)
    assert stretched.plan.workload.yarn_factor == 4
    slightly_more = recommend_llama(h200_profile, context=131_072, model="Qwen2.5-0.5B", yarn=True)
    assert slightly_more.plan.workload.yarn_factor == 4.5
    with pytest.raises(PlanError, match="allowed: up to 64x with YaRN"):
        recommend_llama(h200_profile, context=8_000_000, model="Qwen2.5-0.5B", yarn=True)


def test_stored_experts_are_priced_at_their_own_bits_in_every_plan(h200_profile):
    """Of MXFP4's 4.25 bits, at the rates of 4-bit experts, which drafts share."""
    shape, answer = load_shape("openai/gpt-oss-20b"), recommend_llama(h200_profile, model="openai/gpt-oss-20b")
    assert answer.model_runs and shape.weight_bits.experts == 4.25
    plans = [preset(name, answer.plan.workload) for name in ("autoregressive", "int8-weights", "quantspec-weights")]
    weights = [predict(plan, shape, h200_profile).memory_bytes for plan in plans]
    experts, others = shape.expert_params * 4.25 / 8, shape.parameters - shape.expert_params
    assert weights[0]["weights"] == pytest.approx(experts + 2 * others, rel=1e-3)
    assert weights[1]["weights"] < weights[0]["weights"] and weights[2]["draft_weights"] < 0.6 * others
    assert {kernel_class(plan, shape, "target", "grouped_linear") for plan in plans} == {"grouped_linear_int4"}


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b"])
def test_every_kind_of_model_is_priced(h200_profile, name):
    roomy = replace(h200_profile, hardware=replace(h200_profile.hardware, memory_bytes=3 * 10**12))
    answer = recommend_llama(roomy, model=name, context=8192)
    assert 0 < answer.predicted.best.tpot_ms < 1000


def test_weights_published_in_few_bits_are_stored_and_read_so(h200_profile):
    """gpt-oss-120b ships its experts in MXFP4 (4.25 bits a weight): its card says it fits one 80 GB GPU."""
    answer = recommend_llama(h200_profile, model="openai/gpt-oss-120b", context=8192, memory_limit=80e9)
    assert 60e9 < answer.baseline.memory_bytes["weights"] < 68e9


def test_a_larger_gamma_never_costs_less_per_round(h200_profile):
    shape, plan = load_shape(LLAMA), preset("quantspec", Workload("m", "h200", 8192))
    rounds = [
        planner.predict(replace(plan, speculation=replace(plan.speculation, gamma=gamma)), shape, h200_profile)
        for gamma in (1, 2, 4, 8, 15)
    ]
    assert [prediction.round_ms for prediction in rounds] == sorted(prediction.round_ms for prediction in rounds)
    assert [prediction.tokens_per_round for prediction in rounds] == sorted(
        prediction.tokens_per_round for prediction in rounds
    )


def question(profile, context=32768, limit=141e9, objective=Objective.LATENCY, batch=1, new_tokens=1024):
    workload = Workload("Llama-3.1-8B", "h200", context, new_tokens, batch)
    options = SearchOptions(quality="lossy", objective=objective)
    return Question(load_shape(LLAMA), profile, workload, options, limit, HOST_MEMORY_BYTES)


@pytest.mark.parametrize("objective", Objective)
def test_a_score_is_what_is_minimized(h200_profile, objective):
    shape = load_shape(LLAMA)
    for candidate in search(question(h200_profile, objective=objective, new_tokens=500)):
        predicted = planner.predict(candidate.plan, shape, h200_profile)
        best, unmeasured = predicted.best, predicted.acceptance.source == "prior"
        if unmeasured and objective is not Objective.MEMORY:
            continue
        expected = {
            Objective.LATENCY: best.tpot_ms / 1e3,
            Objective.TOTAL: (best.ttft_ms + 500 * best.tpot_ms) / 1e3,
            Objective.MEMORY: best.peak_memory_bytes,
        }[objective]
        assert candidate.score == pytest.approx(expected, rel=1e-9)


def test_of_a_family_the_best_that_fits_is_taken_and_where_none_fits_the_smallest(h200_profile):
    """Each draft more takes a slot of 64 sequences: 64 x 128 KiB. QuantSpec's best gamma is 2 or more."""

    def best_quantspec(limit):
        candidates = search(question(h200_profile, 4096, limit, batch=64))
        return next(candidate for candidate in candidates if candidate.name == "quantspec")

    best = best_quantspec(141e9)
    best_gamma = best.plan.speculation.gamma
    assert best_gamma >= 2
    slot_bytes = 64 * 131_072
    tighter = best_quantspec(best.peak_bytes - slot_bytes / 2)
    assert tighter.plan.speculation.gamma == best_gamma - 1
    assert tighter.tpot_s > best.tpot_s
    smallest = best_quantspec(best.peak_bytes - 100 * slot_bytes)
    assert smallest.plan.speculation.gamma == 1
    assert best.peak_bytes - smallest.peak_bytes == (best_gamma - 1) * slot_bytes


def test_a_plan_fits_up_to_the_last_byte(h200_profile):
    options = question(h200_profile)
    plain = next(candidate for candidate in search(options) if candidate.name == "autoregressive")
    assert replace(plain, peak_bytes=options.memory_limit_bytes).rejection(options) is None
    assert "does not fit" in replace(plain, peak_bytes=options.memory_limit_bytes + 1).rejection(options)


def test_layers_are_offloaded_only_where_plain_decoding_does_not_fit(h200_profile):
    names = {
        limit: [candidate.name for candidate in search(question(h200_profile, 131072, limit))]
        for limit in (141e9, 29e9)
    }
    assert not [name for name in names[141e9] if "offload" in name]
    # Where it does not, also presets that may offload but need not stay under their names.
    offloaded = {name for name in names[29e9] if "offload" in name}
    assert {"offload", "INT4x2 KV + offloaded lower codes + 4-bit drafts on upper codes"} <= offloaded
    assert "specontext" in names[141e9]
    assert "specontext" in names[29e9]


def test_nothing_fits_names_the_allowed_plan_that_needs_least(h200_profile):
    """Of executable plans at 131072 tokens it is one on INT8 codes, of 67,584 bytes a token, with 8-bit weights."""
    with pytest.raises(planner.NothingFits) as caught:
        recommend_llama(h200_profile, memory_limit=15e9, quality="near-lossless", offload=False)
    embedding = 128_256 * 4096
    weights = 2 * embedding + (1 + 8 / 256) * (8_030_261_248 - embedding)
    minimum = weights + 132_096 * 67_584 + 257 * 131_072  # and codes, and a buffer of two groups
    workspace = 131072 * 2 * (4096 + 4096 + 2048) + 4096 * 3 * (4096 + 14336) * 2
    gigabytes = float(str(caught.value).split("needs at least ")[1].split(" GB")[0])
    name = str(caught.value).split("(")[1].split(")")[0]
    assert name == "int8-weights-int8"
    assert gigabytes == pytest.approx((minimum + workspace) / 1e9, abs=1.5)
    assert "of 15 GB on h200" in str(caught.value)


def test_slower_alternatives_say_by_how_much(h200_profile):
    answer = recommend_llama(h200_profile)
    slower = [other for other in answer.alternatives if other.rejected.startswith("slower")]
    assert slower
    for other in slower:
        times = other.predicted.best.tpot_ms / answer.predicted.best.tpot_ms
        by_how_much = "within 1% of" if times < 1.005 else f"{times:.2f}x"
        assert other.rejected == f"slower: {by_how_much} the recommended plan's time"
        assert times > 1


def test_larger_alternatives_say_by_how_much(h200_profile):
    answer = recommend_llama(h200_profile, objective="memory")
    larger = [other for other in answer.alternatives if other.rejected.startswith("larger")]
    for other in larger:
        times = other.predicted.best.peak_memory_bytes / answer.predicted.best.peak_memory_bytes
        by_how_much = "within 1% of" if times < 1.005 else f"{times:.2f}x"
        assert other.rejected == f"larger: {by_how_much} the recommended plan's memory"
    assert larger


def test_the_planner_imports_without_torch_or_sympy():
    code = (
        "import sys, ridgeplan.planner; "
        "print([name for name in ('torch', 'transformers', 'sympy', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_on_an_amd_gpu_plans_are_estimated_only() -> None:
    """No kernel of this package has run there."""
    assert not planner.recommend("meta-llama/Llama-3.1-8B", "mi300x", 8192).model_runs
    assert planner.recommend("meta-llama/Llama-3.1-8B", "a100", 8192).model_runs


# The choice beyond the noise: the more exact, then the simpler plan, unless a faster one surely is.

WORKLOAD = Workload("m", "h200", 32768)


def candidate(name, score=1.0):
    return Candidate(name, preset(name, WORKLOAD), score, score, 0, 0)


def samples(*rows):
    return np.array(rows, dtype=float)


def test_exactness_comes_first_then_plain_decoding_then_few_formats():
    order = ["autoregressive", "quantspec-weights", "quantspec-exact", "int8", "quantspec-kv", "quantspec",
             "int4-weights", "int4-weights-int8", "quantspec-int4"]  # fmt: skip
    keys = [preference(preset(name, WORKLOAD)) for name in order]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(order)


def test_every_format_beside_bf16_counts():
    def formats(**axes):
        return preference(Plan(WORKLOAD, speculation=Speculation(1), **axes))[-1]

    assert formats() == 0
    assert formats(weights=Weights(draft_bits=4)) == formats(kv=KVCache(KVFormat.INT8)) == 1
    assert formats(weights=Weights(16, 4), kv=KVCache(KVFormat.INT8)) == 2
    assert formats(weights=Weights(8, 4), kv=KVCache(KVFormat.INT8)) == 2  # one copy, that drafts read too


def test_drafts_that_read_every_token_are_simpler_than_those_that_choose():
    fast, simple = candidate("progressive-int8"), candidate("quantspec-int8", 1.02)
    assert choose([fast, simple], samples([1, 1, 1, 1, 2], [1.1, 1.1, 1.1, 1.1, 1])) is simple
    assert why_preferred(simple.plan, fast.plan) == "simpler"


def test_a_simpler_plan_wins_inside_the_noise_and_a_stricter_quality_inside_the_tolerance():
    fast, simple, exact = candidate("progressive"), candidate("quantspec", 1.01), candidate("quantspec-exact", 1.02)
    even = samples([1, 1, 1, 1, 2], [1.1, 1.1, 1.1, 1.1, 1])  # faster in 80%
    surely = samples([1, 1, 1, 1, 1, 1, 2], [1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1])  # in 86%
    assert choose([fast, simple], even) is simple
    assert choose([fast, simple], surely) is fast
    assert choose([fast, exact], surely) is exact


def test_no_plan_contends_that_another_beats_in_time_and_preference():
    """INT8 is within the tolerance of the fastest, but plain decoding is faster than it, and exact."""
    ranked = [candidate("dapq"), candidate("autoregressive", 1.005), candidate("int8", 1.01)]
    assert contenders(ranked, ask(LLAMA, "h200", 32768)) == ranked[1:2]


def test_a_preferred_plan_as_fast_in_every_sample_wins():
    fast, plain = candidate("quantspec"), candidate("autoregressive")
    assert choose([fast, plain], samples([1, 2], [1, 2])) is plain


@pytest.mark.parametrize("objective, kept", [("latency", 2), ("total", 2), ("memory", 1)])
def test_only_plans_within_3_percent_contend_and_memory_has_no_noise(objective, kept):
    question = ask(LLAMA, "h200", 32768, objective=objective)
    ranked = [candidate(name, score) for name, score in
             (("quantspec", 1.0), ("quantspec-kv", 1.03), ("int8", 1.031))]  # fmt: skip
    assert contenders(ranked, question) == ranked[:kept]


def test_rates_that_are_a_prior_compete_at_their_slow_end(h200_profile):
    """The profile has no rates of 8-bit codes of its own: those of 4-bit ones stand in, with a wider spread."""
    classes = {kind: rates for kind, rates in h200_profile.classes.items() if kind != "attention_int8"}
    partial = replace(h200_profile, classes=classes)
    spread = partial.rates("attention_int8").spread
    assert spread > h200_profile.rates("attention_int8").spread
    pair = [candidate("int8", 1.0), candidate("autoregressive", 1.1)]
    for objective, scores in (("latency", [1 + spread, 1.1]), ("memory", [1.0, 1.1])):
        question = ask(LLAMA, "h200", 32768, objective=objective, profile=partial)
        assert [each.score for each in penalize_unmeasured_rates(pair, question)] == pytest.approx(scores)
    measured = ask(LLAMA, "h200", 32768, profile=h200_profile)
    assert penalize_unmeasured_rates(pair, measured) == pair


def test_a_plan_lost_by_what_is_unmeasured_only_if_that_is_more_than_the_winners():
    """No rates of FP8 experts were measured, so both plans of 8-bit weights are priors; the loser is just slower."""
    answer = planner.recommend("Qwen/Qwen3-30B-A3B", "h200", 4096, backend="vllm")
    assert (answer.plan.weights.target_bits, answer.plan.kv.target_bits, answer.predicted.source) == (8, 16, "prior")
    reasons = {other.preset: other.rejected for other in answer.alternatives}
    assert reasons["int8-weights-int8"].startswith("slower: ")
    unmeasured = planner.recommend("Llama-3.1-8B", "h200", 32768, backend="sglang")
    reasons = {other.preset: other.rejected for other in unmeasured.alternatives}
    assert reasons["int8-weights-int8"].startswith("not measured, and slower at the slow end of its band: ")


def test_what_a_preferred_plan_has_ahead_is_named():
    plans = [preset(name, WORKLOAD) for name in ("quantspec-exact", "quantspec", "int8")]
    assert why_preferred(plans[0], plans[1]) == "more exact"
    assert why_preferred(plans[2], plans[1]) == "simpler"


def test_scores_are_what_is_minimized(h200_profile):
    plans = [preset(name, WORKLOAD) for name in ("autoregressive", "quantspec")]
    for objective in ("latency", "total", "memory"):
        question = ask(LLAMA, "h200", 32768, new_tokens=500, objective=objective, profile=h200_profile)
        prediction = [planner.predict(plan, question.shape, h200_profile) for plan in plans]
        expected = {
            "latency": [predicted.best.tpot_ms for predicted in prediction],
            "total": [predicted.best.ttft_ms + 500 * predicted.best.tpot_ms for predicted in prediction],
            "memory": [predicted.best.peak_memory_bytes for predicted in prediction],
        }[objective]
        assert np.median(sampled_scores(prediction, question), axis=1) == pytest.approx(expected, rel=0.05)


def test_the_recommended_plan_says_how_likely_it_is_faster(h200_profile):
    answer = planner.recommend(LLAMA, "h200", 131072, batch=17, profile=h200_profile)
    assert 0.5 < answer.predicted.beats_plain < 0.9  # 3% faster, with layers on the host
    sure = replace(answer, predicted=replace(answer.predicted, beats_plain=0.995))
    assert "faster with over 99% probability" in sure.explain()
    unsure = replace(answer, predicted=replace(answer.predicted, beats_plain=0.876))
    assert "faster with 88% probability" in unsure.explain()
    assert answer.baseline.beats_plain is None
    plain = planner.recommend(
        LLAMA,
        "h200",
        1024,
        batch=512,
        objective="memory",
        quality="exact",
        memory_utilization=1.0,
        profile=replace(h200_profile, hardware=replace(h200_profile.hardware, memory_bytes=10**12)),
    )
    assert (plain.name, plain.predicted.beats_plain) == ("autoregressive", 0)


def test_a_calibration_on_a_busy_machine_cannot_tell_what_is_faster(h200_profile):
    def answer(spread: float) -> planner.Recommendation:
        classes = {kind: replace(rates, spread=spread) for kind, rates in h200_profile.classes.items()}
        profile = replace(h200_profile, classes=classes, date="2026-11-28")
        return planner.recommend(LLAMA, "h200", 32768, profile=profile)

    telling, noisy = answer(0.85), answer(0.95)
    assert telling.predicted.beats_plain is not None and not any("too busy" in note for note in telling.notes)
    assert noisy.predicted.beats_plain is None
    assert noisy.notes[0] == (
        "this machine was too busy to tell which plan is faster: its calibration of 2026-11-28 knows times within 95% "
        "only; run `ridgeplan calibrate --quick` once other programs have ended"
    )
    assert "probability" not in noisy.explain()


def test_plans_that_lost_inside_the_noise_say_so(h200_profile):
    count = 0
    for context, batch, quality in ((2048, 16, "lossy"), (2048, 8, "near-lossless"), (8192, 2, "near-lossless")):
        answer = planner.recommend(LLAMA, "h200", context, batch=batch, profile=h200_profile, quality=quality)
        for other in answer.alternatives:
            if other.rejected.startswith("within the noise"):
                count += 1
                assert 0.97 < other.predicted.best.tpot_ms / answer.predicted.best.tpot_ms <= 1
                assert preference(answer.plan) < preference(other.plan)
    assert count


@pytest.mark.parametrize(
    ("head_dim", "runs"), [(64, True), (256, True), (80, True), (120, True), (24, False), (48, False)]
)
def test_heads_that_no_gpu_kernel_takes_are_refused_in_one_line(head_dim, runs):
    shape = replace(load_shape("Qwen/Qwen2.5-7B"), head_dim=head_dim)
    answer = planner.recommend(shape, "h200", 8192)
    assert answer.model_runs is runs
    assert any(note.startswith(f"no GPU kernel takes heads of {head_dim} values") for note in answer.notes) is not runs


def test_plans_on_the_gpu_win_over_offloaded_ones_within_the_noise() -> None:
    """Batch prefill dominates the total here, so a plan with layers on the host is as fast within the noise."""
    question = {"batch": 16, "new_tokens": 32, "objective": "total"}
    answer = planner.recommend("meta-llama/Meta-Llama-3-8B", "rtx3090", 7929, **question)
    assert not answer.predicted.offloaded_layers
    offloaded = [other for other in answer.alternatives if other.predicted.offloaded_layers]
    assert any(other.rejected.endswith("the recommended plan is all on the GPU") for other in offloaded)


def test_a_name_is_listed_once() -> None:
    """Where nothing fits at the usual quantization groups, others are tried; their plans replace the usual ones."""
    answer = planner.recommend(
        "google/gemma-3-4b-it", "a100", 1993, new_tokens=256, quality="4-bit", memory_limit="8GB"
    )
    names = [(other.preset, other.predicted.offloaded_layers > 0) for other in answer.alternatives]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("gpu", "noted"), [("a100", True), ("rtx4090", False), ("h100", False)])
def test_rates_that_instructions_bind_are_explained(gpu: str, noted: bool) -> None:
    """An A100 has twice a 4090's bandwidth and half its instruction rate, so products of a sixth of an H200's bandwidth
    are bound by instructions there alone."""
    (h200,) = [each for each in shipped_profiles() if each.hardware.name == "h200"]
    slow = {kind: replace(h200.portable[kind], bandwidth_utilization=0.16) for kind in ("linear_int4", "linear_int8")}
    profile = profile_for(load_hardware(gpu), [replace(h200, portable={**h200.portable, **slow})])
    answer = planner.recommend("meta-llama/Llama-3.1-8B", gpu, 8192, profile=profile)
    assert any("8-bit and 4-bit weights run through Triton's kernels" in note for note in answer.notes) == noted


def test_short_prompts_of_a_batch_are_said_to_run_one_by_one() -> None:
    """256 prompts of 512 tokens take the host 28 ms each; one long prompt, or long ones, keep the GPU busy."""

    def noted(context: int, batch: int, **options: str) -> bool:
        answer = planner.recommend("meta-llama/Llama-3.1-8B", "h200", context, batch=batch, **options)
        return any(note.startswith("prompts run one by one") for note in answer.notes)

    assert noted(512, 256)
    assert not noted(512, 1)
    assert not noted(32_768, 2)
    assert not noted(512, 256, backend="vllm")


def test_a_kind_of_text_is_said_to_be_ignored_where_no_drafter_runs():
    def noted(backend: str) -> list[str]:
        answer = planner.recommend("Llama-3.1-8B", "h200", 8192, backend=backend, text="code")
        return [note for note in answer.notes if "text and" in note]

    of_sglang = "text and acceptance length are ignored: of drafters in sglang nothing was measured"
    assert noted("sglang") == [of_sglang]
    assert not noted("vllm") and not noted("ridgeplan")


@pytest.mark.parametrize(
    ("model", "gpu", "options", "noted"),
    [
        ("Mixtral-8x7B-v0.1", "a100-80gb", {}, True),
        ("Mixtral-8x7B-v0.1", "b200", {}, False),  # the CUDA C++ kernel reads them there
        ("Mixtral-8x7B-v0.1", "a100-80gb", {"backend": "vllm"}, False),
        ("Qwen3-30B-A3B", "h200", {"quality": "exact"}, False),
    ],
)
def test_slow_experts_are_named(model: str, gpu: str, options: dict[str, str], noted: bool) -> None:
    answer = planner.recommend(model, gpu, 9000, **options)
    assert any(note.startswith("experts of 8 bits are read at ") for note in answer.notes) == noted


@pytest.mark.parametrize(
    ("model", "gpu", "options", "noted"),
    [
        ("google/gemma-4-31B-it", "h200", {}, True),
        ("google/gemma-4-31B-it", "h200", {"backend": "vllm"}, False),  # whose kernels are others
        ("google/gemma-4-E2B-it", "h200", {}, False),  # which is refused for other reasons
        ("google/gemma-3-12b-it", "h200", {}, False),  # heads of 256 channels
        ("DeepSeek-V2-Lite", "h200", {}, False),  # latents of 512, which have run
    ],
)
def test_attention_that_never_ran_on_a_gpu_is_said_first(model, gpu, options, noted) -> None:
    notes = planner.recommend(model, gpu, 8192, **options).notes
    said = [note for note in notes if "never ran on a GPU" in note]
    assert said == ([notes[0]] if noted else [])
    assert not noted or "heads of 512 channels" in said[0]


@pytest.mark.parametrize(("model", "faster"), [("Qwen3-30B-A3B", True), ("Qwen3-4B", False)])
def test_skewed_routing_hits_fewer_experts_and_takes_less_time(model: str, faster: bool) -> None:
    even, skewed = (planner.recommend(model, "h200", 8192, batch=8, routing_skew=skew) for skew in (0, 1))
    plain_ms = [answer.baseline.best.tpot_ms for answer in (even, skewed)]
    assert (plain_ms[1] < 0.95 * plain_ms[0]) if faster else (plain_ms[1] == plain_ms[0])
    with pytest.raises(PlanError, match=r"routing_skew is 9; allowed: a number from 0 to 8"):
        planner.recommend(model, "h200", 8192, routing_skew=9)
