"""Plans whose gamma adapts: which gammas they have, what they are predicted to take, and where they are offered."""

import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from ridgeplan import planner
from ridgeplan.planner import question
from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.acceptance.drafters import proposal_acceptance, texts_of
from ridgeplan.planner.capacity import peak_bytes
from ridgeplan.planner.lowering import round_costs, steady_kind
from ridgeplan.planner.prediction import predict, predict_all
from ridgeplan.planner.queries.maps import plan_map
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.execution import RUNNING_LOSS, STARTING_LOSS, adaptive_gammas, next_gamma, round_shape
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import DrafterKind, Plan, PlanError, Speculation, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.round import tokens_at, tokens_per_round
from ridgeplan.runtime.speculation.gamma_control import AdaptiveGamma
from ridgeplan.runtime.speculation.speculator import RowResult

LLAMA = load_shape("Llama-3.1-8B")


def plan_of(name="quantspec", gamma=4, adaptive=False, **changes):
    plan = preset(name, Workload("Llama-3.1-8B", "h200", **{"context": 32768, "batch": 4, **changes}))
    return replace(plan, speculation=replace(plan.speculation, gamma=gamma, adaptive=adaptive))


@pytest.mark.parametrize(
    "largest, gammas",
    [(1, (0, 1)), (2, (0, 1, 2)), (3, (0, 1, 2, 3)), (6, (0, 1, 2, 4, 6)), (15, (0, 1, 2, 4, 6, 8, 11, 15))],
)
def test_a_few_gammas_up_to_the_largest(largest, gammas):
    assert adaptive_gammas(largest) == gammas
    assert Speculation(largest, adaptive=True).gammas == gammas
    assert Speculation(largest).gammas == (largest,)


@pytest.mark.parametrize("gamma, larger", [(1, 2), (2, 4), (4, 6), (6, 8), (3, 3), (5, 5), (11, 11), (15, 15)])
def test_a_bound_above_a_gamma_keeps_that_gamma(gamma, larger):
    assert next_gamma(gamma) == larger
    assert gamma in adaptive_gammas(larger)


def test_gammas_between_two_rungs_gain_little():
    """Costs of a draft in plain steps, and acceptances: the best of 1 to 15 is at most 2% faster than the best rung."""
    for draft in np.linspace(0.05, 0.9, 18):
        for acceptance in np.linspace(0.05, 0.99, 30):
            speeds = [tokens_per_round(acceptance, gamma) / (1 + gamma * draft) for gamma in range(16)]
            assert max(speeds) <= 1.021 * max(speeds[gamma] for gamma in adaptive_gammas(15))


def test_a_plan_says_so_in_json_and_older_plans_do_not_adapt():
    plan = plan_of(adaptive=True)
    assert plan.to_dict()["speculation"]["adaptive"] is True
    assert Plan.from_json(plan.to_json()) == plan
    data = plan.to_dict()
    del data["speculation"]["adaptive"]
    assert Plan.from_dict(data) == plan_of()


@pytest.mark.parametrize(
    "speculation, words",
    [
        ({"gamma": 0, "adaptive": True}, "adaptive is true with gamma 0; allowed: gamma of 1 or more"),
        ({"gamma": 4, "adaptive": "yes"}, "adaptive is 'yes'; allowed: true or false"),
        ({"gamma": 4, "adaptive": 6}, "adaptive is 6; allowed: true or false"),
    ],
)
def test_a_bound_of_nothing_is_refused(speculation, words):
    data = {"schema": 1, "workload": {"model": "m", "hardware": "h", "context": 10}, "speculation": speculation}
    with pytest.raises(PlanError, match=words):
        Plan.from_dict(data)


def test_expected_tokens_of_equal_positions_are_leviathans():
    assert tokens_at([0.8] * 6, 4) == pytest.approx(tokens_per_round(0.8, 4))
    assert tokens_at([0.5, 0.1], 2) == 1 + 0.5 + 0.05
    assert tokens_at([0.5, 0.1], 0) == 1


def test_rounds_cost_what_fixed_plans_are_predicted_to_take(h200_profile):
    costs = round_costs(plan_of(gamma=6, adaptive=True), LLAMA, h200_profile)
    assert costs.gammas == (0, 1, 2, 4, 6)
    for gamma in (1, 4, 6):
        # A round's share of a flush depends a little on how many tokens it yields.
        assert 1e3 * costs.seconds[gamma] == pytest.approx(
            predict(plan_of(gamma=gamma), LLAMA, h200_profile).round_ms, rel=1e-3
        )
    plain = predict(plan_of("int8", gamma=0), LLAMA, h200_profile)
    assert 1e3 * costs.plain_s == pytest.approx(plain.round_ms, rel=1e-3)  # the same INT8 target, without drafts
    assert 0.5 < costs.acceptance < 1


