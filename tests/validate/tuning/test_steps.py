"""The steps of tuning on landscapes whose best points are known."""

import pytest

from ridgeplan.roofline.speculation import flush_capped
from ridgeplan.validate.tuning import STABLE, Landscape, tune_steps

GAMMAS = range(1, 7)


def landscape(acceptance, draft=lambda ratio: 0.2, group=None):
    """Rounds of one plain millisecond, with drafts of `draft(ratio)` of it; equal acceptance at every position."""
    at = {ratio: [value] * 6 for ratio, value in acceptance.items()}
    return Landscape(at, lambda ratio, gamma: 1e-3 * (1 + gamma * draft(ratio)), group)


def test_the_ratio_is_where_acceptance_stabilizes_then_gamma_then_the_ratio_that_is_fastest():
    """Drafts cost as many tokens as they read; acceptance rises little after 7%, and saturates after 15%."""
    acceptance = {0.25: 0.9, 0.15: 0.9, 0.07: 0.89, 0.04: 0.8, 0.02: 0.6}
    ratio, gamma, again = tune_steps(landscape(acceptance, lambda ratio: 0.1 + 2 * ratio), GAMMAS)
    assert [step.name for step in (ratio, gamma, again)] == ["ratio", "gamma", "ratio again"]
    most = sum(0.9**position for position in range(7))
    assert sum(0.89**position for position in range(7)) > STABLE * most > sum(0.8**position for position in range(7))
    assert [one.ratio for one in ratio.candidates] == sorted(acceptance)
    assert {one.gamma for one in ratio.candidates} == {6}
    assert ratio.chosen.ratio == 0.07
    paces = {each: (1 + 0.24 * each) / sum(0.89**position for position in range(each + 1)) for each in GAMMAS}
    assert gamma.chosen.gamma == min(paces, key=paces.__getitem__) == 5
    assert gamma.chosen.tpot_ms == pytest.approx(paces[5])
    # With five drafts 4% takes 1.9 / 3.69, 7% 2.2 / 4.58 and 15% 3 / 4.69.
    assert {one.gamma for one in again.candidates} == {5}
    assert again.chosen.ratio == 0.07
    cheap = tune_steps(landscape(acceptance | {0.04: 0.86}, lambda ratio: 0.1 + 2 * ratio), GAMMAS)
    assert (cheap[0].chosen.ratio, cheap[2].chosen.ratio) == (0.07, 0.04)


def test_a_plan_with_one_ratio_has_only_gamma_to_tune():
    (step,) = tune_steps(landscape({1.0: 0.8}, lambda ratio: 0.35), GAMMAS)
    assert step.name == "gamma"
    assert [one.gamma for one in step.candidates] == list(GAMMAS)
    assert step.chosen.gamma == 3  # 1.7 / 2.44 with two drafts, 2.05 / 2.952 with three, 2.4 / 3.3616 with four
    assert step.chosen.tpot_ms == pytest.approx(2.05 / 2.952)


def test_rounds_end_at_flushes_where_the_target_reads_codes():
    free, capped = (landscape({1.0: 0.9}, group=group).candidate(1.0, 4) for group in (None, 32))
    assert free.tokens_per_round == pytest.approx(4.0951)
    assert capped.tokens_per_round == flush_capped(free.tokens_per_round, 32) < free.tokens_per_round


def test_steps_are_plain_values():
    (step,) = tune_steps(landscape({1.0: 0.5}, lambda ratio: 0.9), range(1, 3))
    one = {"ratio": 1.0, "gamma": 1, "tokens_per_round": 1.5, "round_ms": 1.9, "tpot_ms": 1.9 / 1.5}
    two = {"ratio": 1.0, "gamma": 2, "tokens_per_round": 1.75, "round_ms": 2.8, "tpot_ms": 1.6}
    found = step.to_dict()
    assert found["name"] == "gamma"
    assert found["candidates"] == [pytest.approx(one), pytest.approx(two)]
    assert found["chosen"] == found["candidates"][0]
