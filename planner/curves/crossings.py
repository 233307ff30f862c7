"""Where one curve crosses another, such as the context from which one plan is faster than another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

TINY = 1e-12


@dataclass(frozen=True)
class Crossing:
    """A point where the lower of two curves changes: below `x` it is `before`, above it is `after`."""

    x: float
    y: float
    before: str
    after: str


def crossings(x: Sequence[float], curves: Mapping[str, np.ndarray]) -> list[Crossing]:
    """All crossings of named curves over common x, both positive and interpolated on log scales; NaN is no value."""
    found = [one for pair in combinations(curves.items(), 2) for one in _of_pair(np.log(x), *pair)]
    return sorted(found, key=lambda one: one.x)


def _of_pair(log_x: np.ndarray, one: tuple[str, np.ndarray], other: tuple[str, np.ndarray]) -> list[Crossing]:
    (name, first), (other_name, second) = ((label, np.log(values)) for label, values in (one, other))
    gap = first - second
    gap = np.where(gap == 0, TINY, gap)  # curves that meet at a point are apart on both sides of it
    found = []
    for index in np.flatnonzero(gap[:-1] * gap[1:] < 0):
        share = gap[index] / (gap[index] - gap[index + 1])
        x, y = (np.exp(values[index] + share * np.diff(values)[index]) for values in (log_x, first))
        before, after = (name, other_name) if gap[index] < 0 else (other_name, name)
        found.append(Crossing(float(x), float(y), before, after))
    return found