def test_rounds_of_other_gammas_are_priced_on_demand(h200_profile):
    assert round_costs(plan_of(), LLAMA, h200_profile).gammas == (0, 4)
    assert round_costs(plan_of(), LLAMA, h200_profile, range(3)).gammas == (0, 1, 2)


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_it_is_predicted_at_the_best_of_its_gammas(h200_profile, batch):
    adaptive = predict(plan_of(gamma=6, adaptive=True, batch=batch, context=8192), LLAMA, h200_profile)
    fixed = predict_all(
        [plan_of(gamma=gamma, batch=batch, context=8192) for gamma in (1, 2, 4, 6)], LLAMA, h200_profile
    )
    best = min(fixed, key=lambda prediction: prediction.best.tpot_ms)
    assert adaptive.best.tpot_ms == pytest.approx(best.best.tpot_ms)
    assert adaptive.gamma == best.gamma
    assert adaptive.acceptance == best.acceptance
    assert adaptive.best.peak_memory_bytes == pytest.approx(fixed[-1].best.peak_memory_bytes)


def test_where_drafts_do_not_pay_it_is_predicted_to_decode_plainly(h200_profile):
    """Drafts that read what the target reads are all accepted, and cost a whole step each."""
    plan = Plan(Workload("Llama-3.1-8B", "h200", 512, batch=64), speculation=Speculation(4, adaptive=True))
    model = AcceptanceModel.of_profile(LLAMA, 512, h200_profile)
    assert steady_kind(plan, LLAMA, Machine.of(h200_profile), model) == 0
    prediction = predict(plan, LLAMA, h200_profile)
    assert (prediction.gamma, prediction.tokens_per_round) == (0, 1)
    assert prediction.round_s["draft"] == 0


def test_memory_is_kept_for_the_largest_gamma(h200_profile):
    """Graphs share their workspace, so it is that of the largest round."""
    machine = Machine.of(h200_profile)
    for largest in (2, 6):
        adaptive, fixed = (peak_bytes(plan_of(gamma=largest, adaptive=each), LLAMA, machine) for each in (True, False))
        assert adaptive == fixed
    small, large = (predict(plan_of(gamma=each, adaptive=True), LLAMA, h200_profile) for each in (2, 11))
    rows = 4 * (12 - 3)  # more queries
    logits = 5 * rows * LLAMA.vocab * 2
    assert large.memory_bytes["decode_workspace"] - small.memory_bytes["decode_workspace"] > logits
    kv = rows * LLAMA.layers * LLAMA.kv_elements_per_token_per_layer * 2
    assert large.memory_bytes["buffers"] - small.memory_bytes["buffers"] == kv


def recommended(profile, **changes):
    return planner.recommend("Llama-3.1-8B", "h200", profile=profile, **{"ctx": 32768, **changes})


def test_an_answer_that_drafts_has_an_adaptive_form_that_is_as_fast(h200_profile):
    answer = recommended(h200_profile)
    assert answer.plan.speculation.active
    assert not answer.plan.speculation.adaptive
    changed = replace(answer.adaptive.speculation, gamma=answer.plan.speculation.gamma, adaptive=False)
    assert replace(answer.adaptive, speculation=changed) == answer.plan
    assert answer.adaptive.speculation.gamma == next_gamma(answer.plan.speculation.gamma)
    fixed, adaptive = predict_all([answer.plan, answer.adaptive], LLAMA, h200_profile)
    assert adaptive.best.tpot_ms <= fixed.best.tpot_ms * (1 + 1e-9)
    assert answer.to_dict()["adaptive"] == answer.adaptive.to_dict()
    percent = 100 * (RUNNING_LOSS + STARTING_LOSS)
    assert percent < 3
    assert f"at most {percent:.3g}% slower than plain" in answer.explain()


def test_an_answer_without_drafts_or_for_least_memory_has_none(h200_profile):
    plain = recommended(h200_profile, ctx=512, batch=256)
    recommendation = recommended(h200_profile, objective="memory")
    assert not plain.plan.speculation.active
    assert plain.adaptive is None
    assert recommendation.adaptive is None
    assert "adaptive" not in plain.explain()


