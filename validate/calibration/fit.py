"""Rates of a kernel class, fitted to measured samples, and the file that keeps the samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from ridgeplan.roofline.catalog.profile import MAX_SPREAD, MAX_UTILIZATION, Rates, RowStep
from ridgeplan.roofline.catalog.validation import Checked, number, parts, text, whole
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.execution import filled
from ridgeplan.roofline.passes import tiles
from ridgeplan.validate.calibration.noise import SHORTEST_LAUNCH_S
from ridgeplan.validate.result_file import SCHEMA, ResultFile

SLOWEST = 1e-6  # utilization
NEGLIGIBLE_LOSS = 5e-5  # of a sample: half the square of 1%
OUTLIER = 0.3  # log residual beyond which a sample counts linearly instead of squared


@dataclass(frozen=True)
class KernelTiming:
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


def fit_rates(samples: Sequence[KernelTiming], ceilings: Ceilings) -> Rates:
    """Least squares in log time of launch + max(bytes / (bandwidth x u), FLOPs / (peak x v)).

    A rate that never limits any sample cannot be fitted, as any value that is fast enough fits equally well. It is then
    the ceiling, what memory or a large matmul reaches, so that predictions beyond the samples have a measured limit.
    Both rates are fitted only if that explains clearly more than one of them alone. Where either explains the samples,
    as it does two of them, the one that is nearer to its peak does: 4.5 TB/s is a likelier limit than 1 TFLOP/s.

    Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("a fit needs at least one sample")
    times = Times.of(samples, ceilings)
    fastest = (ceilings.read_utilization, ceilings.matmul_utilization)
    count, fits = len(samples), {rate: _fit(times, fastest, (0, rate)) for rate in (1, 2)}
    alike = NEGLIGIBLE_LOSS * count + min(fit.loss for fit in fits.values())
    simple = max((rate for rate in fits if fits[rate].loss <= alike), key=lambda rate: fits[rate].logs[rate])
    both = _fit(times, fastest, (0, 1, 2))
    # Bayesian information criterion: another parameter must lower the loss by more than noise would.
    clearly = both.loss + NEGLIGIBLE_LOSS * count < fits[simple].loss * count ** (-1 / count)
    best = both if clearly else fits[simple]
    launch_s, bandwidth, compute = np.exp(best.logs)
    # In logs, so a stray sample that took a hundred times as long does not dominate.
    spread = min(float(times.residuals(best.logs).std()), MAX_SPREAD)
    return Rates(float(bandwidth), float(compute), float(launch_s), spread)


@dataclass(frozen=True)
class Times:
    """Measured seconds of the samples [n], and the times of their bytes and FLOPs at the ceilings."""

    seconds: np.ndarray
    moving: np.ndarray
    computing: np.ndarray

    @classmethod
    def of(cls, samples: Sequence[KernelTiming], ceilings: Ceilings) -> Times:
        """Of samples with these peaks."""
        seconds = np.array([sample.seconds for sample in samples])
        moving = np.array([float(sample.cost.bytes) for sample in samples]) / ceilings.bandwidth_bytes_per_s
        computing = np.array([float(sample.cost.flops) for sample in samples]) / ceilings.compute_flops
        return cls(seconds, moving, computing)

    def residuals(self, logs: np.ndarray) -> np.ndarray:
        """Log of predicted over measured time; `logs` holds the logs of launch, u and v."""
        launch_s, bandwidth, compute = np.exp(logs)
        return np.log((launch_s + np.maximum(self.moving / bandwidth, self.computing / compute)) / self.seconds)


@dataclass(frozen=True)
class _Fit:
    logs: np.ndarray
    loss: float


def _fit(times: Times, fastest: tuple[float, float], free: tuple[int, ...]) -> _Fit:
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

    solution = least_squares(
        residuals, logs[chosen], bounds=(lowest[chosen], highest[chosen]), loss="soft_l1", f_scale=OUTLIER
    )
    logs[chosen] = solution.x
    return _Fit(logs, float(solution.cost))


