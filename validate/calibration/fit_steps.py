"""Rates of a kernel class whose time grows in steps of rows, from measured samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import lsq_linear, minimize

from ridgeplan.roofline.catalog.profile import MAX_SPREAD, MAX_UTILIZATION, Rates, RowStep
from ridgeplan.roofline.execution import filled
from ridgeplan.validate.calibration.fit import OUTLIER, Ceilings, Sample

MOST_TRIALS = 1000
CONVERGED = 1e-12  # change of the loss, in units of an outlier's
NEGLIGIBLE = 1e-4  # largest share of any sample's time
PARTS = ("launch_s", "inverse_utilization", "tile_s", "fill_s", "width_s", "depth_s")
READING, TILES = PARTS.index("inverse_utilization"), PARTS.index("tile_s")


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
    sizes = _sizes(samples, ceilings)
    seconds = np.array([sample.seconds for sample in samples])
    found = _coefficients(sizes / seconds[:, None], index, ceilings.read_utilization, len(above_rows) + 1)
    terms = sizes * np.cumsum(found, axis=0)[index]
    errors = np.log((terms * _shares(terms)).sum(1) / seconds)
    first, *steps = (_named(step) for step in found)
    return Rates(
        bandwidth_utilization=min(MAX_UTILIZATION, 1 / first.pop("inverse_utilization")),
        compute_utilization=_arithmetic(samples, terms[:, READING], ceilings),
        spread=min(float(errors.std()), MAX_SPREAD),
        steps=tuple(RowStep(rows, **step) for rows, step in zip(above_rows, steps, strict=True) if any(step.values())),
        **first,
    )


def _named(step: np.ndarray) -> dict[str, Any]:
    return {name: float(value) for name, value in zip(PARTS, step, strict=True)}


def _sizes(samples: Sequence[Sample], ceilings: Ceilings) -> np.ndarray:
    """What the parts of a sample's time are proportional to, in the order of PARTS: [samples, parts]."""
    bandwidth, num_sms = ceilings.bandwidth_bytes_per_s, ceilings.num_sms
    return np.array(
        [
            (1.0, one.cost.bytes / bandwidth, one.tiles / num_sms, filled(one.tiles / num_sms), one.width, one.depth)
            for one in samples
        ],
        dtype=float,
    )


def _shares(terms: np.ndarray) -> np.ndarray:
    """The share of each term [samples, parts] that the time holds: of reading and of tiles their share of the hypot."""
    shares = np.ones_like(terms)
    both = terms[:, [READING, TILES]]
    shares[:, [READING, TILES]] = both / np.maximum(np.hypot(*both.T), np.finfo(float).tiny)[:, None]
    return shares


def _coefficients(relative: np.ndarray, index: np.ndarray, read_utilization: float, count: int) -> np.ndarray:
    """What each of `count` steps adds to the parts: [count, parts]. relative: sizes per second [samples, parts].

    It starts from the best sum of the parts, without hypot.
    """
    reached = index[:, None] >= np.arange(count)
    matrix = _by_step(reached, relative)
    scale = np.where(matrix.any(0), np.abs(matrix).max(0), 1.0)
    lowest = np.zeros(matrix.shape[1])
    lowest[READING] = scale[READING] / read_utilization

    def terms(scaled: np.ndarray) -> np.ndarray:
        return relative * np.cumsum((scaled / scale).reshape(count, -1), axis=0)[index]

    def loss(scaled: np.ndarray) -> tuple[float, np.ndarray]:
        """The sum of soft L1 losses, and its gradient."""
        found = terms(scaled)
        errors = ((found * _shares(found)).sum(1) - 1) / OUTLIER
        roots = np.sqrt(1 + errors**2)
        slopes = _by_step(reached, relative * _shares(found)) / scale
        return float((roots - 1).sum()), errors / roots / OUTLIER @ slopes

    start = lsq_linear(matrix / scale, np.ones(len(matrix)), bounds=(lowest, np.inf)).x
    # scipy's least_squares does not converge: it keeps its distance from bounds, and most parts of most steps are 0.
    options = {"maxiter": MOST_TRIALS, "ftol": CONVERGED}
    fit = minimize(loss, np.maximum(start, lowest), jac=True, bounds=[(low, None) for low in lowest], method="SLSQP",
                   options=options)  # fmt: skip
    return np.where(matrix.any(0) & (fit.x > NEGLIGIBLE), fit.x / scale, 0.0).reshape(count, -1)


def _by_step(reached: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values of parts [samples, parts] in the columns of every step that a sample has reached."""
    return (reached[:, :, None] * values[:, None, :]).reshape(len(values), -1)


def _arithmetic(samples: Sequence[Sample], reading_s: np.ndarray, ceilings: Ceilings) -> float:
    """The lowest share of the compute peak at which no sample's FLOPs take longer than its bytes, as far as any is."""
    computing_s = np.array([one.cost.flops for one in samples], float) / ceilings.compute_flops
    return float(np.clip(max(computing_s / reading_s), 1e-9, ceilings.matmul_utilization))