def test_where_a_larger_bound_does_not_fit_the_plans_own_gamma_is_the_bound(h200_profile):
    free = recommended(h200_profile, ctx=4096, batch=32)
    machine = Machine.of(h200_profile)
    peak, larger = (
        peak_bytes(replace(free.plan, speculation=replace(free.plan.speculation, gamma=gamma)), LLAMA, machine)
        for gamma in (free.plan.speculation.gamma, free.adaptive.speculation.gamma)
    )
    assert peak < larger
    tight = recommended(h200_profile, ctx=4096, batch=32, memory_limit=(peak + larger) / 2)
    assert tight.plan == free.plan
    assert tight.adaptive.speculation == replace(free.plan.speculation, adaptive=True)


def played(kind, proposals, accepted, drafted, generator):
    """A round of one sequence: rates of proposals, of their acceptance and of drafts, at chance."""
    shape = round_shape(kind)

    def count(limit, rate):
        return next((n for n in range(limit) if generator.random() >= rate), limit)

    had = 4 * (generator.random() < proposals)
    matched = count(had, accepted)
    hits = [4 * (generator.random() < proposals) * (shape.depth > 0) for _ in range(shape.passes)]
    drafts = min(sum(1 + count(hit, accepted) for hit in hits), shape.gamma)
    kept = min(matched, shape.gamma) if shape.proposes_to_target else count(drafts, drafted)
    verified = min(kept + 1, had if shape.proposes_to_target else drafts)
    equal = min(matched, kept)
    compared = min(equal + 1, had, kept + 1)
    return RowResult([0] * (kept + 1), kept, verified, True, drafts, had, compared, min(equal, compared))


@pytest.mark.parametrize("name, text", [("meta-llama/Llama-3.1-8B", "code"), ("Qwen2.5-Coder-0.5B-Instruct", "docs")])
def test_adaptive_tiers_take_the_expected_time_over_texts(h200_profile, name, text):
    """By simulation of the schedule that the engine has, over generations of 1,024 tokens on texts of the spread.

    The second name is of a model with rows of its own, whose texts differ less.
    """
    workload = Workload(name, "h200", 4096, new_tokens=1024, text=text)
    plan = preset("adaptive-cascade", workload)
    costs, predicted = round_costs(plan, LLAMA, h200_profile), predict(plan, LLAMA, h200_profile)
    known = proposal_acceptance(DrafterKind.SUFFIX, workload)
    hits, accepted, weights = texts_of(known, 4, 1)
    generator, seconds, played_weight = random.Random(0), 0.0, 0.0
    for hit, rate, weight in zip(hits, accepted, weights, strict=True):
        for _ in range(3 if weight > 0.01 else 0):  # the others weigh 4% in all
            schedule, taken_s, tokens, flight = AdaptiveGamma(costs, 1024), 0.0, 0, deque()
            while tokens < 1024:
                while len(flight) < 2:  # rounds in flight on a GPU
                    flight.append(schedule.next())
                kind = flight.popleft()
                row = played(kind, hit, rate, costs.acceptance, generator)
                taken_s, tokens = taken_s + costs.seconds[kind], tokens + len(row.tokens)
                schedule.add(kind, [row])
            seconds, played_weight = seconds + weight * taken_s / tokens, played_weight + weight
    assert 1e3 * seconds / played_weight == pytest.approx(predicted.best.tpot_ms, rel=0.03)


@pytest.mark.parametrize("context, text, names", [
    (4096, "code", {"adaptive-cascade"}), (32768, "docs", {"adaptive-cascade"}),
    (4096, "prose", {"quantspec-int8", "8-bit weights + BF16+INT4 KV + 4-bit drafts on upper codes"}),
])  # fmt: skip
def test_adaptive_tiers_are_recommended_where_texts_differ_enough(context, text, names):
    """By the shipped calibration."""
    ask = {"text": text, "new_tokens": 1024}
    answer = planner.recommend("Llama-3.1-8B", "h200", context, **ask)
    assert answer.name in names
    (mapped,) = plan_map(question.ask("Llama-3.1-8B", "h200", context, **ask), [context], [1]).names[0]
    assert mapped == answer.name
    adapting = answer.plan.speculation.adaptive
    assert ("where it pays on the text" in answer.drafter_text) == adapting
    if adapting:
        assert Plan.from_json(answer.plan.to_json()) == answer.plan
        ends = answer.predicted.low.tpot_ms, answer.predicted.best.tpot_ms, answer.predicted.high.tpot_ms
        assert list(ends) == sorted(ends)
        fixed = [other for other in answer.alternatives if other.rejected.startswith("slower")]
        assert all(other.predicted.best.tpot_ms > 1.02 * answer.predicted.best.tpot_ms for other in fixed)