MAX_TRIALS = 1000
CONVERGED: dict[str, Any] = {
    "xtol": 1e-12,
    "ftol": 1e-15,
    "gtol": None,
}  # relative changes of the parts and of the loss
PULL = 0.01  # of each part towards its least value: that of a sample with this share of a sample's weight
NEGLIGIBLE = 1e-4  # largest share of any sample's time
PARTS = ("launch_s", "inverse_utilization", "tile_s", "fill_s", "width_s", "depth_s")
READING, TILES = PARTS.index("inverse_utilization"), PARTS.index("tile_s")


def fit_steps(samples: Sequence[KernelTiming], ceilings: Ceilings, above_rows: Sequence[int]) -> Rates:
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
    coefficients = _coefficients(sizes / seconds[:, None], index, ceilings.read_utilization, len(above_rows) + 1)
    terms = sizes * np.cumsum(coefficients, axis=0)[index]
    errors = np.log((terms * _shares(terms)).sum(1) / seconds)
    first, *steps = (dict(zip(PARTS, step, strict=True)) for step in coefficients.tolist())
    return Rates(
        bandwidth_utilization=min(MAX_UTILIZATION, 1 / first.pop("inverse_utilization")),
        compute_utilization=_arithmetic(samples, terms[:, READING], ceilings),
        spread=min(float(errors.std()), MAX_SPREAD),
        steps=tuple(RowStep(rows, **step) for rows, step in zip(above_rows, steps, strict=True) if any(step.values())),
        **first,
    )


def _sizes(samples: Sequence[KernelTiming], ceilings: Ceilings) -> np.ndarray:
    """What the parts of a sample's time are proportional to, in the order of PARTS: [samples, parts]."""
    bandwidth, num_sms = ceilings.bandwidth_bytes_per_s, ceilings.num_sms
    waves = [sample.tiles / num_sms for sample in samples]
    rows = (
        (1.0, sample.cost.bytes / bandwidth, count, filled(count), sample.width, sample.depth)
        for sample, count in zip(samples, waves, strict=True)
    )
    return np.array([*rows], dtype=float)


def _shares(terms: np.ndarray) -> np.ndarray:
    """The share of each term [samples, parts] that the time holds: of reading and of tiles their share of the hypot."""
    shares = np.ones_like(terms)
    both = terms[:, [READING, TILES]]
    shares[:, [READING, TILES]] = both / np.maximum(np.hypot(*both.T), np.finfo(float).tiny)[:, None]
    return shares


def _coefficients(relative: np.ndarray, index: np.ndarray, read_utilization: float, count: int) -> np.ndarray:
    """What each of `count` steps adds to the parts: [count, parts]. relative: sizes per second [samples, parts].

    Parts that the samples do not tell apart, such as those of a step that none reaches first, share their time evenly
    (ridge regression): of the many optima this is the one that does not depend on rounding.
    """
    reached = index[:, None] >= np.arange(count)
    matrix = _by_step(reached, relative)
    scale = np.where(matrix.any(0), np.abs(matrix).max(0), 1.0)
    lowest = np.zeros(matrix.shape[1])
    lowest[READING] = scale[READING] / read_utilization

    def terms(scaled: np.ndarray) -> np.ndarray:
        return relative * np.cumsum((scaled / scale).reshape(count, -1), axis=0)[index]

    def errors(scaled: np.ndarray) -> np.ndarray:
        parts_s = terms(scaled)
        return np.concatenate([(parts_s * _shares(parts_s)).sum(1) - 1, PULL * (scaled - lowest)])

    def slopes(scaled: np.ndarray) -> np.ndarray:
        by_step = _by_step(reached, relative * _shares(terms(scaled))) / scale
        return np.concatenate([by_step, PULL * np.eye(len(scaled))])

    fit = least_squares(errors, lowest, slopes, bounds=(lowest, np.inf), loss="soft_l1", f_scale=OUTLIER,
                        max_nfev=MAX_TRIALS, **CONVERGED)  # fmt: skip
    # The solver keeps its distance from bounds, where most parts of most steps belong.
    return np.where(matrix.any(0) & (fit.x > NEGLIGIBLE), fit.x / scale, 0.0).reshape(count, -1)


