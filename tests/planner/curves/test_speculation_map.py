"""The speed-up over gamma and acceptance agrees with predictions, and ends where algebra says."""

from dataclasses import replace

import numpy as np
import pytest

from ridgeplan.planner import best_gamma, predict, preset
from ridgeplan.planner.queries.curves import SpeculationMap, speculation_map
from ridgeplan.planner.question import Question, ask

ACCEPTANCES = np.linspace(0.0, 1.0, 101)


@pytest.fixture(scope="module")
def question() -> Question:
    return ask("meta-llama/Llama-3.1-8B", "h200", 65_536)


@pytest.fixture(scope="module")
def found(question: Question) -> SpeculationMap:
    return speculation_map(preset("quantspec", question.workload), question, ACCEPTANCES)


def test_at_the_predicted_acceptance_it_is_the_prediction(found: SpeculationMap, question: Question) -> None:
    plan = preset("quantspec", question.workload)
    plain = predict(preset("autoregressive", question.workload), question.shape, question.profile)
    known = predict(plan, question.shape, question.profile)
    here = speculation_map(plan, question, [known.acceptance.best])
    assert here.speedup[0, plan.speculation.gamma - 1] == pytest.approx(plain.best.tpot_ms / known.best.tpot_ms)


def test_nothing_accepted_yields_one_token_a_round(found: SpeculationMap) -> None:
    """Then more drafts only cost, and a round is slower for each."""
    assert (np.diff(found.speedup[0]) < 0).all()


def test_speed_rises_with_acceptance_and_fewer_drafts_are_best_where_it_is_low(found: SpeculationMap) -> None:
    assert (np.diff(found.speedup, axis=0) > 0).all()
    best = found.best_gammas[found.best_gammas > 0]
    assert (np.diff(best) >= 0).all()


def test_the_optimum_is_the_planner_s_best_gamma(found: SpeculationMap, question: Question) -> None:
    """Whose acceptance moves a little with gamma, so a neighbour may be as fast."""
    (cell,) = best_gamma("meta-llama/Llama-3.1-8B", "h200", preset="quantspec", contexts=(65_536,), batches=(1,))
    gamma, gain = found.optimum
    assert abs(gamma - cell.gamma) <= 1
    assert gain == pytest.approx(cell.speedup, rel=0.02)


def test_no_gamma_is_best_where_all_are_slower(found: SpeculationMap) -> None:
    slow = replace(found, speedup=found.speedup * 0 + 0.9)
    assert not slow.best_gammas.any()
