"""The choice beyond the noise: the more exact, then the simpler plan, unless a faster one surely is."""

from dataclasses import replace

import numpy as np
import pytest

from ridgeplan import planner
from ridgeplan.planner.question import ask
from ridgeplan.planner.recommend import chosen, contenders, preference, sampled_scores, why_preferred
from ridgeplan.planner.search import Candidate
from ridgeplan.roofline.plan.plan import KVCache, KVFormat, Plan, Speculation, Weights, Workload
from ridgeplan.roofline.plan.presets import preset

WORKLOAD = Workload("m", "h200", 32768)
LLAMA = "meta-llama/Llama-3.1-8B"


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
    assert chosen([fast, simple], samples([1, 1, 1, 1, 2], [1.1, 1.1, 1.1, 1.1, 1])) is simple
    assert why_preferred(simple.plan, fast.plan) == "simpler"


def test_an_exact_plan_wins_inside_the_noise():
    fast, exact = candidate("quantspec"), candidate("quantspec-exact", 1.02)
    even = samples([1, 1, 1, 1, 2], [1.1, 1.1, 1.1, 1.1, 1])  # faster in 80%
    assert chosen([fast, exact], even) is exact
    surely = samples([1, 1, 1, 1, 1, 1, 2], [1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1])  # in 86%
    assert chosen([fast, exact], surely) is fast


def test_a_preferred_plan_as_fast_in_every_sample_wins():
    fast, plain = candidate("quantspec"), candidate("autoregressive")
    assert chosen([fast, plain], samples([1, 2], [1, 2])) is plain


@pytest.mark.parametrize("objective, kept", [("latency", 3), ("total", 3), ("memory", 2)])
def test_only_plans_within_3_percent_contend_and_memory_has_no_noise(objective, kept):
    question = ask(LLAMA, "h200", 32768, objective=objective)
    found = [candidate(name, score) for name, score in
             (("quantspec", 1.0), ("int8", 1.0), ("quantspec-kv", 1.03), ("autoregressive", 1.031))]  # fmt: skip
    assert contenders(found, question) == found[:kept]


def test_what_a_preferred_plan_has_ahead_is_named():
    plans = [preset(name, WORKLOAD) for name in ("quantspec-exact", "quantspec", "int8")]
    assert why_preferred(plans[0], plans[1]) == "more exact"
    assert why_preferred(plans[2], plans[1]) == "simpler"


def test_scores_are_what_is_minimized(h200_profile):
    plans = [preset(name, WORKLOAD) for name in ("autoregressive", "quantspec")]
    for objective in ("latency", "total", "memory"):
        question = ask(LLAMA, "h200", 32768, new_tokens=500, objective=objective, profile=h200_profile)
        found = [planner.predict(plan, question.shape, h200_profile) for plan in plans]
        expected = {
            "latency": [one.best.tpot_ms for one in found],
            "total": [one.best.ttft_ms + 500 * one.best.tpot_ms for one in found],
            "memory": [one.best.peak_memory_bytes for one in found],
        }[objective]
        assert np.median(sampled_scores(found, question), axis=1) == pytest.approx(expected, rel=0.05)


def test_the_recommended_plan_says_how_likely_it_is_faster(h200_profile):
    answer = planner.recommend(LLAMA, "h200", 131072, batch=16, profile=h200_profile)
    assert 0.5 < answer.predicted.beats_plain < 0.9  # 9% faster, with layers on the host
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


def test_plans_that_lost_inside_the_noise_say_so(h200_profile):
    found = 0
    for context, batch, quality in ((4096, 2, "lossy"), (8192, 16, "lossy"), (32768, 1, "near-lossless")):
        answer = planner.recommend(LLAMA, "h200", context, batch=batch, profile=h200_profile, quality=quality)
        for other in answer.alternatives:
            if other.rejected.startswith("within the noise"):
                found += 1
                assert 0.97 < other.predicted.best.tpot_ms / answer.predicted.best.tpot_ms <= 1
                assert preference(answer.plan) < preference(other.plan)
    assert found
