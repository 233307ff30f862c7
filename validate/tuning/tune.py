"""Tuning of a plan with a model and a text: a generation for every ratio, then the steps on what was counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ridgeplan.planner.acceptance import AcceptanceRow
from ridgeplan.planner.plan import Plan, require
from ridgeplan.planner.round_costs import round_costs
from ridgeplan.planner.search_space import RATIOS
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.speculation import MAX_GAMMA, RoundCosts
from ridgeplan.runtime import load
from ridgeplan.runtime.engine import Engine
from ridgeplan.validate.acceptance import named_shape
from ridgeplan.validate.progress import Progress, silent
from ridgeplan.validate.prompts import prompt_batch
from ridgeplan.validate.tuning.measured import MeasuredDrafts
from ridgeplan.validate.tuning.steps import Candidate, Landscape, Step, tune_steps


@dataclass(frozen=True)
class TuningText:
    """What is continued: a text, its name in rows, and how many tokens are generated after each prompt of it.

    calibration: token ids that 4-bit weights are fitted to.
    """

    text: str
    name: str
    tokens: int
    calibration: Sequence[int] | None = None


@dataclass(frozen=True)
class Tuning:
    """The tuned plan, how it was found, plain decoding's time, and the rows of acceptance that were measured."""

    plan: Plan
    steps: tuple[Step, ...]
    plain_ms: float
    rows: tuple[AcceptanceRow, ...]

    @property
    def chosen(self) -> Candidate:
        """The last step's choice."""
        return self.steps[-1].chosen

    @property
    def speedup(self) -> float:
        """Over a plain step of the same target."""
        return self.plain_ms / self.chosen.tpot_ms


def tune(
    plan: Plan,
    model: str,
    passage: TuningText,
    profile: Profile,
    largest: int,
    device: str | None = None,
    on_progress: Progress = silent,
) -> Tuning:
    """The plan with the sparse ratio and the gamma that are fastest for a text, at the profile's rates.

    model, device: as for `ridgeplan.runtime.load`. largest: gamma of the measurement, and the largest that is
    considered. An adaptive plan stays adaptive, with the tuned gamma as its largest.
    Raises PlanError for a plan without drafts, PromptError for a text that is too short, and what `load` raises.
    """
    require(plan.speculation.active, "the plan has gamma 0; allowed: a plan that drafts")
    require(1 <= largest <= MAX_GAMMA, f"the largest gamma is {largest}; allowed: 1 to {MAX_GAMMA}")
    plans = list(_measured_plans(plan, largest, passage.tokens))
    found, rows, shape = _measure(plans, model, passage, device, on_progress)

    @cache
    def costs(ratio: float) -> RoundCosts:
        return round_costs(_with(plan, ratio=ratio, gamma=largest, adaptive=False), shape, profile, range(largest + 1))

    known = Landscape(
        acceptance_at={one.ratio: one.acceptance_at for one in found},
        round_s=lambda ratio, gamma: costs(ratio).seconds[gamma],
        group=plan.kv.group if plan.kv.format.buffered else None,
    )
    steps = tune_steps(known, range(1, largest + 1))
    best = steps[-1].chosen
    tuned = _with(plan, ratio=best.ratio, gamma=best.gamma)
    return Tuning(tuned, steps, 1e3 * costs(best.ratio).plain_s, tuple(rows))


def _measured_plans(plan: Plan, largest: int, tokens: int) -> Iterator[Plan]:
    """The plan at every ratio, with rounds of `largest` drafts that generate `tokens` tokens."""
    for ratio in _ratios(plan, tokens):
        fixed = _with(plan, ratio=ratio, gamma=largest, adaptive=False)
        yield replace(fixed, workload=replace(plan.workload, new_tokens=tokens))


def _ratios(plan: Plan, tokens: int) -> list[float]:
    """Ascending; of those that read the selection's fewest tokens however long a sequence gets, only the largest."""
    if not plan.speculation.sparse:
        return [1.0]
    ratios = sorted({*RATIOS, plan.speculation.ratio})
    longest, least = plan.workload.context + tokens, plan.speculation.selection.least_tokens
    alike = sum(ratio * longest <= least for ratio in ratios)
    return ratios[max(alike - 1, 0) :]


def _with(plan: Plan, ratio: float, **changes: Any) -> Plan:
    speculation = plan.speculation.with_ratio(ratio) if plan.speculation.sparse else plan.speculation
    return replace(plan, speculation=replace(speculation, **changes))


def _measure(
    plans: Sequence[Plan], model: str, passage: TuningText, device: str | None, on_progress: Progress
) -> tuple[list[MeasuredDrafts], list[AcceptanceRow], ModelShape]:
    """Counts and rows of every plan, and the model's shape as it runs. Weights are loaded and quantized once."""
    engine: Engine | None = None
    found: list[MeasuredDrafts] = []
    rows: list[AcceptanceRow] = []
    name = named_shape(model).name
    for number, plan in enumerate(plans):
        on_progress(f"ratio {plan.speculation.ratio:g}", number, len(plans))
        weights, drafts = (engine.weights, engine.draft_weights) if engine else (None, None)
        engine = load(
            plan, model, device=device, weights=weights, draft_weights=drafts, calibration=passage.calibration
        )
        shape = replace(engine.config.shape, name=name)
        prompts = prompt_batch(engine.tokenizer, plan.workload.context, plan.workload.batch, passage.text)
        found.append(MeasuredDrafts.of(engine, prompts))
        rows += found[-1].rows(engine, shape, passage.name, passage.calibration is not None)
        engine.close()
    on_progress("tuned", len(plans), len(plans))
    return found, rows, shape
