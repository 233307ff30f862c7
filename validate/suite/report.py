"""The suite's report: rows of predicted and measured figures, their file, and their summary against targets."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ridgeplan.roofline.catalog import validation as check
from ridgeplan.roofline.catalog.validation import Checked, brief
from ridgeplan.roofline.round import tokens_per_round
from ridgeplan.validate.result_file import SCHEMA, ResultFile

SECTIONS = ("kernels", "steps", "outputs", "generations", "regret")
SUITES = ("smoke", "full")
UNITS = ("us", "ms", "bytes", "")  # microseconds, milliseconds, bytes, or a plain number
LARGEST = 1e18


class SuiteError(ValueError):
    """A file of results that is missing, damaged, or of another suite or machine."""


@dataclass(frozen=True, kw_only=True)
class SuiteRow(Checked):
    """One figure. kind: the measured quantity; case: its sizes; source: where the prediction comes from."""

    error = SuiteError
    section: str = check.one_of(SECTIONS)
    kind: str = check.text()
    model: str = check.text("")
    case: str = check.text()
    unit: str = check.one_of(UNITS)
    predicted: float = check.number(0, LARGEST)
    measured: float = check.number(1e-12, LARGEST)
    source: str = check.text()

    @property
    def relative_error(self) -> float:
        """Signed; positive if the prediction was too high."""
        return self.predicted / self.measured - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with the error."""
        return {**asdict(self), "relative_error": self.relative_error}


@dataclass(frozen=True, kw_only=True)
class RegretRow(Checked):
    """One workload: time per token of the recommended plan and of the best measured candidate.

    candidates: each with `plan`, `gamma`, `acceptance`, `predicted_ms` and `measured_ms` per token, both at the
    predicted acceptance; and `measured_acceptance`, of a real model's drafts of that kind, where it is known.
    """

    error = SuiteError
    model: str = check.text()
    context: int = check.whole(1, 1 << 24)
    batch: int = check.whole(1, 4096)
    recommended: str = check.text()
    recommended_ms: float = check.number(1e-9, LARGEST)
    best: str = check.text()
    best_ms: float = check.number(1e-9, LARGEST)
    left_out: int = check.whole(0, 10**6, default=0)  # candidates that were near the best but not measured
    candidates: tuple[Mapping[str, Any], ...] = check.tables()

    @property
    def regret(self) -> float:
        """How much slower the recommended plan is than the best candidate, relative to it."""
        return self.recommended_ms / self.best_ms - 1

    @property
    def regret_at_measured(self) -> float | None:
        """The same with every round's tokens at the measured acceptance; None where the recommended plan has none.

        Candidates without a measured acceptance are left out.
        """
        times = {
            (item.get("plan"), item["gamma"], item["measured_ms"]): _ms_at_measured(item)
            for item in self.candidates
            if all(isinstance(item.get(name), int | float) for name in ("measured_acceptance", *_OF_A_ROUND))
        }
        recommended = [ms for (*_, measured_ms), ms in times.items() if measured_ms == self.recommended_ms]
        return recommended[0] / min(times.values()) - 1 if recommended else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with the regret."""
        return {**asdict(self), "regret": self.regret}


_OF_A_ROUND = ("acceptance", "gamma", "measured_ms")


def _ms_at_measured(candidate: Mapping[str, Any]) -> float:
    """A candidate's measured time per token with the tokens of a round at the measured acceptance."""
    predicted, measured = (
        tokens_per_round(candidate[kind], candidate["gamma"]) for kind in ("acceptance", "measured_acceptance")
    )
    return float(candidate["measured_ms"] * predicted / measured)


@dataclass(frozen=True, kw_only=True)
class SuiteReport(ResultFile):
    """Results of one machine, with software and methods. skipped: cases that did not run, with the reason."""

    error = SuiteError
    title, advice = "report", "run `ridgeplan validate --suite` again"
    derived: ClassVar = {"rows": "relative_error", "regret": "regret"}
    suite: str = check.one_of(SUITES)
    device: str = check.text()
    date: str = check.text()
    software: Mapping[str, str] = check.texts_by_name()
    profile: str = check.text()  # the calibration that the predictions use
    methods: Mapping[str, str] = check.texts_by_name(dict)  # by section
    rows: tuple[SuiteRow, ...] = check.parts(SuiteRow)
    regret: tuple[RegretRow, ...] = check.parts(RegretRow)
    skipped: tuple[str, ...] = check.texts()

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections that were run."""
        return tuple(section for section in SECTIONS if section in self.methods)

    def worst_rows(self, count: int) -> list[SuiteRow]:
        """The rows with the largest absolute errors, the largest first."""
        return sorted(self.rows, key=lambda row: -abs(row.relative_error))[:count]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, which `from_json` accepts."""
        head = {name: value for name, value in vars(self).items() if name not in ("rows", "regret")}
        rows, regret = ([row.to_dict() for row in items] for items in (self.rows, self.regret))
        return {"schema": SCHEMA, **head, "rows": rows, "regret": regret}

    def to_json(self) -> str:
        """JSON text that `from_json` reads back to an equal report."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def merged_into(self, earlier: SuiteReport) -> SuiteReport:
        """`earlier` with this report's sections in the place of its own.

        Raises SuiteError for a report of another suite, device, profile or software, whose figures do not belong
        beside these.
        """
        for name in ("suite", "device", "profile", "software"):
            ours, theirs = getattr(self, name), getattr(earlier, name)
            if ours != theirs:
                raise SuiteError(f"its {name} is {brief(theirs)}, not {brief(ours)}; allowed: the same, or a new file")
        kept = [row for row in earlier.rows if row.section not in self.methods]
        return replace(
            self,
            methods={**earlier.methods, **self.methods},
            rows=(*kept, *self.rows),
            regret=self.regret if "regret" in self.methods else earlier.regret,
            skipped=tuple(dict.fromkeys((*earlier.skipped, *self.skipped))),
        )


AT_MEASURED, AT_ANOTHER = "TPOT at the measured acceptance", "TPOT at another text's acceptance"
PEAK = "peak memory"
REGRET_AT_MEASURED = "regret at measured acceptance"


@dataclass(frozen=True)
class Limits:
    """Largest absolute errors allowed; None for no limit."""

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
        medians, p90 = (statistics.median(errors), statistics.median(sizes)), float(np.quantile(sizes, 0.9))
        return cls(name, len(errors), *medians, p90, max(sizes), statistics.fmean(sizes))

    @property
    def limits(self) -> Limits:
        """The targets of these rows; without limits if they have none."""
        return TARGETS.get(self.name, Limits())

    @property
    def met(self) -> bool | None:
        """Whether all targets are met; None without any."""
        limits = {name: limit for name, limit in asdict(self.limits).items() if limit is not None}
        return all(getattr(self, name) <= limit for name, limit in limits.items()) if limits else None

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
        at_measured = [row.regret_at_measured for row in report.regret if row.regret_at_measured is not None]
        if at_measured:
            yield Summary.of(REGRET_AT_MEASURED, at_measured)
