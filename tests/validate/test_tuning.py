"""The steps of tuning on landscapes whose best points are known."""

from dataclasses import replace
from itertools import pairwise

import pytest

from ridgeplan.planner.search import RATIOS
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Plan, PlanError, Speculation, Workload
from ridgeplan.roofline.plan.policies.selections import StreamingLLM
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.round import flush_capped
from ridgeplan.validate import acceptance as acceptance_module
from ridgeplan.validate import engines as engines_module
from ridgeplan.validate.acceptance import Passage
from ridgeplan.validate.prompts import PromptError
from ridgeplan.validate.tuning import (
    STABLE,
    Landscape,
    MeasuredDrafts,
    Schedule,
    Step,
    Tuning,
    TuningPoint,
    tune,
    tune_steps,
)

GAMMAS = range(1, 7)


def landscape(acceptance, draft=lambda ratio: 0.2, group=None):
    """Rounds of one plain millisecond, with drafts of `draft(ratio)` of it; equal acceptance at every position."""
    at = {ratio: (value,) * 6 for ratio, value in acceptance.items()}
    return Landscape(at, lambda ratio, gamma: 1e-3 * (1 + gamma * draft(ratio)), group)


def test_the_ratio_is_where_acceptance_stabilizes_then_gamma_then_the_ratio_that_is_fastest():
    """Drafts cost as many tokens as they read; acceptance rises little after 7%, and saturates after 15%."""
    acceptance = {0.25: 0.9, 0.15: 0.9, 0.07: 0.89, 0.04: 0.8, 0.02: 0.6}
    ratio, gamma, again = tune_steps(landscape(acceptance, lambda ratio: 0.1 + 2 * ratio), GAMMAS)
    assert [step.name for step in (ratio, gamma, again)] == ["ratio", "gamma", "ratio again"]
    maximum = sum(0.9**position for position in range(7))
    assert sum(0.89**position for position in range(7)) > STABLE * maximum > sum(0.8**position for position in range(7))
    assert [candidate.ratio for candidate in ratio.candidates] == sorted(acceptance)
    assert {candidate.gamma for candidate in ratio.candidates} == {6}
    assert ratio.chosen.ratio == 0.07
    paces = {each: (1 + 0.24 * each) / sum(0.89**position for position in range(each + 1)) for each in GAMMAS}
    assert gamma.chosen.gamma == min(paces, key=paces.__getitem__) == 5
    assert gamma.chosen.tpot_ms == pytest.approx(paces[5])
    # With five drafts 4% takes 1.9 / 3.69, 7% 2.2 / 4.58 and 15% 3 / 4.69.
    assert {candidate.gamma for candidate in again.candidates} == {5}
    assert again.chosen.ratio == 0.07
    cheap = tune_steps(landscape(acceptance | {0.04: 0.86}, lambda ratio: 0.1 + 2 * ratio), GAMMAS)
    assert (cheap[0].chosen.ratio, cheap[2].chosen.ratio) == (0.07, 0.04)


def test_a_plan_with_one_ratio_has_only_gamma_to_tune():
    (step,) = tune_steps(landscape({1.0: 0.8}, lambda ratio: 0.35), GAMMAS)
    assert step.name == "gamma"
    assert [candidate.gamma for candidate in step.candidates] == list(GAMMAS)
    assert step.chosen.gamma == 3  # 1.7 / 2.44 with two drafts, 2.05 / 2.952 with three, 2.4 / 3.3616 with four
    assert step.chosen.tpot_ms == pytest.approx(2.05 / 2.952)


def test_rounds_end_at_flushes_where_the_target_reads_codes():
    free, capped = (landscape({1.0: 0.9}, group=group).candidate(1.0, 4) for group in (None, 32))
    assert free.tokens_per_round == pytest.approx(4.0951)
    assert capped.tokens_per_round == flush_capped(free.tokens_per_round, 32) < free.tokens_per_round


def test_steps_are_plain_values():
    (step,) = tune_steps(landscape({1.0: 0.5}, lambda ratio: 0.9), range(1, 3))
    document = step.to_dict()
    assert document["name"] == "gamma"
    assert [candidate.pop("acceptance_at") for candidate in document["candidates"]] == [(0.5,), (0.5, 0.5)]
    candidate = {"ratio": 1.0, "gamma": 1, "tokens_per_round": 1.5, "round_ms": 1.9, "tpot_ms": 1.9 / 1.5}
    two = {"ratio": 1.0, "gamma": 2, "tokens_per_round": 1.75, "round_ms": 2.8, "tpot_ms": 1.6}
    assert document["candidates"] == [pytest.approx(candidate), pytest.approx(two)]
    assert document["chosen"] == document["candidates"][0]


