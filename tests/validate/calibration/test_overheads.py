"""Gaps of rounds, from times that follow from known gaps."""

from dataclasses import replace

import pytest
import torch

from ridgeplan.planner.prediction import predict
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.latency import RateTerms
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.validate.calibration import overheads
from ridgeplan.validate.calibration.overheads import Unexplained, fit_gaps, measured_rounds, with_fitted_gaps
from ridgeplan.validate.random_model import RoundTimes, llama_like_shape

SHAPES = (llama_like_shape(4, 64, 128, 2, 1, 64), llama_like_shape(9, 64, 128, 2, 1, 64))


def layer_gap_s(rows: int) -> float:
    """1 us, and 2 more above 4 rows."""
    return 1e-6 + 2e-6 * (rows > 4)


def test_gaps_are_found_again() -> None:
    unexplained = [
        Unexplained(
            layers, batch, queries,
            20e-6 + layers * layer_gap_s(batch) if queries > 1 else None,
            50e-6 + layers * layer_gap_s(batch * queries),
            60e-6,
        )
        for layers in (8, 24) for batch in (1, 3, 4, 11) for queries in (1, 5)
    ]  # fmt: skip
    fitted = fit_gaps(unexplained)
    assert (fitted.draft_s, fitted.target_s) == pytest.approx((20e-6, 50e-6))
    layer = RateTerms.of(fitted.layer)
    assert [layer.at_rows(rows).launch_s for rows in (1, 4, 5, 55)] == pytest.approx([1e-6, 1e-6, 3e-6, 3e-6])


def test_a_profile_with_gaps_explains_the_rounds(h200_profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds take what is predicted without gaps, and known gaps."""
    bare = replace(
        h200_profile, classes={kind: rates for kind, rates in h200_profile.classes.items() if kind != "gap"},
        draft_gap_s=0.0, target_gap_s=0.0, round_s=0.0,
    )  # fmt: skip

    def round_of(model, plan, steady):
        predicted, gamma = predict(plan, model.shape, bare), plan.speculation.gamma
        rows = plan.workload.batch * (gamma + 1)
        target_s = 1e-3 * predicted.verify_ms + predicted.round_s["acceptance"]
        return RoundTimes(
            passes=gamma,
            draft_s=1e-3 * predicted.draft_step_ms + 20e-6 + model.shape.layers * layer_gap_s(plan.workload.batch),
            verify_s=target_s + 50e-6 + model.shape.layers * layer_gap_s(rows),
            keep_s=40e-6, idle_s=20e-6, grown=plan.workload.new_tokens, spread=0.0,
        )  # fmt: skip

    monkeypatch.setattr(overheads, "measured_round", round_of)
    fitted = with_fitted_gaps(bare, SHAPES, [*measured_rounds(bare, SHAPES, torch.device("cpu"))])
    assert (fitted.draft_gap_s, fitted.target_gap_s, fitted.round_s) == pytest.approx((20e-6, 50e-6, 60e-6), rel=1e-3)
    workload = Workload("random", "h200", 3000, 100, 7)
    step, without = (predict(preset("autoregressive", workload), SHAPES[0], profile) for profile in (fitted, bare))
    assert step.verify_ms - without.verify_ms == pytest.approx(1e3 * (50e-6 + 4 * 3e-6), rel=1e-3)
    assert step.round_s["overhead"] == pytest.approx(60e-6, rel=1e-3)


def test_without_shapes_nothing_is_measured(h200_profile: Profile) -> None:
    assert not [*measured_rounds(h200_profile, (), torch.device("cpu"))]
