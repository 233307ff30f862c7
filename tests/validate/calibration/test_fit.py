"""The fit finds the rates that made the samples."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from ridgeplan.roofline.catalog.profile import Profile, Rates, RowStep, load_profile, shipped_profiles
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.execution import product_tiles
from ridgeplan.roofline.latency import Machine, RateTerms
from ridgeplan.validate.calibration.calibrate import refit
from ridgeplan.validate.calibration.fit import (
    Ceilings,
    KernelTiming,
    RoundSample,
    Samples,
    SamplesError,
    fit_rates,
    fit_steps,
)

CEILINGS = Ceilings(bandwidth_bytes_per_s=1e12, compute_flops=1e14, matmul_utilization=0.7)


def samples(
    launch_s: float, bandwidth: float, compute: float, intensities: tuple[float, ...], noise: float, count: int = 24
) -> list[KernelTiming]:
    """Calls of 10 kB to 1 GB at each intensity (FLOP/byte), timed with relative `noise`."""
    random = np.random.default_rng(7)
    results = []
    for intensity in intensities:
        for nbytes in np.geomspace(1e4, 1e9, count):
            moving = nbytes / (bandwidth * CEILINGS.bandwidth_bytes_per_s)
            computing = nbytes * intensity / (compute * CEILINGS.compute_flops)
            seconds = (launch_s + max(moving, computing)) * np.exp(noise * random.standard_normal())
            results.append(KernelTiming(Cost(nbytes * intensity, nbytes / 2, nbytes / 2), float(seconds)))
    return results


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
def test_known_rates_are_recovered(noise: float) -> None:
    rates = fit_rates(samples(5e-6, 0.6, 0.3, (1.0, 500.0), noise), CEILINGS)
    near = 0.005 + noise
    assert rates.launch_s == pytest.approx(5e-6, rel=2 * near)
    assert rates.bandwidth_utilization == pytest.approx(0.6, rel=near)
    assert rates.compute_utilization == pytest.approx(0.3, rel=near)
    assert rates.spread == pytest.approx(noise, rel=0.3, abs=0.005)


def test_compute_that_never_binds_is_a_large_products() -> None:
    rates = fit_rates(samples(1e-6, 0.8, 1.0, (1.0, 2.0), 0.02), CEILINGS)
    assert rates.compute_utilization == CEILINGS.matmul_utilization
    assert rates.bandwidth_utilization == pytest.approx(0.8, rel=0.05)


def test_memory_that_never_binds_is_at_its_ceiling() -> None:
    rates = fit_rates(samples(1e-6, 1.0, 0.5, (5e3, 1e4), 0.02), CEILINGS)
    assert rates.bandwidth_utilization == 1.0
    assert rates.compute_utilization == pytest.approx(0.5, rel=0.05)


def test_a_few_disturbed_samples_hardly_move_the_fit() -> None:
    clean = samples(5e-6, 0.6, 0.3, (1.0, 500.0), 0.02)
    disturbed = [KernelTiming(s.cost, s.seconds * (100 if i % 9 == 4 else 1)) for i, s in enumerate(clean)]
    rates = fit_rates(disturbed, CEILINGS)
    assert rates.bandwidth_utilization == pytest.approx(0.6, rel=0.15)
    assert rates.compute_utilization == pytest.approx(0.3, rel=0.15)
    assert 0.5 < rates.spread <= 10


def test_launch_alone_explains_calls_that_move_nothing() -> None:
    rates = fit_rates([KernelTiming(Cost(0, nbytes, 0), 3e-6) for nbytes in (1, 10, 100, 1000)], CEILINGS)
    assert rates.launch_s == pytest.approx(3e-6, rel=0.01)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        fit_rates([], CEILINGS)


# Fits of rates in steps, to times that follow from known rates.

STEP_CEILINGS = Ceilings(1e12, 1e15, 0.8, 0.9)
ABOVE = (1, 8, 16)
TRUE = Rates(
    0.8, 0.4, 2e-6, 0.0, width_s=1e-10, depth_s=3e-10,
    steps=(RowStep(1, launch_s=1e-6), RowStep(8, inverse_utilization=0.5, width_s=2e-10)),
)  # fmt: skip


def step_samples(rates: Rates, rows: tuple[int, ...] = (1, 4, 12)) -> Iterator[KernelTiming]:
    """Products of several shapes, whose seconds follow from `rates`; their FLOPs never matter."""
    terms = RateTerms.of(rates)
    for count, outputs, inputs in product(rows, (500, 4000, 30_000), (700, 5000)):
        cost, at = Cost(2.0 * count * outputs * inputs, 2.0 * outputs * inputs), terms.at_rows(count)
        seconds = at.launch_s + cost.bytes / 1e12 / at.bandwidth_utilization + outputs * at.width_s
        yield KernelTiming(cost, float(seconds + inputs * at.depth_s), count, outputs, inputs)


def test_rates_in_steps_are_found_again() -> None:
    rates = fit_steps(list(step_samples(TRUE)), STEP_CEILINGS, ABOVE)
    first = (rates.bandwidth_utilization, rates.launch_s, rates.width_s, rates.depth_s)
    assert first == pytest.approx((0.8, 2e-6, 1e-10, 3e-10), rel=1e-3)
    by_rows = {step.above_rows: step for step in rates.steps}
    assert by_rows[1].launch_s == pytest.approx(1e-6, rel=1e-3)
    assert (by_rows[8].inverse_utilization, by_rows[8].width_s) == pytest.approx((0.5, 2e-10), rel=1e-3)
    assert 16 not in by_rows  # no sample has as many rows
    assert rates.spread < 1e-4


TILED = Rates(
    0.8, 0.4, 2e-6, 0.0, tile_s=3e-6, fill_s=1e-6, depth_s=3e-10, steps=(RowStep(8, tile_s=2e-6, fill_s=3e-6),),
)  # fmt: skip


def tiled_samples() -> Iterator[KernelTiming]:
    """Products whose tiles take up to twice as long as their bytes, on 10 SMs, from less than one tile each on."""
    terms = RateTerms.of(TILED)
    for count, outputs, inputs in product((1, 4, 12), (64, 300, 1000, 4000, 30_000), (700, 3000, 9000, 20_000)):
        at, sample_tiles = terms.at_rows(count), product_tiles(outputs, inputs) / 10
        cost = Cost(read_bytes=2.0 * outputs * inputs)
        reading_s = cost.bytes / 1e12 / at.bandwidth_utilization
        seconds = at.launch_s + math.hypot(reading_s, sample_tiles * at.tile_s) + min(1, sample_tiles / 8) * at.fill_s
        yield KernelTiming(cost, float(seconds + inputs * at.depth_s), count, outputs, inputs, 10 * sample_tiles)


def test_tiles_are_found_beside_bytes() -> None:
    rates = fit_steps(list(tiled_samples()), replace(STEP_CEILINGS, num_sms=10), ABOVE)
    assert (rates.bandwidth_utilization, rates.tile_s, rates.fill_s) == pytest.approx((0.8, 3e-6, 1e-6), rel=1e-2)
    (step,) = (step for step in rates.steps if step.above_rows == 8)
    assert (step.tile_s, step.fill_s) == pytest.approx((2e-6, 3e-6), rel=1e-2)
    assert rates.spread < 1e-3


def test_no_time_shrinks_as_rows_grow() -> None:
    """Samples of 12 rows that are twice as fast as those of 4 are averaged with them, not followed."""
    fast = [sample for sample in step_samples(TRUE) if sample.rows < 12]
    fast += [
        KernelTiming(seconds.cost, seconds.seconds / 2, 12, seconds.width, seconds.depth)
        for seconds in fast
        if seconds.rows == 4
    ]
    terms = RateTerms.of(fit_steps(fast, STEP_CEILINGS, ABOVE))
    few, many = terms.at_rows(4), terms.at_rows(12)
    assert many.launch_s >= few.launch_s
    assert many.bandwidth_utilization <= few.bandwidth_utilization
    assert (many.width_s, many.depth_s) >= (few.width_s, few.depth_s)


def test_parts_that_samples_do_not_tell_apart_share_evenly() -> None:
    """Steps of 2 to 8 and of 9 to 16 rows, of which only 12 are measured; in any order of the samples."""
    few_rows = list(step_samples(TRUE, rows=(1, 12)))
    rates, reversed_rates = (fit_steps(samples, STEP_CEILINGS, ABOVE) for samples in (few_rows, few_rows[::-1]))
    unmeasured, measured = rates.steps
    assert (unmeasured.above_rows, measured.above_rows) == ABOVE[:2]
    assert unmeasured.width_s == pytest.approx(1e-10, rel=1e-3)
    for step, other in zip(rates.steps, reversed_rates.steps, strict=True):
        assert (step.launch_s, step.inverse_utilization, step.width_s) == pytest.approx(
            (measured.launch_s, measured.inverse_utilization, measured.width_s), rel=1e-4
        )
        assert vars(other) == pytest.approx(vars(step), rel=1e-4)


def test_nothing_is_read_faster_than_memory_is() -> None:
    rates = fit_steps(list(step_samples(Rates(1.5, 0.4, 2e-6, 0.0))), STEP_CEILINGS, ABOVE)
    assert rates.bandwidth_utilization == pytest.approx(0.9)


def test_a_stray_sample_changes_little() -> None:
    stray = list(step_samples(TRUE))
    stray[3] = KernelTiming(stray[3].cost, 5 * stray[3].seconds, 1, stray[3].width, stray[3].depth)
    rates = fit_steps(stray, STEP_CEILINGS, ABOVE)
    assert rates.bandwidth_utilization == pytest.approx(0.8, rel=0.1)
    assert rates.spread > 0.1


def test_arithmetic_limits_no_sample() -> None:
    """12 FLOPs a byte, which takes 1.75 ps at 12 rows, in a peak of 1 FLOP a femtosecond: 12 / 1750 of the peak."""
    rates = fit_steps(list(step_samples(TRUE)), STEP_CEILINGS, ABOVE)
    assert rates.compute_utilization == pytest.approx(12 / 1750, rel=1e-3)


def test_a_fit_needs_the_fewest_rows() -> None:
    for none in ([], [KernelTiming(Cost(1e9, 1e6), 1e-5, rows=5)]):
        with pytest.raises(ValueError, match="at least one sample"):
            fit_steps(none, STEP_CEILINGS, ABOVE)


# Profiles whose rates are fitted to kept samples again.

RESULTS = Path(__file__).parents[3] / "validate" / "results"
KEPT, FORMER = RESULTS / "calibration_h200.json", RESULTS / "profile_h200.json"
SAMPLES = Samples.of(
    "a machine", "2026-11-22", Ceilings(1e12, 1e14, 0.7, 0.9),
    {
        "linear": [KernelTiming(Cost(1.0, 2.0, 3.0), 4e-6, 5, 6.0, 7.0)],
        "rope": [KernelTiming(Cost(8.0, 9.0), 1e-6, 10)],
    },
).with_rounds([RoundSample(0, "quantspec", 700, 3, 40, 1e-4, 2e-4, 3e-5)])  # fmt: skip


@pytest.fixture
def shipped() -> Profile:
    (h200,) = (profile for profile in shipped_profiles() if profile.hardware.name == "h200")
    return h200


def test_a_profile_is_fitted_to_its_kept_samples_again() -> None:
    """From rates that are all wrong, the times of a step come out as those of the profile that was fitted to them."""
    kinds, former = {kernel.kind for kernel in Samples.read(KEPT).kernels}, load_profile(FORMER)
    assert len(kinds) == 12
    wrong = {
        kind: replace(rates, launch_s=1.0, steps=(RowStep(1, launch_s=1.0),)) if kind in {*kinds, "gap"} else rates
        for kind, rates in former.classes.items()
    }
    refitted = refit(replace(former, classes=wrong, draft_gap_s=1.0, target_gap_s=1.0), KEPT)
    assert (refitted.draft_gap_s, refitted.target_gap_s) == pytest.approx(
        (former.draft_gap_s, former.target_gap_s), rel=1e-3
    )
    machines = Machine.of(refitted), Machine.of(former)
    for kind in (*kinds, "gap"):
        for rows in (1, 5, 12, 40):
            cost = Cost(read_bytes=3e7)
            times = [
                float(machine.seconds(cost, machine.rates[kind].at_rows(rows), 4096, 5000, 512)) for machine in machines
            ]
            assert times[0] == pytest.approx(times[1], rel=1e-3)


def test_samples_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.json"
    path.write_text(SAMPLES.to_json())
    samples = Samples.read(path)
    assert samples == SAMPLES
    (sample,) = samples.by_kind()["linear"]
    assert (sample.cost, sample.seconds, sample.rows, sample.width, sample.depth) == (
        Cost(1.0, 2.0, 3.0),
        4e-6,
        5,
        6.0,
        7.0,
    )
    assert sample.tiles == 6 / 16


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "samples .*samples.json"),
        (SAMPLES.to_json().replace('"rows": 5', '"rows": 0'), "rows"),
        (SAMPLES.to_json().replace('"schema": 1', '"schema": 7'), "schema"),
        (SAMPLES.to_json(), "the samples are of a machine, the profile is of NVIDIA H200"),
    ],
    ids=["no JSON", "a size out of range", "another schema", "another machine's"],
)
def test_samples_that_do_not_fit_are_refused(tmp_path: Path, shipped: Profile, text: str, said: str) -> None:
    path = tmp_path / "samples.json"
    path.write_text(text)
    with pytest.raises(SamplesError, match=said):
        refit(shipped, path)


def test_a_missing_file_of_samples_is_named(tmp_path: Path, shipped: Profile) -> None:
    with pytest.raises(SamplesError, match=r"cannot read samples .*none.json"):
        refit(shipped, tmp_path / "none.json")