def test_measured_steps_take_the_least_time():
    """Gamma by gamma the fewest milliseconds count, also where the largest gamma accepts most."""
    ran = []
    tpot_ms = {(0.1, 3): 3.0, (0.3, 3): 2.9, (0.1, 1): 2.0, (0.1, 2): 4.0, (0.3, 1): 1.5}

    class Points:
        ratios = (0.1, 0.3)

        def candidate(self, ratio, gamma):
            ran.append((ratio, gamma))
            return TuningPoint(ratio, gamma, 1.0 + gamma, tpot_ms[ratio, gamma] * (1.0 + gamma))

    steps = tune_steps(Points(), range(1, 4))
    assert [step.chosen.ratio for step in steps] == [0.1, 0.1, 0.3]
    assert (steps[1].chosen.gamma, steps[2].chosen.tpot_ms) == (1, pytest.approx(1.5))
    assert ran == [(0.1, 3), (0.3, 3), (0.1, 1), (0.1, 2), (0.1, 3), (0.1, 1), (0.3, 1)]


# Tuning with a tiny model: what is measured, what it is named, and what becomes of the plan.

TEXT = Passage("The quick brown fox jumps over the lazy dog. " * 40, "foxes", (), 40)


@pytest.fixture
def plan(tiny_folder):
    return preset("quantspec", Workload(tiny_folder.name, "h200", 260, 64, 2))


def test_a_plan_gets_the_gamma_that_is_fastest(plan, tiny_folder, h200_profile):
    tuning = tune(plan, str(tiny_folder), TEXT, h200_profile, 5, "cpu", quick=True)
    (step,) = tuning.steps
    assert [candidate.gamma for candidate in step.candidates] == [1, 2, 3, 4, 5]
    assert tuning.chosen.tpot_ms == min(candidate.tpot_ms for candidate in step.candidates)
    assert tuning.plan == replace(plan, speculation=replace(plan.speculation, gamma=tuning.chosen.gamma))
    assert tuning.speedup == tuning.plain_ms / tuning.chosen.tpot_ms
    adaptive = replace(plan, speculation=replace(plan.speculation, adaptive=True))
    again = tune(adaptive, str(tiny_folder), TEXT, h200_profile, 5, "cpu", quick=True)
    assert again.plan.speculation == replace(tuning.plan.speculation, adaptive=True)


@pytest.mark.parametrize(
    ("plain_ms", "spread", "speedup"),
    [
        (10.0, 0.05, pytest.approx(2.0)),
        (10.0, None, pytest.approx(2.0)),
        (10.0, 0.5, None),  # rounds differ too much
        (20.0, 0.05, None),  # 4x with 3 tokens per round, which takes a plain step at least
    ],
)
def test_a_gain_that_other_work_may_have_made_is_not_known(plan, plain_ms, spread, speedup):
    steps = (Step("gamma", (TuningPoint(1.0, 3, 3.0, 15.0),), 0),)
    assert Tuning(plan, steps, plain_ms, (), spread=spread).speedup == speedup


def test_rows_say_what_was_counted(plan, tiny_folder, h200_profile, monkeypatch):
    monkeypatch.setattr(acceptance_module, "MIN_DRAFTS", 20)
    rows = tune(plan, str(tiny_folder), TEXT, h200_profile, 3, "cpu", quick=True).rows
    assert [row.position for row in rows] == [1, 2, 3][: len(rows)]
    first = rows[0]
    assert (first.draft, first.ratio, first.gamma, first.context) == ("w4kv4", 1.0, 3, 260)
    assert (first.model, first.text, first.source) == (load_shape(str(tiny_folder)).name, "foxes", "measured")
    assert (first.dtype, first.quantizer) == ("float32", "diagonal")
    assert 20 <= first.tokens <= 2 * 39
    assert all(later.tokens <= sooner.tokens for sooner, later in pairwise(rows))


def test_acceptance_of_few_drafts_leans_on_the_position_before(tiny_folder, plan):
    result = MeasuredDrafts(plan, (98, 6, 0), (49, 6, 0))
    first = (49 + 2 * 55.5 / 105) / 100  # of all drafts 55.5 of 105 are accepted, Jeffreys' half included
    assert result.acceptance_at == pytest.approx((first, (6 + 2 * first) / 8, (6 + 2 * first) / 8))


def test_drafts_that_read_what_the_target_reads_leave_no_rows(tiny_folder, h200_profile):
    same = Plan(Workload(tiny_folder.name, "h200", 260, 64), speculation=Speculation(2))
    tuning = tune(same, str(tiny_folder), TEXT, h200_profile, 2, "cpu", quick=True)
    assert tuning.rows == ()
    assert [candidate.tokens_per_round for candidate in tuning.steps[0].candidates] == pytest.approx([2, 3], rel=0.02)


def test_every_ratio_is_measured_with_one_set_of_weights(tiny_folder, h200_profile, monkeypatch):
    """Drafts read all tokens at every ratio, the latest ones of them anyway."""
    sparse = Plan(
        Workload(tiny_folder.name, "h200", 260, 64),
        speculation=Speculation(4, selection=StreamingLLM(ratio=0.3, floor=0, recent=400)),
    )
    loads, real = [], engines_module.load

    def load(plan, *arguments, **named):
        loads.append((plan.speculation, named["weights"] is not None))
        return real(plan, *arguments, **named)

    monkeypatch.setattr(engines_module, "load", load)
    tuning = tune(sparse, str(tiny_folder), TEXT, h200_profile, 3, "cpu", quick=True)
    ratios = sorted({*RATIOS, 0.3})
    assert [(load.ratio, load.gamma, load.adaptive, shared) for load, shared in loads] == [
        (ratio, 3, False, number > 0) for number, ratio in enumerate(ratios)
    ]
    assert [step.name for step in tuning.steps] == ["ratio", "gamma", "ratio again"]
    # All are accepted as often, so the fewest tokens are the best.
    assert tuning.plan.speculation.ratio == ratios[0]


