"""Rates on another machine, by hand: half the instruction rate, and a memory and a peak of other ratios."""

from dataclasses import replace

import pytest

from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.profile import NO_GAP, Rates, RowStep
from ridgeplan.roofline.catalog.profile_lookup import transferred as transferred_profile

STEPS = (
    RowStep(above_rows=8, launch_s=1e-6, inverse_utilization=1.0, tile_s=1e-7, fill_s=5e-7, width_s=1e-9),
    RowStep(above_rows=16, inverse_utilization=2.0),
)
CLASSES = {
    "linear": Rates(0.9, 0.8, 1e-6, 0.0),
    "attention": Rates(0.88, 0.4, 2e-6, 0.0),
    "attention_int4": Rates(0.3, 0.05, 3e-6, 0.0, steps=STEPS),
    "gap": replace(NO_GAP, launch_s=4e-6),
}
SOURCE = replace(
    load_hardware("h200"), num_sms=100, sm_clock_hz=2e9, bandwidth_bytes_per_s=4e12, compute_flops=1e15
)  # fmt: skip


@pytest.fixture
def transferred(h200_profile):
    """Rates on a machine with half the SMs, and memory and peak as given."""

    def to(portable=None, others=None, **figures):
        profile = replace(h200_profile, hardware=SOURCE, classes=CLASSES | (others or {}), portable=portable or {})
        return transferred_profile(profile, replace(SOURCE, name="other", num_sms=50, **figures)).classes

    return to


def test_transfers_to_the_host_keep_their_share_and_say_nothing_of_kernels(transferred):
    """Their share of a peak that they never use is 1, which is not what kernels can reach."""
    without = transferred(compute_flops=1e14)
    link = {"host_copy": Rates(0.9, 1.0, 2e-6, 0.0), "host_gather": Rates(0.3, 1.0, 2e-6, 0.0)}
    found = transferred(others=link, compute_flops=1e14)
    assert {kind: found[kind] for kind in without} == without
    assert [found[kind].bandwidth_utilization for kind in link] == [0.9, 0.3]


def test_what_memory_or_the_peak_binds_keeps_its_share(transferred):
    rates = transferred(bandwidth_bytes_per_s=1e12, compute_flops=1e14)
    assert rates["linear"].bandwidth_utilization == pytest.approx(0.9)
    assert rates["linear"].compute_utilization == 0.8
    fast = transferred(bandwidth_bytes_per_s=16e12)
    assert fast["attention"].bandwidth_utilization == pytest.approx(0.88)


def test_what_lacks_to_the_best_stream_is_instructions(transferred):
    """0.88 of 4 TB/s are 3.52 TB/s; half the SMs would read 1.76 TB/s, more than the 0.9 TB/s that any reads."""
    assert transferred(bandwidth_bytes_per_s=1e12)["attention"].bandwidth_utilization == pytest.approx(0.9)


def test_what_instructions_bind_keeps_its_speed_per_sm_and_clock(transferred):
    """0.3 of 4 TB/s are 1.2 TB/s; half the SMs reach 0.6 of 1 TB/s. With the
    steps, (4 TB/s) / 4.333 / 2 = 0.46 TB/s and (4 TB/s) / 6.333 / 2 = 0.32 TB/s.
    """
    codes = transferred(bandwidth_bytes_per_s=1e12)["attention_int4"]
    assert codes.bandwidth_utilization == pytest.approx(0.6)
    step, next_step = codes.steps
    assert 1 / (1 / 0.6 + step.inverse_utilization) == pytest.approx(4 / (1 / 0.3 + 1) / 2)
    both = step.inverse_utilization + next_step.inverse_utilization
    assert 1 / (1 / 0.6 + both) == pytest.approx(4 / (1 / 0.3 + 3) / 2)
    assert step.width_s == pytest.approx(2e-9)
    assert (codes.launch_s, step.launch_s, step.fill_s) == (3e-6, 1e-6, 5e-7)


@pytest.mark.parametrize("clock_hz, seconds", [(2e9, 1e-7), (1e9, 2e-7)])
def test_a_tile_takes_an_sm_as_many_cycles(transferred, clock_hz, seconds):
    """However many SMs there are: each has its own tiles."""
    step = transferred(sm_clock_hz=clock_hz)["attention_int4"].steps[0]
    assert step.tile_s == pytest.approx(seconds)


