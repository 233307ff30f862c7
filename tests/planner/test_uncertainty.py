"""Times under shared errors: what is shared cancels, what differs is told apart by its spread."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from ridgeplan.planner.acceptance import Acceptance
from ridgeplan.planner.prediction import BAND_DEVIATIONS, predict_all, sampled_tpot_ms, sampled_ttft_ms
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset

LLAMA = load_shape("Llama-3.1-8B")


def predictions(profile, *names, context=32768):
    workload = Workload("Llama-3.1-8B", "h200", context)
    return predict_all([preset(name, workload) for name in names], LLAMA, profile)


def with_spreads(profile, default, **spreads):
    classes = {name: replace(rates, spread=spreads.get(name, default)) for name, rates in profile.classes.items()}
    return replace(profile, classes=classes)


def certain(predicted):
    known = predicted.acceptance
    return replace(predicted, acceptance=Acceptance(known.best, known.best, known.best, known.source, known.where))


@pytest.mark.parametrize("name", ["autoregressive", "quantspec", "specattn"])
def test_without_errors_every_sample_is_the_prediction(h200_profile, name):
    exact = replace(with_spreads(h200_profile, 0.0), target_gap_s=3e-5, draft_gap_s=2e-5, round_s=6e-5)
    (found,) = predictions(exact, name)
    tpot_ms, ttft_ms = sampled_tpot_ms([certain(found)], exact), sampled_ttft_ms([found], exact)
    assert tpot_ms == pytest.approx(found.best.tpot_ms)
    assert ttft_ms == pytest.approx(found.best.ttft_ms)


def test_an_error_that_all_classes_share_alike_scales_both_plans_alike(h200_profile):
    """If only linear layers err, a plan's time moves by their share of it and no more."""
    linear = with_spreads(h200_profile, 0.0, linear=0.2)
    (plain,) = predictions(linear, "autoregressive")
    target = [op for op in plain.breakdown if op.part == "target"]
    share = sum(op.seconds for op in target if op.kind == "linear") / sum(op.seconds for op in target)
    passes = plain.round_s["verification"] / sum(plain.round_s.values())
    (samples,) = sampled_tpot_ms([plain], linear)
    # One standard deviation is a factor of 1.2: the quantiles of a log-normal error of that share of the time.
    for deviations in (-1, 0, 1):
        expected = plain.best.tpot_ms * (1 + passes * share * (1.2**deviations - 1))
        assert np.quantile(samples, NormalDist().cdf(deviations)) == pytest.approx(expected, rel=0.01)


def test_equal_plans_are_equal_in_every_sample(h200_profile):
    one, other = predictions(h200_profile, "quantspec", "quantspec")
    first, second = sampled_tpot_ms([one, other], h200_profile)
    assert (first == second).all()


def test_what_two_plans_share_does_not_tell_them_apart(h200_profile):
    """Both read the same weights and differ in the cache: an error of linear layers leaves their order as it is."""
    noisy = with_spreads(h200_profile, 0.0, linear=0.5)
    plain, int8 = sampled_tpot_ms(predictions(noisy, "autoregressive", "int8", context=65536), noisy)
    assert plain.std() > 0.1 * plain.mean()
    assert (int8 < plain).all()


def test_acceptances_spread_to_the_ends_of_their_bands(h200_profile):
    """Their bands hold 90%: a twentieth of all samples is below the low end, and another above the high one."""
    exact = with_spreads(h200_profile, 0.0)
    (found,) = predictions(exact, "quantspec")
    found = replace(found, acceptance=Acceptance(0.6, 0.8, 0.9, "prior", "a test"))
    (samples,) = sampled_tpot_ms([found], exact)
    best = 1 + sum(0.8**power for power in range(1, found.gamma + 1))
    for acceptance, quantile in ((0.9, 0.05), (0.8, 0.5), (0.6, 0.95)):
        tokens = 1 + sum(acceptance**power for power in range(1, found.gamma + 1))
        assert np.quantile(samples, quantile) == pytest.approx(found.best.tpot_ms * best / tokens, rel=0.03)
    assert NormalDist().cdf(BAND_DEVIATIONS) == pytest.approx(0.95, abs=1e-4)


def test_samples_are_the_same_in_every_run(h200_profile):
    found = predictions(h200_profile, "quantspec")
    assert (sampled_tpot_ms(found, h200_profile) == sampled_tpot_ms(found, h200_profile)).all()
    assert len(np.unique(sampled_tpot_ms(found, h200_profile))) > 1000
