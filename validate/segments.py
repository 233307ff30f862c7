"""Segments of a generation: their times, what is typical of them, and whether the machine was busy with other work.

Another process slows some segments and not others. The median is the time of a quiet machine as long as most segments
are quiet; the spread tells whether they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SEGMENTS = 10  # that a generation is measured in, if it is long enough
FEWEST_FOR_SPREAD = 4  # with fewer, quartiles say nothing
# A quiet machine's segments differ by a few percent; their context grows by less than a tenth in a measurement.
BUSY_SPREAD = 0.2


@dataclass(frozen=True)
class Segment:
    """Some consecutive rounds of a generation, and the seconds that they took together."""

    seconds: float
    rounds: int

    @property
    def round_s(self) -> float:
        """Seconds of one of its rounds."""
        return self.seconds / self.rounds


def median_round_s(segments: Sequence[Segment]) -> float:
    """Seconds of a round: the median over the segments. Raises StatisticsError without any."""
    return statistics.median(segment.round_s for segment in segments)


def spread_of(values: Sequence[float]) -> float | None:
    """Interquartile range over the median; None for too few values to tell."""
    if len(values) < FEWEST_FOR_SPREAD:
        return None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def widest(spreads: Iterable[float | None]) -> float | None:
    """The largest known spread; None if none is known."""
    return max((spread for spread in spreads if spread is not None), default=None)


def is_busy(spread: float | None) -> bool:
    """Whether a spread says that other work slowed the machine; an unknown one does not."""
    return spread is not None and spread > BUSY_SPREAD


def segment_tokens(new_tokens: int) -> int:
    """Tokens of each sequence in a segment of a generation of `new_tokens`."""
    return max(1, math.ceil(new_tokens / SEGMENTS))