def test_codes_stream_no_better_than_what_needs_no_unpacking(transferred):
    """At 0.4 TB/s, instructions would allow 1.5 of the bandwidth. A gap moves no bytes, so its 1.0 is no limit."""
    slow = transferred(bandwidth_bytes_per_s=4e11)
    assert slow["attention_int4"].bandwidth_utilization == pytest.approx(0.9)
    assert slow["gap"].launch_s == 4e-6
    assert slow["gap"].bandwidth_utilization == 1.0


def test_a_lower_peak_is_reached_to_a_larger_share(transferred):
    """0.05 and 0.4 of 1 PFLOP/s by half the SMs: a quarter of 0.1 PFLOP/s, and all that products reach of it."""
    rates = transferred(compute_flops=1e14)
    assert rates["attention_int4"].compute_utilization == pytest.approx(0.25)
    assert rates["attention"].compute_utilization == pytest.approx(0.8)


def test_a_higher_peak_is_reached_to_the_same_share(transferred):
    assert transferred(compute_flops=4e15)["attention"].compute_utilization == pytest.approx(0.4)


def test_machines_before_hopper_have_the_portable_kernels(transferred):
    portable = {"attention": Rates(0.86, 0.4, 9e-6, 0.0)}
    assert transferred(portable, compute_capability="8.6")["attention"].launch_s == 9e-6
    assert transferred(portable)["attention"].launch_s == 2e-6


def test_kernels_of_hopper_alone_say_nothing_of_older_machines(h200_profile):
    """8-bit weights run in Triton's kernel there, as 4-bit ones do; sparse drafts are not priced as measured."""
    portable = {"linear_int4": Rates(0.2, 0.2, 5e-6, 0.0)}
    profile = replace(h200_profile, hardware=SOURCE, portable=portable)
    old = replace(SOURCE, name="other", compute_capability="8.0")
    older, newer = (transferred_profile(profile, one) for one in (old, replace(SOURCE, name="other")))
    assert newer.rates("linear_int8").source == "transferred"
    assert older.rates("linear_int8").source == "prior"
    assert older.rates("linear_int8").bandwidth_utilization == older.rates("linear_int4").bandwidth_utilization
    assert "sparse_attention" in {*newer.classes} - {*older.classes}


@pytest.mark.parametrize("kind", ["two_bit_scan", "progressive_attention"])
def test_scans_run_on_older_machines_as_those_for_many_query_heads_do(h200_profile, kind):
    """These are Triton's kernels on Hopper, too."""
    wide = replace(h200_profile.rates(kind), bandwidth_utilization=0.125, launch_s=5e-5, spread=0.0)
    profile = replace(
        h200_profile, hardware=SOURCE, portable={"linear": Rates(0.2, 0.2, 5e-6, 0.0)},
        classes={**h200_profile.classes, f"{kind}_wide": wide},
    )  # fmt: skip
    old = replace(SOURCE, name="other", compute_capability="8.0")
    found = transferred_profile(profile, old).rates(kind)
    assert (found.bandwidth_utilization, found.launch_s, found.source) == (0.125, 5e-5, "transferred")
    without = replace(profile, classes={name: one for name, one in profile.classes.items() if name != f"{kind}_wide"})
    assert transferred_profile(without, old).rates(kind).source == "prior"


def test_without_a_clock_instructions_scale_as_the_peaks(transferred):
    """A tenth of the peak: 0.3 of 4 TB/s become 0.12 TB/s."""
    codes = transferred(sm_clock_hz=0.0, compute_flops=1e14)["attention_int4"]
    assert codes.bandwidth_utilization == pytest.approx(0.03)


def test_rates_stay_in_the_range_of_profiles(transferred):
    """A machine whose instructions are a billion times slower, as far as a file may describe one."""
    slow = transferred(sm_clock_hz=1e-3)
    assert slow["attention_int4"].bandwidth_utilization == pytest.approx(1e-9)
    assert all(step.inverse_utilization <= 1e9 for step in slow["attention_int4"].steps)
