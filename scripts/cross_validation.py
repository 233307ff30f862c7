"""Cross-validation of the regression: rows predicted without their model, or without their context.

A band must hold 90% of what is measured of a model or at a context that no row is of. The regression's own deviations
say how bands compare with one another, but not how wide they are, as errors are not normal and few models are known.
So they are multiplied by a quantile of the errors of rows that were left out (conformal prediction: Vovk et al. 2005;
Lei et al. 2018, section 5.2).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ridgeplan.planner.acceptance.model import band_family, observation, spans_of, subject
from ridgeplan.planner.acceptance.regression import MIN_DISAGREEMENT, fit
from ridgeplan.planner.acceptance.rows import SPARSE_SELECTIONS, AcceptanceRow, core_name, differences

COVERAGE = 0.9
CONTEXT_ENDS = (8192, 32768)  # rows are left out by context in three groups: up to, between and beyond these


@dataclass(frozen=True)
class HeldOut:
    """A row, the acceptance predicted without its group, and the deviation of its log disagreement."""

    row: AcceptanceRow
    predicted: float
    deviation: float

    @property
    def error(self) -> float:
        """Predicted minus measured acceptance: positive where the prediction is optimistic."""
        return self.predicted - self.row.acceptance

    @property
    def family(self) -> str:
        """The family of its band."""
        return band_family(differences(self.row.draft))

    @property
    def policy(self) -> str:
        """The selection of the draft, whatever bits it has; else its bits."""
        return next((name for name in differences(self.row.draft) if name in SPARSE_SELECTIONS), self.row.draft)

    @property
    def score(self) -> float:
        """The error of the log disagreement, in deviations."""
        measured = max(1 - self.row.acceptance, MIN_DISAGREEMENT)
        return abs(math.log(measured / (1 - self.predicted))) / self.deviation

    def band(self, bands: Mapping[str, float]) -> tuple[float, float]:
        """The low and the high end of the acceptance."""
        width = bands[self.family] * self.deviation
        low, high = (1 - min(1.0, (1 - self.predicted) * math.exp(end)) for end in (width, -width))
        return low, high

    def within(self, bands: Mapping[str, float]) -> bool:
        """Whether the band holds the row."""
        return self.score <= bands[self.family]


def model_group(row: AcceptanceRow) -> Hashable:
    """The row's model, in whatever tuning."""
    return core_name(row.model)


def context_group(row: AcceptanceRow) -> Hashable:
    """Short, medium or long contexts."""
    return bisect_left(CONTEXT_ENDS, row.context)


def leave_out(rows: Sequence[AcceptanceRow], group_of: Callable[[AcceptanceRow], Hashable]) -> list[HeldOut]:
    """Predictions of the rows of each group from those of all others."""
    groups = dict.fromkeys(map(group_of, rows))
    return [
        held
        for group in groups
        for held in predicted_from(
            [row for row in rows if group_of(row) != group], [row for row in rows if group_of(row) == group]
        )
    ]


def predicted_from(rows: Sequence[AcceptanceRow], held_out: Iterable[AcceptanceRow]) -> Iterator[HeldOut]:
    """Predictions of held-out rows from `rows`, for a text that is not known."""
    fitted = fit([observation(row) for row in rows])
    for row in held_out:
        about = replace(subject(row), text="", spans=spans_of(rows, row.model))
        predicted = 1 - float(fitted.disagreement(about.parts))
        yield HeldOut(row, predicted, fitted.deviation(about.parts, "measured"))


def conformal_bands(held: Iterable[HeldOut]) -> dict[str, float]:
    """The deviations within which `COVERAGE` of the rows lie, by family of bands."""
    scores: dict[str, list[float]] = {}
    for item in held:
        scores.setdefault(item.family, []).append(item.score)
    return {family: float(np.quantile(each, COVERAGE, method="higher")) for family, each in sorted(scores.items())}