@pytest.mark.parametrize(
    "floor, expected", [(0, [0.02, 0.04, 0.07]), (29, [0.07, 0.1, 0.15]), (200, [0.5]), (400, [0.5])]
)
def test_ratios_that_read_the_same_tokens_are_measured_once(floor, expected, tiny_folder, h200_profile, monkeypatch):
    """Of 300 tokens at the end 7% are 21, 10% are 30, and half are 150."""
    selection = StreamingLLM(ratio=0.1, floor=floor)
    sparse = Plan(Workload(tiny_folder.name, "h200", 260, 64), speculation=Speculation(4, selection=selection))
    assert Schedule(sparse, TEXT.tokens, 3).ratios[:3] == expected


def test_every_gamma_is_measured_with_its_own_acceptance(plan, tiny_folder, monkeypatch):
    """Drafts of 4 bits: gamma 1 to 3 and plain decoding. No rates are needed."""
    monkeypatch.setattr(acceptance_module, "MIN_DRAFTS", 10)
    seen = []
    report = lambda what, done, total: seen.append((what, done, total))  # noqa: E731
    tuning = tune(plan, str(tiny_folder), TEXT, None, 3, "cpu", report)
    (step,) = tuning.steps
    assert (step.name, tuning.measured, tuning.generations) == ("gamma", True, 4)
    names = ["ratio 1, gamma 1", "ratio 1, gamma 2", "ratio 1, gamma 3", "plain decoding"]
    assert seen == [*((name, number, 4) for number, name in enumerate(names)), ("tuned", 1, 1)]
    assert [candidate.gamma for candidate in step.candidates] == [1, 2, 3]
    assert tuning.chosen.tpot_ms == min(candidate.tpot_ms for candidate in step.candidates) > 0
    assert tuning.plain_ms > 0
    for candidate in step.candidates:
        assert len(candidate.acceptance_at) == candidate.gamma
        assert 1 <= candidate.tokens_per_round <= candidate.gamma + 1
    assert {(row.gamma, row.position) for row in tuning.rows} >= {(1, 1), (2, 1), (3, 1)}
    assert all(row.position <= row.gamma for row in tuning.rows)


def test_plain_decoding_has_the_target_and_nothing_of_the_drafts(tiny_folder):
    workload = Workload(tiny_folder.name, "h200", 260, 64)
    plain = {name: Schedule(preset(name, workload), 40, 3).plain_plan for name in ("quantspec", "progressive-exact")}
    assert {name: each.kv.format.value for name, each in plain.items()} == {
        "quantspec": "int4x2",
        "progressive-exact": "bf16",
    }
    assert all((each.speculation, each.weights.draft_bits) == (Speculation(), 16) for each in plain.values())
    assert plain["quantspec"].workload.new_tokens == 40


def test_generations_are_counted_and_timed_before_they_run(h200_profile):
    """Seven ratios, eight other gammas, six other ratios and plain decoding; or the seven alone."""
    sparse = Plan(Workload("Llama-3.1-8B", "h200", 32768, 64), speculation=Speculation(4, selection=StreamingLLM()))
    measured, quick = (Schedule(sparse, 256, 9, quick) for quick in (False, True))
    assert (measured.max_generations, quick.max_generations) == (7 + 8 + 6 + 1, 7)
    shape = load_shape("Llama-3.1-8B")
    seconds = measured.predicted_s(shape, h200_profile)
    assert seconds == pytest.approx(22 / 7 * quick.predicted_s(shape, h200_profile))
    assert 22 * 1.0 < seconds < 22 * 10.0  # a prompt takes about two seconds, and a token 5 ms


@pytest.mark.parametrize(
    "changes, words",
    [({"largest": 0}, "the largest gamma is 0; allowed: 1 to 15"), ({"largest": 16}, "the largest gamma is 16")],
)
def test_what_cannot_be_tuned_is_refused(changes, words, plan, tiny_folder, h200_profile):
    with pytest.raises(PlanError, match=words):
        tune(plan, str(tiny_folder), TEXT, h200_profile, **changes)


def test_plans_without_drafts_and_short_texts_are_refused(plan, tiny_folder, h200_profile):
    with pytest.raises(PlanError, match="gamma 0; allowed: a plan that drafts"):
        tune(Plan(plan.workload), str(tiny_folder), TEXT, h200_profile, 3)
    with pytest.raises(PromptError, match="needed: 261"):
        tune(plan, str(tiny_folder), replace(TEXT, text="short"), h200_profile, 3, "cpu")
