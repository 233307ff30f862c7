"""The report in a few lines: errors and regret against their targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ridgeplan.validate.suite.results import SuiteReport

AT_MEASURED, AT_ANOTHER = "TPOT at the measured acceptance", "TPOT at another text's acceptance"
PEAK = "peak memory"


@dataclass(frozen=True)
class Limits:
    """Largest absolute errors allowed; None where nothing is asked."""

    median: float | None = None
    p90: float | None = None
    worst: float | None = None
    mean: float | None = None


TARGETS = {
    "kernels": Limits(median=0.04, p90=0.10),
    "steps": Limits(median=0.025, p90=0.06, worst=0.12),
    AT_MEASURED: Limits(median=0.03, p90=0.07),
    AT_ANOTHER: Limits(median=0.06),
    PEAK: Limits(median=0.01, worst=0.03),
    "regret": Limits(mean=0.03, worst=0.10),
}


@dataclass(frozen=True)
class Summary:
    """Errors of some rows: the signed median, then of their absolute values median, p90, worst and mean."""

    name: str
    count: int
    signed_median: float
    median: float
    p90: float
    worst: float
    mean: float

    @classmethod
    def of(cls, name: str, errors: Sequence[float]) -> Summary:
        """The summary of one or more signed errors."""
        sizes = [abs(error) for error in errors]
        return cls(
            name,
            len(errors),
            statistics.median(errors),
            statistics.median(sizes),
            float(np.quantile(sizes, 0.9)),
            max(sizes),
            statistics.fmean(sizes),
        )

    @property
    def limits(self) -> Limits:
        """The targets of these rows; without any where nothing is asked of them."""
        return TARGETS.get(self.name, Limits())

    @property
    def met(self) -> bool | None:
        """Whether all targets are met; None without any."""
        asked = {name: limit for name, limit in asdict(self.limits).items() if limit is not None}
        return all(getattr(self, name) <= limit for name, limit in asked.items()) if asked else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "limits": asdict(self.limits), "met": self.met}


def summaries(report: SuiteReport) -> Iterator[Summary]:
    """Of all kernels and of all steps, of each kind of figure in every section, and of regret."""
    for section in report.sections:
        rows = [row for row in report.rows if row.section == section]
        if section in TARGETS and rows:
            yield Summary.of(section, [row.relative_error for row in rows])
        for kind in dict.fromkeys(row.kind for row in rows):
            yield Summary.of(kind, [row.relative_error for row in rows if row.kind == kind])
    if report.regret:
        yield Summary.of("regret", [row.regret for row in report.regret])
