"""Comparison of GPUs, models, presets and saved plans, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ridgeplan.planner.feasibility import NothingFits
from ridgeplan.planner.parallelism import choose_degrees
from ridgeplan.planner.plan_file import SavedPlan
from ridgeplan.planner.prediction import Prediction, predict_question
from ridgeplan.planner.quality import Quality
from ridgeplan.planner.question import Question, SearchOptions, ask
from ridgeplan.planner.recommend import recommend
from ridgeplan.planner.render.tables import Bars, Table, plan_row, plan_text
from ridgeplan.planner.render.text import on_host_text
from ridgeplan.planner.search import best_of_preset
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.roofline.plan.presets import autoregressive, divided_name, preset_name
from ridgeplan.roofline.plan.support import Backend

ModelReference = str | ModelShape


@dataclass(frozen=True)
class ComparedPlan:
    """One column: the plan with its prediction, and what it is short of. note: "" where it runs and fits.

    plain_fits: whether plain decoding does, with which speed-ups compare. caveats: of any prediction for its model and
    machine.
    """

    plan: Plan
    name: str
    predicted: Prediction
    memory_limit_bytes: float
    note: str
    plain_fits: bool = True
    caveats: tuple[str, ...] = ()

    def figures(self) -> dict[str, Any]:
        """Flat values, for tables and CSV."""
        row = plan_row(self.plan, self.name, self.predicted)
        return {**row, "plain_fits": self.plain_fits, "note": self.note}


@dataclass(frozen=True, repr=False)
class PlanComparison(Table):
    """Plans in the order asked for, with what did not have an answer: (what, why)."""

    plans: tuple[ComparedPlan, ...]
    missing: tuple[tuple[str, str], ...]

    chart = Bars("tpot_ms", "ms per token", "tpot_low_ms", "tpot_high_ms")
    names = ("model", "gpu", "context", "batch", "plan")

    def summary(self) -> str:
        """How many there are, and which is the fastest."""
        if not self.plans:
            return f"no plan; {len(self.missing)} without an answer"
        best = min(self.plans, key=lambda compared: compared.predicted.best.tpot_ms)
        return f"{len(self.plans)} plans; the fastest: {plan_text(best.plan, best.name, best.predicted)}"

    @property
    def notes(self) -> tuple[str, ...]:
        """The plans' caveats, each once."""
        return tuple(dict.fromkeys(caveat for compared in self.plans for caveat in compared.caveats))

    def table(self) -> list[dict[str, Any]]:
        """A flat row per plan."""
        return [compared.figures() for compared in self.plans]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        missing = [{"what": what, "why": why} for what, why in self.missing]
        return {"plans": self.table(), "missing": missing, "notes": list(self.notes)}


def compare(
    models: ModelReference | Sequence[ModelReference],
    gpus: str | Sequence[str],
    context: int | str,
    *,
    presets: str | Sequence[str] = (),
    options: SearchOptions | None = None,
    **changes: Any,
) -> PlanComparison:
    """Every model on every GPU: each preset at its fastest gamma, or without presets the recommended plan.

    One model, GPU or preset may stand alone instead of in a list. Options are those of `recommend`. What has no answer
    is listed as missing. Raises as `recommend` does, and NothingFits if nothing has an answer.
    """
    options = SearchOptions.of(options, changes)
    names = (presets,) if isinstance(presets, str) else presets
    plans: list[ComparedPlan] = []
    missing: list[tuple[str, str]] = []
    for model in (models,) if isinstance(models, str | ModelShape) else models:
        for gpu in (gpus,) if isinstance(gpus, str) else gpus:
            try:
                plans += _answers(model, gpu, context, names, options)
            except NothingFits as error:
                missing.append((f"{model if isinstance(model, str) else model.name} on {gpu}", str(error)))
    if not plans:
        raise NothingFits("; ".join(why for _, why in missing))
    return PlanComparison(tuple(plans), tuple(missing))


def compare_saved(
    saved: Sequence[SavedPlan], gpus: Sequence[str] = (), options: SearchOptions | None = None, **changes: Any
) -> PlanComparison:
    """Plans of files, each for its own size; on several GPUs if these are named. Of the options memory counts, and the
    backend, if it is another than this package's runtime: else each file's own."""
    options = SearchOptions.of(options, changes)
    return PlanComparison(tuple(_saved(file, gpu, options) for file in saved for gpu in gpus or (None,)), ())


def _answers(
    model: ModelReference, gpu: str, context: int | str, presets: Sequence[str], options: SearchOptions
) -> Iterator[ComparedPlan]:
    question = ask(model, gpu, context, options)
    if presets:
        for name in presets:
            divided, _ = choose_degrees(question, partial(best_of_preset, name))
            yield _compared(best_of_preset(name, divided.as_executed).plan, divided)
    else:
        plan = recommend(model, gpu, context, options).plan
        yield _compared(plan, question.on_gpus(plan.parallel))


def _saved(saved: SavedPlan, gpu: str | None, options: SearchOptions) -> ComparedPlan:
    shape, profile = saved.resolve(gpu=gpu)
    plan, backend = saved.on(shape, profile), options.backend
    chosen = replace(options, quality=Quality.LOSSY, backend=saved.backend if backend is Backend.RIDGEPLAN else backend)
    return _compared(plan, Question.of(shape, profile, plan.workload, chosen))


def _compared(plan: Plan, question: Question) -> ComparedPlan:
    executed = question.as_executed
    baseline, predicted = predict_question([autoregressive(plan.workload), plan], executed)
    oom_reason = executed.oom_reason(predicted.best.peak_memory_bytes, predicted.host_bytes) or ""
    note = oom_reason.partition(":")[0] or executed.constraint_violation(plan) or executed.unsupported(plan) or ""
    if not note and predicted.offloaded_layers:
        note = f"offloaded: {on_host_text(predicted, executed.host_limit_bytes)}"
    caveats = tuple(question.notes())
    name, limit = divided_name(preset_name(plan), plan), executed.memory_limit_bytes
    plain_fits = baseline.best.peak_memory_bytes <= limit
    return ComparedPlan(plan, name, predicted.against(baseline), limit, note, plain_fits, caveats)
