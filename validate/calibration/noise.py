"""Readings of a calibration that agree with each other, and classes of kernels that are too noisy to be used.

Other work on the machine only adds time, so the fastest readings are the true ones, once two of them agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ridgeplan.roofline.catalog.profile import MAX_SPREAD, Rates

if TYPE_CHECKING:
    from ridgeplan.validate.timing import Bench, KernelCall

Kept = TypeVar("Kept")
AGREEMENT = 0.1  # largest relative distance of two readings that agree
MAX_READINGS = 6


class NoisyMachine(ValueError):
    """Other work slows the machine so much that its kernels cannot be measured."""


@dataclass(frozen=True)
class Reading:
    """Seconds of a call, and the relative distance of its two fastest readings."""

    seconds: float
    spread: float


def steady_reading(read: Callable[[], Iterable[float]]) -> Reading:
    """Reads, a few readings at once, until the two fastest agree or there are MAX_READINGS. The fastest counts."""
    readings = list(read())
    while not agree(readings) and len(readings) < MAX_READINGS:
        readings.extend(read())
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
    """Reads the calls of each class until they agree, and refuses noisy classes unless they are allowed.

    spreads: by class, the distance of the two fastest readings that three quarters of its calls stay below.
    """

    allowed: bool = False
    spreads: dict[str, float] = field(default_factory=dict)

    def readings(
        self, kind: str, bench: Bench, calls: Iterable[KernelCall], keep: Callable[[KernelCall], Kept]
    ) -> list[tuple[Kept, float]]:
        """What `keep` returns for each call of a class, and the call's seconds, measured again while readings disagree.

        The calls themselves are not kept: each holds its inputs, which may fill a GPU. Raises NoisyMachine.
        """
        readings = [(keep(call), steady_reading(partial(bench.readings, call))) for call in calls]
        self.record(kind, [reading.spread for _, reading in readings])
        return [(kept, reading.seconds) for kept, reading in readings]

    def record(self, kind: str, spreads: list[float]) -> None:
        """Keeps the spread of a class. Raises NoisyMachine if it is too wide and that is not allowed."""
        self.spreads[kind] = upper_quartile(spreads)
        if self.spreads[kind] > AGREEMENT and not self.allowed:
            raise NoisyMachine(
                f"the machine is too busy: {MAX_READINGS} readings of {kind!r} differ by {self.spreads[kind]:.0%}; "
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
    """The value below which three quarters of the values lie."""
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=4, method="inclusive")[2]
