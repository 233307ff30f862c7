"""Fits of rates in steps, to times that follow from known rates."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from ridgeplan.roofline.catalog.profile import Rates, RowStep
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.execution import product_tiles
from ridgeplan.roofline.latency import RateTerms
from ridgeplan.validate.calibration.fit import Ceilings, Sample, fit_steps

CEILINGS = Ceilings(1e12, 1e15, 0.8, 0.9)
ABOVE = (1, 8, 16)
TRUE = Rates(
    0.8, 0.4, 2e-6, 0.0, width_s=1e-10, depth_s=3e-10,
    steps=(RowStep(1, launch_s=1e-6), RowStep(8, inverse_utilization=0.5, width_s=2e-10)),
)  # fmt: skip


def samples(rates: Rates, rows: tuple[int, ...] = (1, 4, 12)) -> Iterator[Sample]:
    """Products of several shapes, whose seconds follow from `rates`; their FLOPs never matter."""
    terms = RateTerms.of(rates)
    for count, outputs, inputs in product(rows, (500, 4000, 30_000), (700, 5000)):
        cost, at = Cost(2.0 * count * outputs * inputs, 2.0 * outputs * inputs), terms.at_rows(count)
        seconds = at.launch_s + cost.bytes / 1e12 / at.bandwidth_utilization + outputs * at.width_s
        yield Sample(cost, float(seconds + inputs * at.depth_s), count, outputs, inputs)


def test_rates_in_steps_are_found_again() -> None:
    found = fit_steps(list(samples(TRUE)), CEILINGS, ABOVE)
    first = (found.bandwidth_utilization, found.launch_s, found.width_s, found.depth_s)
    assert first == pytest.approx((0.8, 2e-6, 1e-10, 3e-10), rel=1e-3)
    by_rows = {step.above_rows: step for step in found.steps}
    assert by_rows[1].launch_s == pytest.approx(1e-6, rel=1e-3)
    assert (by_rows[8].inverse_utilization, by_rows[8].width_s) == pytest.approx((0.5, 2e-10), rel=1e-3)
    assert 16 not in by_rows  # no sample has as many rows
    assert found.spread < 1e-4


TILED = Rates(
    0.8, 0.4, 2e-6, 0.0, tile_s=3e-6, fill_s=1e-6, depth_s=3e-10, steps=(RowStep(8, tile_s=2e-6, fill_s=3e-6),),
)  # fmt: skip


def tiled_samples() -> Iterator[Sample]:
    """Products whose tiles take up to twice as long as their bytes, on 10 SMs, from less than one tile each on."""
    terms = RateTerms.of(TILED)
    for count, outputs, inputs in product((1, 4, 12), (64, 300, 1000, 4000, 30_000), (700, 3000, 9000, 20_000)):
        at, own = terms.at_rows(count), product_tiles(outputs, inputs) / 10
        cost = Cost(read_bytes=2.0 * outputs * inputs)
        reading_s = cost.bytes / 1e12 / at.bandwidth_utilization
        seconds = at.launch_s + math.hypot(reading_s, own * at.tile_s) + min(1, own / 8) * at.fill_s
        yield Sample(cost, float(seconds + inputs * at.depth_s), count, outputs, inputs, 10 * own)


def test_tiles_are_found_beside_bytes() -> None:
    found = fit_steps(list(tiled_samples()), replace(CEILINGS, num_sms=10), ABOVE)
    assert (found.bandwidth_utilization, found.tile_s, found.fill_s) == pytest.approx((0.8, 3e-6, 1e-6), rel=1e-2)
    (step,) = (step for step in found.steps if step.above_rows == 8)
    assert (step.tile_s, step.fill_s) == pytest.approx((2e-6, 3e-6), rel=1e-2)
    assert found.spread < 1e-3


def test_no_time_shrinks_as_rows_grow() -> None:
    """Samples of 12 rows that are twice as fast as those of 4 are averaged with them, not followed."""
    fast = [sample for sample in samples(TRUE) if sample.rows < 12]
    fast += [Sample(one.cost, one.seconds / 2, 12, one.width, one.depth) for one in fast if one.rows == 4]
    terms = RateTerms.of(fit_steps(fast, CEILINGS, ABOVE))
    few, many = terms.at_rows(4), terms.at_rows(12)
    assert many.launch_s >= few.launch_s
    assert many.bandwidth_utilization <= few.bandwidth_utilization
    assert (many.width_s, many.depth_s) >= (few.width_s, few.depth_s)


def test_nothing_is_read_faster_than_memory_is() -> None:
    found = fit_steps(list(samples(Rates(1.5, 0.4, 2e-6, 0.0))), CEILINGS, ABOVE)
    assert found.bandwidth_utilization == pytest.approx(0.9)


def test_a_stray_sample_changes_little() -> None:
    stray = list(samples(TRUE))
    stray[3] = Sample(stray[3].cost, 5 * stray[3].seconds, 1, stray[3].width, stray[3].depth)
    found = fit_steps(stray, CEILINGS, ABOVE)
    assert found.bandwidth_utilization == pytest.approx(0.8, rel=0.1)
    assert found.spread > 0.1


def test_arithmetic_limits_no_sample() -> None:
    """12 FLOPs a byte, which takes 1.75 ps at 12 rows, in a peak of 1 FLOP a femtosecond: 12 / 1750 of the peak."""
    found = fit_steps(list(samples(TRUE)), CEILINGS, ABOVE)
    assert found.compute_utilization == pytest.approx(12 / 1750, rel=1e-3)


def test_a_fit_needs_the_fewest_rows() -> None:
    for none in ([], [Sample(Cost(1e9, 1e6), 1e-5, rows=5)]):
        with pytest.raises(ValueError, match="at least one sample"):
            fit_steps(none, CEILINGS, ABOVE)
