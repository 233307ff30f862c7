"""The regression: closed forms of one effect, recovery of what made up data, outliers, signs, and unseen effects."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from acceptance_start import start_json

from ridgeplan.planner.acceptance import shipped_rows
from ridgeplan.planner.acceptance.effects import COMMON, GROUPS
from ridgeplan.planner.acceptance.model import observation, shipped_fit
from ridgeplan.planner.acceptance.regression import (
    CONVERGED,
    RESIDUALS,
    START,
    EffectsPosterior,
    Observation,
    Start,
    digest,
    fit,
    start_of,
)

KNOWN = {name: deviation**2 for name, deviation in (GROUPS | RESIDUALS).items()}
LEVEL = ("level", "kv4")


def seen(disagreement, *parts, residual="measured"):
    return Observation(tuple(parts or ({LEVEL: 1.0},)), disagreement, residual)


def test_one_row_and_one_effect_are_weighed_by_their_precisions():
    """A normal prior N(m, s^2) and an observation y with variance r: mean (m / s^2 + y / r) / (1 / s^2 + 1 / r).

    The row's Student-t weight (4 + 1) / (4 + e^2 / r) at its own residual e changes r to r over it.
    """
    model = fit([seen(0.2)], KNOWN)
    prior = COMMON["level"]
    mean, error = float(model.mean[0]), math.log(0.2) - float(model.mean[0])
    noise = KNOWN["measured"] / (5 / (4 + error**2 / KNOWN["measured"]))
    precision = 1 / prior.deviation**2 + 1 / noise
    assert mean == pytest.approx((prior.mean / prior.deviation**2 + math.log(0.2) / noise) / precision, abs=0.01)
    assert model.covariance[0, 0] == pytest.approx(1 / precision, rel=0.02)


def test_disagreements_of_parts_add_like_standard_deviations():
    first, other = {LEVEL: 1.0}, {("level", "w4"): 1.0}
    model = fit([seen(0.03, first), seen(0.04, other)] * 30, KNOWN)
    assert float(model.disagreement([first])) == pytest.approx(0.03, rel=0.02)
    assert float(model.disagreement([first, other])) == pytest.approx(0.05, rel=0.02)  # 3, 4, 5


def test_the_whole_tells_what_its_parts_must_be():
    first, other = {LEVEL: 1.0}, {("level", "w4"): 1.0}
    model = fit([seen(0.03, first)] * 30 + [seen(0.05, first, other)] * 30, KNOWN)
    assert float(model.disagreement([other])) == pytest.approx(0.04, rel=0.05)


def test_a_disagreement_is_at_most_one():
    part = {LEVEL: 1.0, ("context", "kv"): 100.0}
    assert float(fit([seen(0.3)], KNOWN).disagreement([part])) == 1


def test_slopes_are_recovered():
    """Rows of 0.02 x 2^(0.3 octaves): the slope of the log is 0.3 ln 2 per factor of 2."""
    rows = [seen(0.02 * 2 ** (0.3 * octave), {LEVEL: 1.0, ("context", "kv"): octave}) for octave in range(-3, 5)]
    model = fit(rows * 4)
    assert model.mean[model.index[("context", "kv")]] == pytest.approx(0.3 * math.log(2), abs=0.005)


@pytest.mark.parametrize("effect, slope", [("context", -0.3), ("size", 0.3), ("position", -0.3), ("ratio", -0.3)])
def test_a_slope_of_the_wrong_sign_is_held_at_zero(effect, slope):
    rows = [seen(0.02 * math.exp(slope * value), {LEVEL: 1.0, (effect, "kv"): value}) for value in range(-3, 5)]
    model = fit(rows * 4)
    assert model.mean[model.index[(effect, "kv")]] == 0


def test_an_outlier_weighs_little():
    """Nine rows agree; a tenth is tenfold. A least-squares mean of the logs would be 10^0.1 = 1.26 times as large."""
    model = fit([seen(0.05)] * 9 + [seen(0.5)], KNOWN)
    assert float(model.disagreement([{LEVEL: 1.0}])) == pytest.approx(0.05, rel=0.05)


def made_up(deviation, models=60, rows=4, noise=0.05, family="kv"):
    """Rows of models whose log disagreement differs by `deviation`, each measured with `noise`."""
    generator = np.random.default_rng(0)
    return [
        seen(
            float(np.exp(math.log(0.05) + effect + generator.normal(0, noise))),
            {LEVEL: 1.0, ("model", str(name), family): 1.0},
        )
        for name, effect in enumerate(generator.normal(0, deviation, models))
        for _ in range(rows)
    ]


@pytest.mark.parametrize("deviation", [0.1, 0.6])
def test_how_much_models_differ_is_estimated(deviation):
    model = fit(made_up(deviation))
    assert math.sqrt(model.variances["model"]) == pytest.approx(deviation, rel=0.2)


def test_the_residual_is_estimated():
    model = fit(made_up(0.3, noise=0.2))
    assert math.sqrt(model.variances["measured"]) == pytest.approx(0.2, rel=0.2)


def test_an_unseen_model_is_as_uncertain_as_models_differ():
    model = fit(made_up(0.4))
    unseen = model.deviation([{LEVEL: 1.0, ("model", "another", "kv"): 1.0}])
    level = model.covariance[model.index[LEVEL], model.index[LEVEL]]
    assert unseen == pytest.approx(math.sqrt(model.variances["model"] + level))
    assert model.deviation([{LEVEL: 1.0, ("model", "3", "kv"): 1.0}]) < unseen / 3


def test_an_observation_is_less_certain_than_its_mean_by_the_residual():
    model = fit(made_up(0.4))
    mean, row = model.deviation([{LEVEL: 1.0}]), model.deviation([{LEVEL: 1.0}], "measured")
    assert row**2 - mean**2 == pytest.approx(model.variances["measured"])


def test_models_differ_more_in_tokens_without_widening_the_rest():
    model = fit(made_up(0.1) + made_up(0.8, family="tokens"))
    assert model.variances["model, tokens"] > 10 * model.variances["model"]


def test_arrays_are_evaluated_at_once():
    model = fit([seen(0.05)], KNOWN)
    values = model.disagreement([{LEVEL: 1.0, ("context", "kv"): np.array([0.0, 1.0, 2.0])}])
    assert values.shape == (3,)
    assert list(values) == sorted(values)


def test_a_whole_says_half_as_much_of_each_of_two_equal_parts():
    """Its log is the mean of theirs where they are equal. With priors of deviation s on both, that mean has variance
    s^2 / 2 before and 1 / (2 / s^2 + 1 / r) after a row with noise r. Its Student-t weight is 1 to 5/4.
    """
    first, other = {LEVEL: 1.0}, {("level", "w4"): 1.0}
    prior = COMMON["level"]
    model = fit([seen(math.sqrt(2) * math.exp(prior.mean), first, other)], KNOWN)
    after = 1 / (2 / prior.deviation**2 + 1 / KNOWN["measured"])
    assert math.sqrt(after / 1.26) < model.deviation([first, other]) < 1.001 * math.sqrt(after)
    assert model.deviation([first]) > 0.9 * prior.deviation / math.sqrt(2)


# The shipped start ends where a fit from nothing does, and is used for the rows that it is of only.


@pytest.fixture(scope="module")
def from_nothing() -> EffectsPosterior:
    return fit([observation(row) for row in shipped_rows()])


def test_it_ends_where_a_fit_from_nothing_does(from_nothing: EffectsPosterior) -> None:
    shipped = shipped_fit()
    assert list(shipped.index) == list(from_nothing.index)
    assert np.abs(shipped.mean - from_nothing.mean).max() < CONVERGED
    assert np.sqrt(np.diag(shipped.covariance)) == pytest.approx(np.sqrt(np.diag(from_nothing.covariance)), abs=0.01)
    assert shipped.variances == pytest.approx(from_nothing.variances, rel=0.05)


def test_the_file_is_of_the_shipped_rows(from_nothing: EffectsPosterior) -> None:
    """Where this fails after rows have changed, write start.json anew: planner/acceptance/regression.py says how."""
    assert START.read_text(encoding="utf-8").count(digest(shipped_rows())) == 1
    start = start_of(shipped_rows())
    assert list(start.effects) == list(from_nothing.index)
    assert list(start.effects.values()) == pytest.approx(from_nothing.mean.tolist(), abs=CONVERGED)


def test_other_rows_start_from_nothing() -> None:
    first, *others = shipped_rows()
    changed = replace(first, acceptance=first.acceptance / 2)
    assert start_of((changed, *others)) == start_of(others) == Start()


def test_a_file_written_now_is_read_back(
    from_nothing: EffectsPosterior, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ridgeplan.planner.acceptance.regression.START", tmp_path / "start.json")
    (tmp_path / "start.json").write_text(start_json(from_nothing, shipped_rows(), {"bits": 1.5}), encoding="utf-8")
    start = start_of(shipped_rows())
    assert list(start.effects) == list(from_nothing.index)
    assert list(start.effects.values()) == pytest.approx(from_nothing.mean.tolist(), abs=1e-6)
    assert start.variances == pytest.approx(from_nothing.variances, abs=1e-6)
