"""Rates of a kernel class from measured samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from ridgeplan.roofline.catalog.profile import MAX_SPREAD, MAX_UTILIZATION, Rates
from ridgeplan.roofline.cost import Cost

SHORTEST_LAUNCH_S = 1e-9
SLOWEST = 1e-6  # utilization
OUTLIER = 0.3  # log residual beyond which a sample counts linearly instead of squared


@dataclass(frozen=True)
class Sample:
    """One timed call: its cost by the model's formulas, its seconds, and what `Rates` says of its other sizes."""

    cost: Cost
    seconds: float
    rows: int = 1
    width: float = 0.0
    depth: float = 0.0
    tiles: float = 0.0


@dataclass(frozen=True)
class Ceilings:
    """The peaks that utilizations are relative to, the shares of them that anything reaches, and the number of SMs.

    matmul_utilization: a large matmul's share of the compute peak. read_utilization: the share of the bandwidth at
    which memory is read, at most.
    """

    bandwidth_bytes_per_s: float
    compute_flops: float
    matmul_utilization: float = 1.0
    read_utilization: float = 1.0
    num_sms: int = 1


def fit_rates(samples: Sequence[Sample], ceilings: Ceilings) -> Rates:
    """Least squares in log time of launch + max(bytes / (bandwidth x u), FLOPs / (peak x v)).

    A rate that never limits any sample cannot be fitted, as any value that is fast enough fits equally well. It is then
    the ceiling, what memory or a large matmul reaches, so that predictions beyond the samples have a measured limit.
    Both rates are fitted only if that explains clearly more than one of them alone.

    Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("a fit needs at least one sample")
    seconds = np.array([sample.seconds for sample in samples])
    moving = np.array([float(sample.cost.bytes) for sample in samples]) / ceilings.bandwidth_bytes_per_s
    computing = np.array([float(sample.cost.flops) for sample in samples]) / ceilings.compute_flops
    times = _Times(seconds, moving, computing)
    fastest = (ceilings.read_utilization, ceilings.matmul_utilization)
    simple = min((_fit(times, fastest, free) for free in ((0, 1), (0, 2))), key=lambda fit: fit.loss)
    both = _fit(times, fastest, (0, 1, 2))
    count = len(samples)
    # Bayesian information criterion: another parameter must lower the loss by more than noise would.
    best = both if both.loss < simple.loss * count ** (-1 / count) else simple
    launch_s, bandwidth, compute = np.exp(best.logs)
    # In logs, so a stray sample that took a hundred times as long does not dominate.
    spread = min(float(times.residuals(best.logs).std()), MAX_SPREAD)
    return Rates(float(bandwidth), float(compute), float(launch_s), spread)


@dataclass(frozen=True)
class _Times:
    """Measured seconds of the samples [n], and the times of their bytes and FLOPs at the ceilings."""

    seconds: np.ndarray
    moving: np.ndarray
    computing: np.ndarray

    def residuals(self, logs: np.ndarray) -> np.ndarray:
        """Log of predicted over measured time; `logs` holds the logs of launch, u and v."""
        launch_s, bandwidth, compute = np.exp(logs)
        return np.log((launch_s + np.maximum(self.moving / bandwidth, self.computing / compute)) / self.seconds)


@dataclass(frozen=True)
class _Fit:
    logs: np.ndarray
    loss: float


def _fit(times: _Times, fastest: tuple[float, float], free: tuple[int, ...]) -> _Fit:
    """The best fit of the `free` ones of (launch, u, v), with the others at their ceilings.

    It starts from the fastest sample's rates. The residuals do not depend on the rate of the smaller term, so if the
    other one started too slow, the fit could never leave that point.
    """
    chosen = list(free)
    shortest_s = times.seconds.min()
    lowest = np.log([SHORTEST_LAUNCH_S, SLOWEST, SLOWEST])
    highest = np.log([max(shortest_s, 2 * SHORTEST_LAUNCH_S), fastest[0], MAX_UTILIZATION])
    seen = [max((part / times.seconds).max(), SLOWEST) for part in (times.moving, times.computing)]
    logs = np.log([shortest_s / 2, *fastest])
    logs[chosen] = np.log([shortest_s / 2, *seen])[chosen]
    logs = np.clip(logs, lowest, highest)

    def residuals(values: np.ndarray) -> np.ndarray:
        logs[chosen] = values
        return times.residuals(logs)

    found = least_squares(
        residuals, logs[chosen], bounds=(lowest[chosen], highest[chosen]), loss="soft_l1", f_scale=OUTLIER
    )
    logs[chosen] = found.x
    return _Fit(logs, float(found.cost))
