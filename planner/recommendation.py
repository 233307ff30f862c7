"""The answer of `recommend`: the plan, its prediction, and why the others lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ridgeplan.planner.parallelism import DegreeChoice, degree_lines
from ridgeplan.planner.prediction import Prediction
from ridgeplan.planner.queries.drafter_range import DrafterRange
from ridgeplan.planner.render.tables import Bars, Table, plan_row, plan_text
from ridgeplan.planner.render.text import on_host_text, plain_text
from ridgeplan.planner.render.verdict import reasons
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.roofline.plan.support import Backend

READING_TPOT_MS = 200.0  # 238 words a minute (Brysbaert 2019) at 1.3 tokens a word


@dataclass(frozen=True)
class Fix:
    """A question near the asked one that has a better answer: arguments of `recommend`, and what changes in words."""

    changes: Mapping[str, float | str | None]
    text: str


@dataclass(frozen=True)
class Alternative:
    """The best plan of another family, and why it was not chosen."""

    preset: str
    plan: Plan
    predicted: Prediction
    rejected: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({plan_text(self.plan, self.preset, self.predicted)}; {self.rejected})"

    def row(self) -> dict[str, Any]:
        """Flat values for tables."""
        return {**plan_row(self.plan, self.preset, self.predicted), "verdict": self.rejected}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "preset": self.preset,
            "plan": self.plan.to_dict(),
            "predicted": self.predicted.to_dict(),
            "rejected": self.rejected,
        }


@dataclass(frozen=True, repr=False)
class Recommendation(Table):
    """The best plan that runs here with its prediction, plain decoding for comparison, and the ranked alternatives.

    best_estimated: the fastest plan that is only estimated; None where that is the plan itself, or one that runs as
    fast. drafter_range: contexts at which the plan's drafter pays, if it has one. adaptive: the plan with a gamma
    that adapts to what drafts are accepted; None where it drafts nothing or more memory does not fit. model_runs:
    whether the runtime executes the model at all; if not, every plan is only estimated. backend: what is to execute
    the plan. fits_device: whether any plan fits the device alone; on_device: where none does, what would. degrees:
    of several GPUs, the chosen ones first. given: what to call the plan where the user gave it; empty where it was
    searched.
    """

    shape: ModelShape
    plan: Plan
    name: str
    predicted: Prediction
    baseline: Prediction
    best_estimated: Alternative | None
    alternatives: tuple[Alternative, ...]
    losses: tuple[str, ...]
    notes: tuple[str, ...]
    memory_limit_bytes: float
    host_limit_bytes: float
    model_runs: bool
    backend: Backend = Backend.RIDGEPLAN
    drafter_range: DrafterRange | None = None
    adaptive: Plan | None = None
    fits_device: bool = True
    on_device: tuple[Fix, ...] = ()
    degrees: tuple[DegreeChoice, ...] = ()
    given: str = ""

    chart = Bars("tpot_ms", "ms per token", "tpot_low_ms", "tpot_high_ms")
    names = ("plan", "gamma")

    def table(self) -> list[dict[str, Any]]:
        """A flat row per plan: the recommended one, the fastest estimated one, and all others with why they lost."""
        best = self.best_estimated
        others = [other for other in self.alternatives if best is None or other.plan != best.plan]
        return [
            {**plan_row(self.plan, self.name, self.predicted), "verdict": self.verdict},
            *(other.row() for other in ([best] if best else []) + others),
        ]

    def summary(self) -> str:
        """The recommended plan in one line."""
        headline = plan_text(self.plan, self.name, self.predicted, plain_text(self.shape))
        return f"{headline}; {len(self.alternatives)} alternatives"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: plan, prediction, baseline, alternatives, losses and notes."""
        return {
            "plan": self.plan.to_dict(),
            "preset": self.name,
            "predicted": self.predicted.to_dict(),
            "baseline": self.baseline.to_dict(),
            "best_estimated": self.best_estimated.to_dict() if self.best_estimated else None,
            "alternatives": [alternative.to_dict() for alternative in self.alternatives],
            "losses": list(self.losses),
            "notes": list(self.notes),
            "memory_limit_bytes": self.memory_limit_bytes,
            "host_limit_bytes": self.host_limit_bytes,
            "warning": self.warning,
            "fits_device": self.fits_device,
            "on_device": [asdict(fix) for fix in self.on_device],
            "model_runs": self.model_runs,
            "backend": self.backend,
            "drafter_loses_from": self.drafter_range and self.drafter_range.loses_from,
            "adaptive": self.adaptive.to_dict() if self.adaptive else None,
            **({"degrees": [choice.to_dict() for choice in self.degrees]} if self.degrees else {}),
        }

    def explain(self) -> str:
        """Why this plan: the bottleneck, the round's arithmetic, memory, quality, and the nearest alternatives."""
        workload = self.plan.workload
        lines = [f"{what}: {text}" for what, text in reasons(self)]
        lines += [f"note: {note}" for note in (self.warning, *self.notes) if note]
        lines += [f"all on the GPU: {', or '.join(fix.text for fix in self.on_device)}"] if self.on_device else []
        lines += [*(f"degrees: {line}" for line in degree_lines(self.degrees)),
                  *(f"rejected: {other.preset}, {other.rejected}" for other in self.alternatives[:5])]  # fmt: skip
        size = f"{workload.context} tokens of context, batch {workload.batch}"
        return "\n  ".join((f"{workload.model} on {workload.devices}, {size}:", *lines))

    @property
    def warning(self) -> str | None:
        """Where the plan is no plain success: nothing fits the device alone, or it is slower than reading speed."""
        slow = self.predicted.best.tpot_ms > READING_TPOT_MS
        if self.fits_device:
            return "Slower than reading speed" if slow else None
        text = f"Does not fit the GPU alone: {on_host_text(self.predicted, self.host_limit_bytes)}"
        return f"{text}; slower than reading speed" if slow else text

    @property
    def verdict(self) -> str:
        """What kind of answer the plan is; one that needs the host, is slow or does not run is not recommended."""
        if self.given:
            return self.given
        if self.warning:
            return "fits, but is slow" if self.fits_device else "fits only with offloading"
        return "recommended" if self.model_runs else "best estimate"

    @property
    def baseline_fits(self) -> bool:
        """Whether plain decoding fits the device."""
        return self.baseline.best.peak_memory_bytes <= self.memory_limit_bytes

    @property
    def baseline_text(self) -> str:
        """What speed-ups compare with; marked where it does not fit, so that its time is hypothetical."""
        return plain_text(self.shape) + ("" if self.baseline_fits else ", which does not fit")

    @property
    def drafter_text(self) -> str:
        """The drafter, how many tokens it proposes at a time, and where it pays."""
        drafter = self.plan.speculation.drafter
        count = f"{drafter.depth} token{'s' if drafter.depth > 1 else ''} at a time"
        return f"{drafter.kind}, {count}: {self.drafter_range}"
