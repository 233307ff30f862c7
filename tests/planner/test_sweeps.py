"""Sweeps and thresholds of a plan agree with its predictions."""

from dataclasses import replace

import numpy as np
import pytest

from ridgeplan.planner import predict, sweep, thresholds
from ridgeplan.planner.queries.sweep import placement_times
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import KVCache, KVFormat, Placement, Plan, Workload
from ridgeplan.roofline.plan.presets import preset

LLAMA = load_shape("Llama-3.1-8B")


def test_a_sweep_over_gamma_is_the_prediction_of_each(h200_profile):
    plan = preset("quantspec", Workload("Llama-3.1-8B", "h200", 32768))
    gammas = [1, 4, 15]
    plans = [replace(plan, speculation=replace(plan.speculation, gamma=gamma)) for gamma in gammas]
    predicted = [predict(one, LLAMA, h200_profile) for one in plans]
    acceptance = np.array([one.acceptance.best for one in predicted])
    swept = sweep(plan, LLAMA, h200_profile, "tpot_s", ["gamma", "acceptance"])(
        gamma=np.array(gammas), acceptance=acceptance
    )
    assert 1e3 * swept == pytest.approx([one.best.tpot_ms for one in predicted])


def test_thresholds_leave_room_for_a_rounds_tokens(h200_profile):
    """A round of gamma + 1 = 8 tokens still fits after the first threshold, and no more."""
    small = replace(h200_profile, hardware=replace(h200_profile.hardware, memory_bytes=24 * 10**9))
    plan = replace(preset("specattn", Workload("m", "h200", 1000, new_tokens=8)), placement=Placement(True, 2048))
    first, *_ = thresholds(plan, LLAMA, small)

    def offloaded(context):
        workload = replace(plan.workload, context=context, new_tokens=1)
        return predict(replace(plan, workload=workload), LLAMA, small).offloaded_layers

    assert first > 10_000
    assert offloaded(first + 7) == 0
    assert offloaded(first + 9) > 0


def test_a_static_placement_falls_off_a_cliff_and_an_adaptive_one_does_not(h200_profile):
    """SpeContext, section 6.1: with all layers on the host a slightly longer context loses most of the speed."""
    shape = load_shape("Llama-3.1-8B")
    placement = Placement(True, 2048, memory_bytes=24 * 10**9)
    plan = Plan(Workload("m", "h200", 4096, new_tokens=64, batch=4), kv=KVCache(KVFormat.INT8), placement=placement)
    first = thresholds(plan, shape, h200_profile)[0]
    found = placement_times(plan, shape, h200_profile, [first - 200, first + 600, 2 * first])
    assert found.host_layers[0] == 0 < found.host_layers[1] < found.host_layers[2] <= 32
    assert found.adaptive_ms[0] == found.static_ms[0]
    before, after, _ = found.static_ms
    assert after > 5 * before  # more than 80% of the speed is lost
    assert found.adaptive_ms[1] < after / 5
    assert found.adaptive_ms[1] < found.adaptive_ms[2] <= found.static_ms[2]
