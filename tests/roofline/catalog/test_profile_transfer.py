"""What rates become on another machine, worked out by hand."""

from dataclasses import replace

import pytest

from ridgeplan.roofline.catalog.hardware import Hardware, load_hardware
from ridgeplan.roofline.catalog.profile import Profile, Rates, RowStep
from ridgeplan.roofline.catalog.profile_transfer import transferred_classes

STREAM = Rates(0.9, 0.5, 2e-6, 0.05)
BOUND = Rates(0.4, 0.5, 3e-6, 0.1, width_s=4e-9, depth_s=1e-9, steps=(RowStep(8, 1e-6, 2.5, 4e-9, 1e-9),))


@pytest.fixture
def profile(h200_profile: Profile) -> Profile:
    portable = {"linear": replace(STREAM, launch_s=7e-6)}
    return replace(h200_profile, classes={"linear": STREAM, "linear_int4": BOUND}, portable=portable)


def machine(**figures: float) -> Hardware:
    """An H200 with other figures."""
    return replace(load_hardware("h200"), name="other", **figures)


def test_streaming_keeps_its_share_of_the_bandwidth(profile: Profile) -> None:
    half = machine(bandwidth_bytes_per_s=2.4e12)
    assert transferred_classes(profile, half)["linear"] == STREAM


def test_what_instructions_bind_keeps_its_bytes_per_second(profile: Profile) -> None:
    """40% of 4.8 TB/s are 80% of 2.4; with the step, 20% of 4.8 are 40% of 2.4: 1 / 0.4 - 1 / 0.8 = 1.25 more."""
    half = transferred_classes(profile, machine(bandwidth_bytes_per_s=2.4e12))["linear_int4"]
    assert half.bandwidth_utilization == pytest.approx(0.8)
    assert half.steps[0].inverse_utilization == pytest.approx(1.25)
    assert (half.width_s, half.steps[0].width_s, half.launch_s) == pytest.approx((4e-9, 4e-9, 3e-6))


def test_nothing_is_read_faster_than_memory_is(profile: Profile) -> None:
    """A quarter of the bandwidth leaves 160% of it to the instructions, but 90% is what anything reaches."""
    quarter = transferred_classes(profile, machine(bandwidth_bytes_per_s=1.2e12))["linear_int4"]
    assert quarter.bandwidth_utilization == pytest.approx(0.9)
    assert 1 / quarter.bandwidth_utilization + quarter.steps[0].inverse_utilization == pytest.approx(1 / 0.8)


def test_instructions_are_as_fast_as_sms_and_clock(profile: Profile) -> None:
    """Half of the SMs at the same bandwidth: half of the bytes, and twice the time per output; chains keep theirs."""
    few = transferred_classes(profile, machine(num_sms=66))["linear_int4"]
    assert few.bandwidth_utilization == pytest.approx(0.2)
    assert (few.width_s, few.depth_s) == pytest.approx((8e-9, 1e-9))
    slow = transferred_classes(profile, machine(sm_clock_hz=990e6))["linear_int4"]
    assert slow == few


def test_without_a_clock_the_peaks_tell_the_speed(profile: Profile) -> None:
    unknown = transferred_classes(profile, machine(sm_clock_hz=0.0, compute_flops=989.5e12 / 2))["linear_int4"]
    assert unknown.bandwidth_utilization == pytest.approx(0.2)


def test_older_gpus_get_the_portable_kernels(profile: Profile) -> None:
    assert transferred_classes(profile, load_hardware("a100"))["linear"].launch_s == 7e-6
    assert transferred_classes(profile, load_hardware("h100"))["linear"].launch_s == 2e-6
    assert transferred_classes(profile, machine(compute_capability="none"))["linear"].launch_s == 7e-6
    older = replace(profile, hardware=load_hardware("a100"))
    assert transferred_classes(older, load_hardware("rtx4090"))["linear"].launch_s == 2e-6
