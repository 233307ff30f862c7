"""Scales of kernel classes, from rounds whose classes are known to take longer."""

from dataclasses import replace

import pytest

from ridgeplan.planner.prediction import Prediction, predict
from ridgeplan.roofline.catalog.profile import MAX_UTILIZATION, Profile
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.validate.calibration.fit import RoundSample
from ridgeplan.validate.calibration.overheads import CPU_PRESETS, with_rounds
from ridgeplan.validate.calibration.scales import SLOWED, fitted_scales, scaled
from ridgeplan.validate.random_model import llama_like_shape

SHAPE = llama_like_shape(12, 576, 1536, 9, 3, 64, 49152)
SLOWER = {"linear": 1.3, "linear_int4": 2.0, "linear_int8": 0.5, "prefill_linear": 1.2, "attention_int8_d64": 3.0}


@pytest.fixture
def profile(h200_profile: Profile) -> Profile:
    """Of a machine whose host launches each kernel and waits for it."""
    host = dict.fromkeys(("pass_dispatch_s", "layer_dispatch_s", "prefill_layer_dispatch_s"), 0.0)
    return replace(h200_profile, asynchronous=False, target_gap_s=0.0, draft_gap_s=0.0, **host)


def predicted(profile: Profile, name: str, context: int) -> Prediction:
    return predict(preset(name, Workload("random", "h200", context, 64)), SHAPE, profile)


def parts_ms(prediction: Prediction) -> list[float]:
    return [prediction.draft_step_ms, prediction.target_step_ms, prediction.best.ttft_ms]


def rounds(profile: Profile) -> list[RoundSample]:
    """Rounds that take what `profile` predicts."""
    samples = []
    for name in CPU_PRESETS:
        draft_s, target_s, prefill_s = (1e-3 * ms for ms in parts_ms(predicted(profile, name, 1024)))
        samples.append(RoundSample(0, name, 1024, 1, 64, draft_s, target_s, 0.0, prefill_s))
    return samples


def test_scaled_classes_predict_the_rounds(profile: Profile) -> None:
    """Also those of another context. A few percent are left, as scales are drawn to 1."""
    slower = {kind: scaled(rates, SLOWER.get(kind, 1.0)) for kind, rates in profile.classes.items()}
    machine = replace(profile, classes=slower)
    fitted = with_rounds(profile, [SHAPE], rounds(machine))
    for name in CPU_PRESETS:
        for context in (1024, 600):
            measured = parts_ms(predicted(machine, name, context))
            assert parts_ms(predicted(fitted, name, context)) == pytest.approx(measured, rel=0.08)
            assert parts_ms(predicted(profile, name, context)) != pytest.approx(measured, rel=0.1)


def test_classes_that_no_round_runs_stay(profile: Profile) -> None:
    fitted = with_rounds(profile, [SHAPE], rounds(replace(profile, classes=dict(profile.classes))))
    for kind in ("two_bit_scan", "gather", "linear"):  # the rounds take what is predicted, so no class changes
        assert fitted.classes[kind].launch_s == pytest.approx(profile.classes[kind].launch_s, rel=1e-6)


def test_a_scale_multiplies_each_part_of_the_time(profile: Profile) -> None:
    rates = profile.classes["linear"]
    slow = scaled(rates, 2.0)
    assert slow.launch_s == 2 * rates.launch_s
    assert slow.bandwidth_utilization == rates.bandwidth_utilization / 2
    assert [step.inverse_utilization for step in slow.steps] == [2 * step.inverse_utilization for step in rates.steps]
    assert slow.spread > rates.spread
    assert scaled(rates, 0.01).bandwidth_utilization == MAX_UTILIZATION


def test_rounds_that_other_programs_slowed_do_not_count(profile: Profile) -> None:
    slow = [
        replace(each, draft_s=20 * each.draft_s, target_s=40 * each.target_s, prefill_s=9 * each.prefill_s)
        for each in rounds(profile)
    ]
    fitted = with_rounds(profile, [SHAPE], [*slow[:3], *rounds(profile)])
    for name in CPU_PRESETS:
        measured = parts_ms(predicted(profile, name, 1024))
        assert parts_ms(predicted(fitted, name, 1024)) == pytest.approx(measured, rel=1e-3)


def test_a_class_whose_readings_were_slowed_stands_out(profile: Profile) -> None:
    slow = {**profile.classes, "linear": scaled(profile.classes["linear"], 30.0)}
    scales = fitted_scales(replace(profile, classes=slow), [SHAPE], rounds(profile))
    assert [kind for kind, scale in scales.items() if scale < SLOWED] == ["linear"]


def test_a_class_for_which_another_stood_is_scaled_too(profile: Profile) -> None:
    few = replace(profile, classes={kind: rates for kind, rates in profile.classes.items() if kind != "linear_int4"})
    fitted = with_rounds(few, [SHAPE], rounds(profile))
    measured = predicted(profile, "quantspec-int8", 1024).draft_step_ms
    assert predicted(fitted, "quantspec-int8", 1024).draft_step_ms == pytest.approx(measured, rel=0.08)


def test_rounds_scale_classes_where_the_host_waits(profile: Profile) -> None:
    samples = [replace(sample, target_s=2 * sample.target_s) for sample in rounds(profile)]
    assert with_rounds(profile, [SHAPE], samples).classes["linear"].launch_s > profile.classes["linear"].launch_s
    assert with_rounds(profile, [SHAPE], ()) == profile
