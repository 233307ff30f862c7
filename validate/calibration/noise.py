"""Readings of a calibration that agree with each other, and classes of kernels that are too noisy to be used.

Other work on the machine only adds time, so the fastest readings are the true ones, once two of them agree. A quick
calibration goes on where they never do: it takes the quieter half of the readings, and the class's band widens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ridgeplan.roofline.catalog.profile import MAX_SPREAD, RELATIVES, Profile, Rates

if TYPE_CHECKING:
    from ridgeplan.validate.timing import Bench, KernelCall

Kept = TypeVar("Kept")
AGREEMENT = 0.1  # largest relative distance of two readings that agree
QUICK_AGREEMENT = 0.5  # of a quick calibration, whose bands widen by what is beyond AGREEMENT
MAX_READINGS, QUICK_READINGS = 6, 12
SHORTEST_LAUNCH_S = 5e-7  # that any call takes; the quickest class of an H200 takes 0.7 us
MAX_FIT_SPREAD = 0.75  # relative error of a class's fit beyond which its rates say nothing
HIGHEST_COMPUTE = 2.0  # of the FLOP/s of a large matmul; more than that, the matmul was slowed by other programs


class NoisyMachine(ValueError):
    """Other work slows the machine so much that its kernels cannot be measured."""


@dataclass(frozen=True)
class Reading:
    """Seconds of a call, and how far its readings are apart, relative to them."""

    seconds: float
    spread: float


def steady_reading(read: Callable[[], Iterable[float]], *, quick: bool = False) -> Reading:
    """Reads, a few readings at once, until the two fastest agree or there are MAX_READINGS. The fastest counts.

    The spread is the relative distance of the two fastest. quick: there are up to QUICK_READINGS, and if no two agree,
    the median of the quieter half counts, with the half's relative standard deviation as its spread.
    """
    readings = list(read())
    while not agree(readings) and len(readings) < (QUICK_READINGS if quick else MAX_READINGS):
        readings.extend(read())
    if quick and not agree(readings):
        quieter = sorted(readings)[: len(readings) // 2]
        middle = statistics.median(quieter)
        return Reading(middle, statistics.stdev(quieter) / middle)
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

    quick: accept classes up to QUICK_AGREEMENT, with wider bands. spreads: by class, the spread of readings that three
    quarters of its calls stay below. left_out: classes whose fits say nothing, and how far these are off.
    """

    allowed: bool = False
    quick: bool = False
    spreads: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, float] = field(default_factory=dict)

    def readings(
        self, kind: str, bench: Bench, calls: Iterable[KernelCall], keep: Callable[[KernelCall], Kept]
    ) -> list[tuple[Kept, float]]:
        """What `keep` returns for each call of a class, and the call's seconds, measured again while readings disagree.

        The calls themselves are not kept: each holds its inputs, which may fill a GPU. Raises NoisyMachine.
        """
        readings = [(keep(call), steady_reading(partial(bench.readings, call), quick=self.quick)) for call in calls]
        self.record(kind, [reading.spread for _, reading in readings])
        return [(kept, reading.seconds) for kept, reading in readings]

    def record(self, kind: str, spreads: list[float]) -> None:
        """Keeps the spread of a class. Raises NoisyMachine if it is too wide and that is not allowed."""
        self.spreads[kind] = upper_quartile(spreads)
        limit, count = (QUICK_AGREEMENT, QUICK_READINGS) if self.quick else (AGREEMENT, MAX_READINGS)
        if self.spreads[kind] > limit and not self.allowed:
            otherwise = "" if self.quick else f", {QUICK_AGREEMENT:.0%} with --quick"
            raise NoisyMachine(
                f"the machine is too busy: {count} readings of {kind!r} differ by {self.spreads[kind]:.0%}; "
                f"allowed: {limit:.0%}{otherwise}, or any with --allow-noisy; try again once other programs have ended"
            )

    def widened(self, kind: str, rates: Rates) -> Rates:
        """`rates` with a spread that holds the readings' too: both are independent, so their squares add up."""
        both = (rates.spread**2 + self.spreads[kind] ** 2) ** 0.5
        return replace(rates, spread=min(both, MAX_SPREAD)) if self.noisy(kind) else rates

    def fitting(self, classes: Mapping[str, Rates]) -> dict[str, Rates]:
        """The classes whose fits hold. Rates of related ones stand for the others, with wider bands, as priors.

        One that no other can stand for stays, with its wide band, if noise is allowed; else it raises NoisyMachine.
        """
        misfits = {kind: rates.spread for kind, rates in classes.items() if rates.spread > MAX_FIT_SPREAD}
        self.left_out.update({kind: spread for kind, spread in misfits.items() if kind in RELATIVES})
        for kind, spread in misfits.items():
            if kind not in RELATIVES and not self.allowed:
                raise NoisyMachine(
                    f"the machine is too busy: the fit of {kind!r} is off by {spread:.0%}; allowed: "
                    f"{MAX_FIT_SPREAD:.0%}, or any with --allow-noisy; try again once other programs have ended"
                )
        return {kind: rates for kind, rates in classes.items() if kind not in self.left_out}

    def noisy(self, kind: str) -> bool:
        """Whether the readings of a class did not agree."""
        return self.spreads[kind] > AGREEMENT

    def note(self) -> str | None:
        """What a busy machine did to the profile, as a line; None if it did nothing."""
        noisy = [f"{kind} {spread:.0%}" for kind, spread in self.spreads.items() if self.noisy(kind)]
        misfits = [f"{kind} {spread:.0%}" for kind, spread in self.left_out.items()]
        parts = [
            *([f"bands are wider; readings differ: {', '.join(noisy)}"] if noisy else []),
            *([f"related classes stand for those whose fits are off: {', '.join(misfits)}"] if misfits else []),
        ]
        return f"the machine was busy, so {'; '.join(parts)}" if parts else None


def require_plausible(profile: Profile) -> None:
    """Raises NoisyMachine, also where noise is allowed, for a class that neither launches nor computes in real time."""
    for kind, rates in profile.classes.items():
        if rates.compute_utilization > HIGHEST_COMPUTE and rates.launch_s <= SHORTEST_LAUNCH_S:
            raise NoisyMachine(
                f"the machine is too busy: {kind!r} seems to compute at {rates.compute_utilization:.0%} of a large "
                f"matmul's speed, launched in {1e6 * rates.launch_s:.2g} us; "
                f"allowed: {HIGHEST_COMPUTE:.0%}; try again once other programs have ended"
            )


def upper_quartile(values: list[float]) -> float:
    """The value below which three quarters of the values lie."""
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=4, method="inclusive")[2]
