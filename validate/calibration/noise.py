"""Readings of a calibration that agree with each other, and classes of kernels that are too noisy to be used.

Other work on the machine only adds time, so the fastest readings are the true ones, once two of them agree. A quick
calibration goes on where they never do: it takes the quieter half of the readings, and the class's band widens.

On a CPU, other programs may slow all readings of a class alike, and these agree although they are many times too slow.
All classes are therefore read a second time after the others, and a third time those whose two passes disagree. A
quick calibration reads only what it still lacks, and that once, when QUICK_LIMIT_S have passed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ridgeplan.roofline.catalog.profile import MAX_SPREAD, RELATIVES, Profile, Rates

if TYPE_CHECKING:
    from ridgeplan.runtime.progress import OnProgress
    from ridgeplan.validate.calibration.fit import Ceilings, KernelTiming
    from ridgeplan.validate.timing import Bench, KernelCall

Kept = TypeVar("Kept")
Late = Callable[[], bool]  # whether there is no time to read again
AGREEMENT = 0.1  # largest relative distance of two readings that agree
QUICK_AGREEMENT = 0.5  # of a quick calibration, whose bands widen by what is beyond AGREEMENT
MAX_READINGS, QUICK_READINGS = 6, 12
QUICK_LIMIT_S = 90.0  # of a quick calibration's passes; an undisturbed CPU takes 15 to 20 s
SHORTEST_LAUNCH_S = 5e-7  # that any call takes; the quickest class of an H200 takes 0.7 us
ONE_PASS_SPREAD = 1.0  # at least, of a class that was read once: other programs may have slowed all of its readings
MAX_FIT_SPREAD = 0.75  # relative error of a class's fit beyond which its rates say nothing
CPU_PASSES = 3  # over the classes of a CPU, at most
# Of the time at this machine's bandwidth and FLOP/s, with a launch of LONG_LAUNCH_S. The best call of an undisturbed
# CPU's slowest class, progressive attention, takes 6 times as long; other programs made some take 100 times as long.
# Whole rounds do not scale most classes: they run no selection, no sampling and one width of heads.
MAX_SLOWDOWN = 20.0
LONG_LAUNCH_S = 1e-4
HIGHEST_COMPUTE = 2.0  # of the FLOP/s of a large matmul; more than that, the matmul was slowed by other programs


class NoisyMachine(ValueError):
    """Other work slows the machine so much that its kernels cannot be measured."""


@dataclass(frozen=True)
class Reading:
    """Seconds of a call, and how far its readings are apart, relative to them."""

    seconds: float
    spread: float


def in_time() -> bool:
    """Never late."""
    return False


def steady_reading(read: Callable[[], Iterable[float]], *, quick: bool = False, late: Late = in_time) -> Reading:
    """Reads, a few readings at once, until the two fastest agree or there are MAX_READINGS. The fastest counts.

    The spread is the relative distance of the two fastest. quick: there are up to QUICK_READINGS, and if no two agree,
    the median of the quieter half counts, with the half's relative standard deviation as its spread. late: whether
    there is no time to read again.
    """
    readings = list(read())
    while not late() and not agree(readings) and len(readings) < (QUICK_READINGS if quick else MAX_READINGS):
        readings.extend(read())
    if quick and not agree(readings) and len(readings) >= QUICK_READINGS:
        quieter = sorted(readings)[: len(readings) // 2]
        middle = statistics.median(quieter)
        return Reading(middle, statistics.stdev(quieter) / middle)
    return Reading(min(readings), distance(readings))


def fastest_pass(passes: Sequence[Reading]) -> Reading:
    """The fastest of readings at different times. Its spread is at least its distance to the second fastest.

    No more of that than QUICK_AGREEMENT counts: a pass many times as slow was disturbed and says little of the fastest.
    """
    fastest = min(passes, key=lambda reading: reading.seconds)
    between = distance(reading.seconds for reading in passes) if len(passes) > 1 else 0.0
    return replace(fastest, spread=max(fastest.spread, min(between, QUICK_AGREEMENT)))


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
    quarters of its calls stay below. left_out: classes that related ones stand for, and why: their fits say nothing, or
    their best calls exceed MAX_SLOWDOWN. read_once: classes for whose second pass a quick calibration had no time.
    clock: seconds since any moment.
    """

    allowed: bool = False
    quick: bool = False
    spreads: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    read_once: list[str] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic

    @property
    def limit(self) -> float:
        """Largest spread of a class that is accepted where noise is not allowed."""
        return QUICK_AGREEMENT if self.quick else AGREEMENT

    def by_kind(
        self,
        bench: Bench,
        kinds: Sequence[str],
        classes: Callable[[], Mapping[str, Iterable[KernelCall]]],
        keep: Callable[[KernelCall], Kept],
        on_progress: OnProgress,
    ) -> dict[str, list[tuple[Kept, float]]]:
        """Of each class of `kinds`, what `keep` returns for each call, and the call's seconds in its fastest pass.

        classes: the calls of all classes, made anew for each pass. Raises NoisyMachine for a class whose passes, or the
        readings of whose fastest pass, still disagree after the last pass.
        """
        passes: dict[str, list[list[tuple[Kept, Reading]]]] = {kind: [] for kind in kinds}
        samples: dict[str, list[tuple[Kept, float]]] = {}
        count, start = 1 if bench.device.type == "cuda" else CPU_PASSES, self.clock()

        def late() -> bool:
            return self.quick and self.clock() - start > QUICK_LIMIT_S

        for number in range(1, count + 1):
            calls, total = classes(), max(number, min(count, 2)) * len(kinds)
            for done, kind in enumerate([kind for kind in kinds if kind not in samples], (number - 1) * len(kinds)):
                if number == 1 or not late():
                    on_progress(kind if number == 1 else f"{kind}, pass {number}", done, total)
                    passes[kind].append(self.readings(bench, calls[kind], keep, late))
                fastest = [
                    (row[0][0], fastest_pass([each for _, each in row])) for row in zip(*passes[kind], strict=True)
                ]
                spreads = [reading.spread for _, reading in fastest]
                agreed = len(passes[kind]) > 1 and upper_quartile(spreads) < self.limit
                if agreed or number == count or late():
                    if len(passes[kind]) < min(count, 2):
                        self.read_once.append(kind)
                    self.record(kind, spreads)
                    samples[kind] = [(kept, reading.seconds) for kept, reading in fastest]
        return {kind: samples[kind] for kind in kinds}

    def readings(
        self, bench: Bench, calls: Iterable[KernelCall], keep: Callable[[KernelCall], Kept], late: Late = in_time
    ) -> list[tuple[Kept, Reading]]:
        """What `keep` returns for each call of a class, and the call's seconds, measured again while readings disagree.

        late: whether there is no time to measure again. The calls themselves are not kept: each holds its inputs, which
        may fill a GPU.
        """
        return [
            (keep(call), steady_reading(partial(bench.readings, call), quick=self.quick, late=late)) for call in calls
        ]

    def record(self, kind: str, spreads: list[float]) -> None:
        """Keeps the spread of a class. Raises NoisyMachine if it is too wide and that is not allowed."""
        self.spreads[kind] = upper_quartile(spreads)
        if self.spreads[kind] > self.limit and not self.allowed:
            otherwise = "" if self.quick else f", {QUICK_AGREEMENT:.0%} with --quick"
            raise NoisyMachine(
                f"the machine is too busy: readings of {kind!r} differ by {self.spreads[kind]:.0%}; allowed: "
                f"{self.limit:.0%}{otherwise}, or any with --allow-noisy; try again once other programs have ended"
            )

    def widened(self, kind: str, rates: Rates) -> Rates:
        """`rates` with a spread that holds the readings' too: both are independent, so their squares add up."""
        if not self.noisy(kind):
            return rates
        noise = max(self.spreads[kind], ONE_PASS_SPREAD if kind in self.read_once else 0.0)
        return replace(rates, spread=min((rates.spread**2 + noise**2) ** 0.5, MAX_SPREAD))

    def fitting(self, classes: Mapping[str, Rates], slowdowns: Mapping[str, float]) -> dict[str, Rates]:
        """The classes whose fits hold. Rates of related ones stand for the others, with wider bands, as priors.

        slowdowns: of the classes' best calls. A class that no other can stand for stays, with its wide band, if noise
        is allowed; else it raises NoisyMachine.
        """
        self.left_out.clear()
        for kind, rates in classes.items():
            if rates.spread > MAX_FIT_SPREAD:
                problem, limit = f"its fit is off by {rates.spread:.0%}", f"{MAX_FIT_SPREAD:.0%}"
            elif slowdowns.get(kind, 0.0) > MAX_SLOWDOWN:
                problem, limit = f"{slowdowns[kind]:.0f} times slower than the machine", f"{MAX_SLOWDOWN:.0f} times"
            else:
                continue
            if kind in RELATIVES:
                self.left_out[kind] = problem
            elif not self.allowed:
                raise NoisyMachine(
                    f"the machine is too busy: {kind!r} ({problem}; allowed: {limit}, or any with --allow-noisy); "
                    "try again once other programs have ended"
                )
        return {kind: rates for kind, rates in classes.items() if kind not in self.left_out}

    def noisy(self, kind: str) -> bool:
        """Whether the readings of a class did not agree, or were not repeated."""
        return self.spreads[kind] > AGREEMENT or kind in self.read_once

    def note(self) -> str | None:
        """What disturbed the calibration, and what that did to the profile, as a line; None if nothing did."""
        noisy = [spread for spread in self.spreads.values() if spread > AGREEMENT]
        count, parts = len(self.spreads), []
        if noisy:
            differing = f"readings of {len(noisy)} of {count} kernel classes differ by up to {max(noisy):.0%}"
            parts.append(f"{differing}, so their bands are wider")
        if self.read_once:
            parts.append(f"{len(self.read_once)} of {count} classes were read only once in {QUICK_LIMIT_S:.0f} s")
        if self.left_out:
            replaced = ", ".join(f"{kind} ({problem})" for kind, problem in self.left_out.items())
            parts.append(f"related classes stand for {replaced}")
        cause = "other programs, or a virtual machine's neighbours, slowed readings"
        return f"{cause}: {'; '.join(parts)}" if parts else None


def require_plausible(profile: Profile) -> None:
    """Raises NoisyMachine, also where noise is allowed, for a class that neither launches nor computes in real time."""
    for kind, rates in profile.classes.items():
        if rates.compute_utilization > HIGHEST_COMPUTE and rates.launch_s <= SHORTEST_LAUNCH_S:
            raise NoisyMachine(
                f"the machine is too busy: {kind!r} seems to compute at {rates.compute_utilization:.0%} of a large "
                f"matmul's speed, launched in {1e6 * rates.launch_s:.2g} us; "
                f"allowed: {HIGHEST_COMPUTE:.0%}; try again once other programs have ended"
            )


def slowdown(samples: Sequence[KernelTiming], ceilings: Ceilings) -> float:
    """How many times longer a class's best call takes than the ceilings and a long launch allow."""
    peaks = ceilings.bandwidth_bytes_per_s, ceilings.compute_flops
    return min(
        sample.seconds / (LONG_LAUNCH_S + max(sample.cost.bytes / peaks[0], sample.cost.flops / peaks[1]))
        for sample in samples
    )


def upper_quartile(values: list[float]) -> float:
    """The value below which three quarters of the values lie."""
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=4, method="inclusive")[2]
