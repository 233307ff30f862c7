"""Estimate of a given plan or preset: its predicted figures and memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ridgeplan.planner.parallelism import choose_degrees
from ridgeplan.planner.prediction import Prediction, predict_question
from ridgeplan.planner.quality import Quality, saved_rows, stated_losses
from ridgeplan.planner.question import Question, SearchOptions, ask
from ridgeplan.planner.render.tables import Bars, Table, plan_row, plan_text
from ridgeplan.planner.render.text import plain_text, prompt_notes
from ridgeplan.planner.search import best_of_preset, named_plan
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.plan.plan import Plan, require
from ridgeplan.roofline.plan.policies.evictions import rounding_text
from ridgeplan.roofline.plan.presets import autoregressive, preset_name
from ridgeplan.roofline.plan.support import missing_execution


@dataclass(frozen=True, repr=False)
class PlanEstimate(Table):
    """A plan for a question: its prediction, which has its speed-up over plain decoding, and that of plain decoding."""

    plan: Plan
    question: Question
    predicted: Prediction
    baseline: Prediction
    notes: tuple[str, ...]

    chart = Bars("tpot_ms", "ms per token", "tpot_low_ms", "tpot_high_ms")
    names = ("plan",)

    @property
    def name(self) -> str:
        """The preset that the plan is, or its axes in a few words."""
        return preset_name(self.plan)

    @property
    def shape(self) -> ModelShape:
        """The model with the weights that the runtime holds."""
        return self.question.as_executed.shape

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within what may be used, and so is what lies on the host."""
        return self.oom_reason is None

    @property
    def oom_reason(self) -> str | None:
        """Which memory is too small; None if the plan fits."""
        return self.question.oom_reason(self.predicted.best.peak_memory_bytes, self.predicted.host_bytes)

    @property
    def losses(self) -> list[str]:
        """What the plan gives up, measured where `ridgeplan quality` was run on it."""
        return stated_losses(self.plan, saved_rows(), self.question.options.backend)

    def table(self) -> list[dict[str, Any]]:
        """Two flat rows: the plan and plain decoding."""
        plain = autoregressive(self.plan.workload)
        return [plan_row(self.plan, self.name, self.predicted), plan_row(plain, "plain decoding", self.baseline)]

    def operations(self) -> list[dict[str, Any]]:
        """A flat row per operation of one prompt's prefill, a draft step and a target step."""
        rows = []
        for op in self.predicted.breakdown:
            bound, share = op.roof(self.question.profile)
            rows.append({**asdict(op), "intensity": op.intensity, "bound": bound, "roof_share": share})
        return rows

    def summary(self) -> str:
        """The headline figures in one line."""
        plain = plain_text(self.shape)
        return plan_text(self.plan, self.name, self.predicted, plain) + ("" if self.fits else ", does not fit")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "plan": self.plan.to_dict(),
            "preset": self.name,
            "predicted": {**self.predicted.to_dict(), "breakdown": self.operations()},
            "baseline": self.baseline.to_dict(),
            "fits": self.fits,
            "memory_limit_bytes": self.question.memory_limit_bytes,
            "not_executable": missing_execution(self.plan, self.shape),
            "losses": self.losses,
            "notes": list(self.notes),
        }


def estimate(
    model: str | ModelShape,
    gpu: str,
    ctx: int | str,
    *,
    preset: str,
    gamma: int | None = None,
    adaptive: bool = False,
    options: SearchOptions | None = None,
    **changes: Any,
) -> PlanEstimate:
    """The figures of one preset, with its speed-up over plain decoding.

    It is taken at the gamma and ratio that are fastest for the question, as `recommend` lists it; with a `gamma`, at
    the other hyperparameters that are published. `adaptive` lets gamma adapt to what is accepted, up to that many.
    Options and errors are those of `recommend`; the quality is not limited.
    """
    question, _ = choose_degrees(
        ask(model, gpu, ctx, options, **changes).with_options(quality=Quality.LOSSY), partial(best_of_preset, preset)
    )
    published = named_plan(preset, question.workload)
    plan = published if gamma is not None else best_of_preset(preset, question.as_executed).plan
    return estimate_plan(with_gamma(plan, gamma, adaptive=adaptive), question)


def estimate_plan(plan: Plan, question: Question) -> PlanEstimate:
    """The figures of a plan, whose workload is the question's, on the question's machine."""
    plans, executed = [autoregressive(plan.workload), plan], question.as_executed
    baseline, predicted = predict_question(plans, executed)
    rounding = rounding_text(plan, question.shape.layers)
    prefill = () if question.engine else prompt_notes(predicted, plan.workload.batch)
    notes = (*question.notes(), *question.limit_notes(), *([rounding] if rounding else ()), *prefill)
    return PlanEstimate(plan, question, predicted.against(baseline), baseline, notes)


def with_gamma(plan: Plan, gamma: int | None, *, adaptive: bool) -> Plan:
    """The plan with another gamma, or one that adapts. Raises PlanError for a plan without drafts."""
    option = f"gamma is {gamma}" if gamma is not None else "adaptive is given"
    changed = gamma is not None or adaptive
    require(plan.speculation.active or not changed, f"{option}; allowed: none, as {preset_name(plan)} drafts nothing")
    speculation = plan.speculation if gamma is None else plan.speculation.with_gamma(gamma)
    return replace(plan, speculation=replace(speculation, adaptive=speculation.adaptive or adaptive))
