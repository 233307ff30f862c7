"""The fit finds the rates that made the samples."""

import numpy as np
import pytest

from ridgeplan.roofline.cost import Cost
from ridgeplan.validate.calibration.fit import Ceilings, Sample, fit_rates

CEILINGS = Ceilings(bandwidth_bytes_per_s=1e12, compute_flops=1e14, matmul_utilization=0.7)


def samples(
    launch_s: float, bandwidth: float, compute: float, intensities: tuple[float, ...], noise: float, count: int = 24
) -> list[Sample]:
    """Calls of 10 kB to 1 GB at each intensity (FLOP/byte), timed with relative `noise`."""
    random = np.random.default_rng(7)
    made = []
    for intensity in intensities:
        for nbytes in np.geomspace(1e4, 1e9, count):
            moving = nbytes / (bandwidth * CEILINGS.bandwidth_bytes_per_s)
            computing = nbytes * intensity / (compute * CEILINGS.compute_flops)
            seconds = (launch_s + max(moving, computing)) * np.exp(noise * random.standard_normal())
            made.append(Sample(Cost(nbytes * intensity, nbytes / 2, nbytes / 2), float(seconds)))
    return made


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
    disturbed = [Sample(s.cost, s.seconds * (100 if i % 9 == 4 else 1)) for i, s in enumerate(clean)]
    rates = fit_rates(disturbed, CEILINGS)
    assert rates.bandwidth_utilization == pytest.approx(0.6, rel=0.15)
    assert rates.compute_utilization == pytest.approx(0.3, rel=0.15)
    assert 0.5 < rates.spread <= 10


def test_launch_alone_explains_calls_that_move_nothing() -> None:
    rates = fit_rates([Sample(Cost(0, nbytes, 0), 3e-6) for nbytes in (1, 10, 100, 1000)], CEILINGS)
    assert rates.launch_s == pytest.approx(3e-6, rel=0.01)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        fit_rates([], CEILINGS)
