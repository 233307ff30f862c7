"""Regret, counted by hand, and which candidates are measured."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeplan.planner.quality import Quality, quality_of
from ridgeplan.planner.search import families
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile, Rates
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.roofline.plan.presets import PRESETS, preset
from ridgeplan.roofline.plan.support import missing_execution
from ridgeplan.validate.suite import sections as module
from ridgeplan.validate.suite.sections import RegretCandidate, candidates, row_of, to_measure
from ridgeplan.validate.timing import KernelCall

WORKLOAD = Workload("Qwen2.5-0.5B", "h200", 20_000, 256)
SHAPE = load_shape("Qwen2.5-0.5B")


def with_gamma(gamma: int, name: str = "quantspec") -> Plan:
    plan = preset(name, WORKLOAD)
    return replace(plan, speculation=replace(plan.speculation, gamma=gamma))


def candidate(plan: Plan, tpot_ms: float, gamma: int = 0, acceptance: float = 0.9) -> RegretCandidate:
    best, known = SimpleNamespace(tpot_ms=tpot_ms), SimpleNamespace(best=acceptance)
    predicted: Any = SimpleNamespace(best=best, gamma=gamma, acceptance=known, tokens_per_round=2.0)
    return RegretCandidate(plan, predicted)


def test_calls_of_experts_are_predicted_without_their_router(h200_profile: Profile) -> None:
    """A step's experts have one, which the rates of a profile add to what was calibrated."""
    experts = Rates(0.8, 0.7, 2e-6, 0.05)
    profile = replace(h200_profile, classes={**h200_profile.classes, "grouped_linear": experts})
    call = KernelCall("grouped_linear", "no bytes", Cost(), lambda variant: None)
    assert module.predicted_seconds(call, Machine.of(profile)) == pytest.approx(experts.launch_s)
    assert profile.rates("grouped_linear").launch_s > 2 * experts.launch_s


def test_regret_is_the_recommended_plans_time_over_the_best_measured() -> None:
    plain, good, better = preset("autoregressive", WORKLOAD), with_gamma(3), with_gamma(5)
    chosen = [candidate(good, 1.0, 3), candidate(better, 1.05, 5), candidate(plain, 1.5)]
    row = row_of(good, chosen, {good: 1.1, better: 1.0, plain: 1.6}, 7)
    assert row.regret == pytest.approx(0.1)
    assert row.best == "quantspec, gamma 5, 20000 tokens, batch 1"
    assert (row.recommended_ms, row.best_ms, row.left_out) == (1.1, 1.0, 7)
    assert [candidate["measured_ms"] for candidate in row.candidates] == [1.1, 1.0, 1.6]
    assert [candidate["predicted_ms"] for candidate in row.candidates] == [1.0, 1.05, 1.5]


def test_the_best_plan_has_no_regret() -> None:
    plain, good = preset("autoregressive", WORKLOAD), with_gamma(3)
    assert row_of(good, [candidate(good, 1), candidate(plain, 2)], {good: 1.0, plain: 1.5}, 0).regret == 0


def test_a_rounds_time_is_shared_by_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measured_round", lambda model, plan: SimpleNamespace(total_s=0.003))
    result: Any = None
    assert module._measured_ms(result, candidate(with_gamma(3), 1.0)) == pytest.approx(1.5)  # 3 ms for two tokens


def test_presets_the_best_of_each_family_and_what_is_near_the_best_are_measured() -> None:
    named = {name: preset(name, WORKLOAD) for name in ("quantspec", "autoregressive")}
    near = [with_gamma(gamma) for gamma in (2, 3, 6)]  # of QuantSpec's family, as its preset with gamma 4
    family_best, family_next = with_gamma(5, "quantspec-exact"), with_gamma(6, "quantspec-exact")
    ranked = [
        candidate(near[1], 1.0), candidate(named["quantspec"], 1.1), candidate(near[0], 1.15),
        candidate(family_best, 1.17), candidate(near[2], 1.18), candidate(family_next, 1.19),
        candidate(with_gamma(9), 1.21), candidate(named["autoregressive"], 2.0),
        candidate(with_gamma(5, "quantspec-kv"), 3.0),
    ]  # fmt: skip
    chosen, left_out = to_measure(ranked, near[1], max_candidates=1)
    plans = [candidate.plan for candidate in chosen]
    assert set(plans) == {near[1], named["quantspec"], named["autoregressive"], family_best, near[0]}
    assert len(plans) == 5
    assert left_out == 2  # those of gamma 6 are near the best; gamma 9 and the best of a slow family are not


def test_the_recommended_plan_is_measured_wherever_it_is_predicted() -> None:
    slow = with_gamma(11)
    chosen, _ = to_measure([candidate(with_gamma(3), 1.0), candidate(slow, 9.0)], slow, max_candidates=0)
    assert slow in [candidate.plan for candidate in chosen]


@pytest.mark.slow
def test_candidates_are_all_that_run_at_the_allowed_quality_and_fit(
    h200_profile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer: Any = SimpleNamespace(plan=with_gamma(3))
    roomy: Any = SimpleNamespace(fitting=lambda plans: plans)
    ranked = candidates(answer, SHAPE, h200_profile, roomy)
    plans = [candidate.plan for candidate in ranked]
    assert len(set(plans)) == len(plans)
    assert [candidate.tpot_ms for candidate in ranked] == sorted(candidate.tpot_ms for candidate in ranked)
    assert all(not missing_execution(plan, SHAPE) for plan in plans)
    assert all(Quality.NEAR_LOSSLESS.allows(quality_of(plan)) for plan in plans)
    named = {preset(name, WORKLOAD) for name in PRESETS}
    runs = {plan for plan in named if not missing_execution(plan, SHAPE)}
    assert {plan for plan in runs if Quality.NEAR_LOSSLESS.allows(quality_of(plan))} <= set(plans)
    assert {preset(name, WORKLOAD) for name in ("autoregressive", "int8", "quantspec")} <= set(plans)
    # Filters are tried on a corner of each family's grid; building all its plans takes longer than all else here.
    corner = [
        replace(family, gammas=family.gammas[:2], ratios=family.ratios[:1])
        for family in families(WORKLOAD, offload=False)
    ]
    monkeypatch.setattr(module, "families", lambda workload, offload: corner)
    narrow: Any = SimpleNamespace(fitting=lambda plans: [plan for plan in plans if not plan.weights.draft_differs])
    assert all(
        not candidate.plan.weights.draft_differs for candidate in candidates(answer, SHAPE, h200_profile, narrow)
    )
    monkeypatch.setattr(module, "QUALITY", Quality.EXACT)
    exact: Any = SimpleNamespace(plan=preset("autoregressive", WORKLOAD))
    kept = [candidate.plan for candidate in candidates(exact, SHAPE, h200_profile, roomy)]
    assert len(kept) > 10 and all(plan.kv.target_bits == 16 for plan in kept)
