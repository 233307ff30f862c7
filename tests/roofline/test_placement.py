"""What leaves the device, when, and what it costs."""

from dataclasses import replace

import pytest

from ridgeplan.planner.plan import KVCache, KVFormat, Placement, Plan, Workload
from ridgeplan.planner.presets import preset
from ridgeplan.planner.sweeps import thresholds
from ridgeplan.planner.terms import strategy_of
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.models import load_shape
from ridgeplan.roofline.placement import place

LIMIT = 24e9


@pytest.fixture(scope="module")
def shape():
    return load_shape("Llama-3.1-8B")


@pytest.fixture(scope="module")
def small(h200_profile):
    """The test machine with 24 GB."""
    return replace(h200_profile, hardware=replace(h200_profile.hardware, memory_bytes=int(LIMIT)))


def placed(plan, shape, profile):
    machine = Machine.of(profile)
    return place(shape, machine, strategy_of(plan, shape, machine, 0.9))


def offloading(context):
    return Plan(Workload("m", "h200", context, new_tokens=1), placement=Placement(True, 2048))


def test_nothing_leaves_while_everything_fits(shape, small):
    found = placed(offloading(16384), shape, small)
    assert (found.offloaded_layers, found.transfer_s) == (0, 0)


def test_just_enough_layers_leave(shape, small):
    found = placed(offloading(65536), shape, small)
    assert 0 < found.offloaded_layers < 32
    assert found.memory.peak <= LIMIT
    one_layer = 65536 * 2 * 8 * 128 * 2
    assert found.memory.peak + one_layer > LIMIT


def test_without_a_selection_a_whole_layer_travels_and_with_one_the_changed_budget(shape, small):
    whole = placed(offloading(65536), shape, small)
    selected = placed(preset("specontext", Workload("m", "h200", 65536, new_tokens=1)), shape, small)
    per_layer = [one.transfer_s / one.offloaded_layers for one in (whole, selected)]
    link = small.hardware.host_link_bytes_per_s
    assert per_layer[0] == pytest.approx(65536 * 4096 / link, rel=1e-3)
    assert per_layer[1] == pytest.approx(0.1 * 2048 * 4096 / link, rel=1e-3)


def test_offloaded_codes_travel_as_codes(shape, small):
    whole = placed(offloading(131072), shape, small)
    codes = placed(replace(offloading(131072), kv=KVCache(KVFormat.INT8)), shape, small)
    per_layer = [one.transfer_s / one.offloaded_layers for one in (whole, codes)]
    assert per_layer[1] / per_layer[0] == pytest.approx(1.03125 / 2, rel=1e-3)


def test_thresholds_agree_with_the_placement_at_every_length(shape, small):
    plan = offloading(1000)
    lengths = thresholds(plan, shape, small)
    assert list(lengths) == sorted(lengths)
    for cpu_layers in (0, 7, 20):
        for length, layers in ((lengths[cpu_layers] + 1, cpu_layers), (lengths[cpu_layers] + 3, cpu_layers + 1)):
            held = replace(plan, workload=replace(plan.workload, context=length - 1))
            assert placed(held, shape, small).offloaded_layers == layers


def test_thresholds_of_a_model_that_does_not_fit_are_zero(shape, h200_profile):
    tiny = replace(h200_profile, hardware=replace(h200_profile.hardware, memory_bytes=10**9))
    assert set(thresholds(offloading(1000), shape, tiny)) == {0}
