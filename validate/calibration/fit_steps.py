"""Rates of a kernel class whose time grows in steps of rows, from measured samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import lsq_linear

from ridgeplan.roofline.catalog.profile import MAX_SPREAD, MAX_UTILIZATION, Rates, RowStep
from ridgeplan.validate.calibration.fit import OUTLIER, Ceilings, Sample

REWEIGHTINGS = 10
PARTS = ("launch_s", "inverse_utilization", "width_s", "depth_s")


def fit_steps(samples: Sequence[Sample], ceilings: Ceilings, above_rows: Sequence[int]) -> Rates:
    """Least squares in relative time, where each step of `above_rows` adds to all parts of the one below it.

    No part shrinks as rows grow, so that no time does; and none is read faster than memory is. Samples beyond an error
    of OUTLIER count linearly, not squared. Steps without samples add nothing. The steps hold what more rows cost, so
    the class's arithmetic is just so fast that it limits no sample.
    Raises ValueError without samples of the fewest rows.
    """
    index = np.searchsorted(above_rows, [sample.rows for sample in samples])
    if not len(samples) or index.min() > 0:
        raise ValueError("a fit needs at least one sample of the fewest rows")
    found = _coefficients(samples, index, ceilings, len(above_rows) + 1)
    reached = np.cumsum(found, axis=0)[index]
    terms = _parts(samples, ceilings) * reached
    errors = np.log(terms.sum(1) / [sample.seconds for sample in samples])
    first, *steps = found
    return Rates(
        bandwidth_utilization=min(MAX_UTILIZATION, 1 / first[1]),
        compute_utilization=_arithmetic(samples, terms[:, 1], ceilings),
        launch_s=first[0],
        spread=min(float(errors.std()), MAX_SPREAD),
        width_s=first[2],
        depth_s=first[3],
        steps=tuple(
            RowStep(rows, **{name: float(value) for name, value in zip(PARTS, step, strict=True)})
            for rows, step in zip(above_rows, steps, strict=True)
            if step.any()
        ),
    )


def _parts(samples: Sequence[Sample], ceilings: Ceilings) -> np.ndarray:
    """What a sample's time is made of, in the order of PARTS: one, seconds at full bandwidth, width, depth."""
    bandwidth = ceilings.bandwidth_bytes_per_s
    return np.array([(1.0, one.cost.bytes / bandwidth, one.width, one.depth) for one in samples], dtype=float)


def _coefficients(samples: Sequence[Sample], index: np.ndarray, ceilings: Ceilings, count: int) -> np.ndarray:
    """What each of `count` steps adds to the four parts: [count, 4]."""
    seconds = np.array([sample.seconds for sample in samples])
    relative = _parts(samples, ceilings) / seconds[:, None]
    reached = index[:, None] >= np.arange(count)
    matrix = (reached[:, :, None] * relative[:, None, :]).reshape(len(samples), -1)
    scale = np.where(matrix.any(0), np.abs(matrix).max(0), 1.0)
    lowest = np.zeros(matrix.shape[1])
    lowest[1] = scale[1] / ceilings.read_utilization
    weights, found = np.ones(len(samples)), lowest
    for _ in range(REWEIGHTINGS):
        found = lsq_linear(matrix / scale * weights[:, None], weights, bounds=(lowest, np.inf)).x
        errors = np.abs(matrix / scale @ found - 1)
        weights = 1 / np.sqrt(np.maximum(errors / OUTLIER, 1))
    present = matrix.any(0)
    return np.where(present, np.where(found > 1e-9, found, 0.0) / scale, 0.0).reshape(count, 4)


def _arithmetic(samples: Sequence[Sample], reading_s: np.ndarray, ceilings: Ceilings) -> float:
    """The lowest share of the compute peak at which no sample's FLOPs take longer than its bytes."""
    computing_s = np.array([one.cost.flops for one in samples], float) / ceilings.compute_flops
    return float(np.clip(max(computing_s / reading_s), 1e-9, MAX_UTILIZATION))