def _by_step(reached: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values of parts [samples, parts] in the columns of every step that a sample has reached."""
    return (reached[:, :, None] * values[:, None, :]).reshape(len(values), -1)


def _arithmetic(samples: Sequence[KernelTiming], reading_s: np.ndarray, ceilings: Ceilings) -> float:
    """The lowest share of the compute peak at which no sample's FLOPs take longer than its bytes, as far as any is."""
    computing_s = np.array([sample.cost.flops for sample in samples], float) / ceilings.compute_flops
    return float(np.clip(max(computing_s / reading_s), 1e-9, ceilings.matmul_utilization))


LARGEST = 1e18


class SamplesError(ValueError):
    """A file of samples that is missing, damaged, or of another machine."""


@dataclass(frozen=True)
class KernelSample(Checked):
    """One timed call of a kernel class; sizes as in `ridgeplan.validate.calibration.fit.KernelTiming`."""

    error = SamplesError
    kind: str = text()
    seconds: float = number(1e-9, 1e3)
    flops: float = number(0, LARGEST)
    read_bytes: float = number(0, LARGEST)
    write_bytes: float = number(0, LARGEST)
    rows: int = whole(1, 1 << 30)
    width: float = number(0, LARGEST)
    depth: float = number(0, LARGEST)

    @classmethod
    def of(cls, kind: str, sample: KernelTiming) -> KernelSample:
        """A sample of a class."""
        cost = {name: float(value) for name, value in vars(sample.cost).items()}
        return cls(kind, sample.seconds, **cost, rows=sample.rows, width=float(sample.width), depth=float(sample.depth))

    @property
    def timing(self) -> KernelTiming:
        """As fits take it."""
        cost = Cost(self.flops, self.read_bytes, self.write_bytes)
        count = float(tiles(self.kind, self.width, self.depth))
        return KernelTiming(cost, self.seconds, self.rows, self.width, self.depth, count)


@dataclass(frozen=True)
class RoundSample(Checked):
    """A timed round of a calibration's model (its place in `Suite.gap_shapes`), with medians of its parts.

    tokens: that the timed rounds added. draft_s: of one draft step, 0 without drafts; rest_s: of what is neither a
    draft step nor the target's. prefill_s: of a prompt of `context` tokens, where it was timed.
    """

    error = SamplesError
    model: int = whole(0, 100)
    preset: str = text()
    context: int = whole(1, 1 << 24)
    batch: int = whole(1, 4096)
    tokens: int = whole(1, 1 << 24)
    draft_s: float = number(0, 1e3)
    target_s: float = number(0, 1e3)
    rest_s: float = number(0, 1e3)
    prefill_s: float = number(0, 1e4, default=0.0)


@dataclass(frozen=True)
class Samples(ResultFile):
    """All samples of one calibration. The utilizations are those of `Ceilings`."""

    error = SamplesError
    title, advice = "samples", "calibrate again"
    device: str = text()
    date: str = text()
    matmul_utilization: float = number(1e-9, 4)
    read_utilization: float = number(1e-9, 4)
    kernels: tuple[KernelSample, ...] = parts(KernelSample)
    rounds: tuple[RoundSample, ...] = parts(RoundSample, default=())

    @classmethod
    def of(cls, device: str, date: str, ceilings: Ceilings, by_kind: Mapping[str, Sequence[KernelTiming]]) -> Samples:
        """The samples of kernel classes, by class."""
        kernels = tuple(KernelSample.of(kind, sample) for kind, samples in by_kind.items() for sample in samples)
        return cls(device, date, ceilings.matmul_utilization, ceilings.read_utilization, kernels)

    def with_rounds(self, rounds: Sequence[RoundSample]) -> Samples:
        """The same with timed rounds."""
        return replace(self, rounds=tuple(rounds))

    def by_kind(self) -> dict[str, list[KernelTiming]]:
        """The kernels' samples by class, in the order in which the classes were measured."""
        by_kind: dict[str, list[KernelTiming]] = {}
        for row in self.kernels:
            by_kind.setdefault(row.kind, []).append(row.timing)
        return by_kind

    def to_json(self) -> str:
        """JSON text that `read` reads back to equal samples, one sample a line."""
        lists = {name: ",\n".join(json.dumps(asdict(row)) for row in getattr(self, name)) for name in LISTS}
        head = {name: value for name, value in vars(self).items() if name not in LISTS}
        body = "".join(f', "{name}": [\n{lines}\n]' for name, lines in lists.items())
        return json.dumps({"schema": SCHEMA, **head}, allow_nan=False)[:-1] + body + "}\n"


LISTS = ("kernels", "rounds")
