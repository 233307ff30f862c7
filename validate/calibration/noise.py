"""Readings of a calibration that agree with each other, and classes of kernels that are too noisy to be used.

Other work on the machine only adds time, so the fastest readings are the true ones, once two of them agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ridgeplan.roofline.catalog.profile import MAX_SPREAD, Rates

if TYPE_CHECKING:
    from ridgeplan.validate.timing import Bench, Trial

AGREEMENT = 0.1  # largest relative distance of two readings that agree
FEWEST_READINGS, MOST_READINGS = 2, 5


class NoisyMachine(ValueError):
    """Other work slows the machine so much that its kernels cannot be measured."""


@dataclass(frozen=True)
class Reading:
    """Seconds of a trial, and the relative distance of its two fastest readings."""

    seconds: float
    spread: float


def steady_reading(read: Callable[[], float]) -> Reading:
    """Reads until the two fastest readings agree, at most MOST_READINGS times. The fastest counts."""
    readings = [read() for _ in range(FEWEST_READINGS)]
    while not agree(readings) and len(readings) < MOST_READINGS:
        readings.append(read())
    return Reading(min(readings), distance(readings))


def distance(readings: Iterable[float]) -> float:
    """How much slower the second fastest is than the fastest, relative to it."""
    fastest, second, *_ = sorted(readings)
    return second / fastest - 1


def agree(readings: Iterable[float]) -> bool:
    """Whether the two fastest readings agree."""
    return distance(readings) <= AGREEMENT


@dataclass(frozen=True)
class NoiseCheck:
    """Reads the trials of each class until they agree, and refuses noisy classes unless they are allowed.

    spreads: by class, the distance that three quarters of its trials' fastest readings stay below.
    """

    allowed: bool = False
    spreads: dict[str, float] = field(default_factory=dict)

    def readings(self, kind: str, bench: Bench, trials: Iterable[Trial]) -> list[tuple[Trial, float]]:
        """Each trial of a class with its seconds, in the time that one reading with the bench's whole budget takes.

        More if readings disagree. Raises NoisyMachine.
        """
        half = replace(bench, budget_s=bench.budget_s / FEWEST_READINGS)
        found = [(trial, steady_reading(partial(half.seconds, trial))) for trial in trials]
        self.record(kind, [reading.spread for _, reading in found])
        return [(trial, reading.seconds) for trial, reading in found]

    def record(self, kind: str, spreads: list[float]) -> None:
        """Keeps the spread of a class. Raises NoisyMachine if it is too wide and that is not allowed."""
        self.spreads[kind] = upper_quartile(spreads)
        if self.spreads[kind] > AGREEMENT and not self.allowed:
            raise NoisyMachine(
                f"the machine is too busy: {MOST_READINGS} readings of {kind!r} differ by {self.spreads[kind]:.0%}; "
                f"allowed: {AGREEMENT:.0%}, or any with --allow-noisy; try again once other programs have ended"
            )

    def widened(self, kind: str, rates: Rates) -> Rates:
        """`rates` with a spread that holds the readings' too: both are independent, so their squares add up."""
        both = (rates.spread**2 + self.spreads[kind] ** 2) ** 0.5
        return replace(rates, spread=min(both, MAX_SPREAD)) if self.noisy(kind) else rates

    def noisy(self, kind: str) -> bool:
        """Whether the readings of a class did not agree."""
        return self.spreads[kind] > AGREEMENT


def upper_quartile(values: list[float]) -> float:
    """What three quarters of the values stay below."""
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=4, method="inclusive")[2]
