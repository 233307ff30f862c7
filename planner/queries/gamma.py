"""Best number of draft tokens per round over contexts and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from ridgeplan.planner.acceptance.drafters import proposal_acceptance
from ridgeplan.planner.prediction import predict_question
from ridgeplan.planner.question import Question, SearchOptions, ask
from ridgeplan.planner.recommend import penalize_unmeasured_rates, ranked
from ridgeplan.planner.search import family_of, named_plan, search
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.plan.plan import require
from ridgeplan.roofline.plan.policies.dense import autoregressive
from ridgeplan.roofline.plan.presets import short_name

DEFAULT_PRESET = "quantspec"
CONTEXTS = (4096, 16384, 32768, 65536, 131072)
BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class GammaCell:
    """The gamma with the least time per token that fits at one size, and its speed-up over plain decoding.

    If none fits, it is the fastest of all gammas. plan: the one whose gammas these are. plain_fits: whether plain
    decoding does. passes, depth: of a cascade's rounds, the self-draft's passes and the proposals to each; else 0.
    """

    plan: str
    context: int
    batch: int
    gamma: int
    passes: int
    depth: int
    tpot_ms: float
    speedup: float
    fits: bool
    plain_fits: bool


def best_gamma(
    model: str | ModelShape,
    gpu: str,
    *,
    preset: str | None = None,
    contexts: Sequence[int] = (),
    batches: Sequence[int] = BATCHES,
    options: SearchOptions | None = None,
    **changes: Any,
) -> tuple[GammaCell, ...]:
    """The best gamma of a preset or plan that drafts, for every context and batch.

    `preset` defaults to quantspec or, where that does not fit the smallest size, to the fastest plan with self-drafts
    that does, such as one on a GGUF file's stored weights. `contexts` default to those of `CONTEXTS` within the model's
    limit. Options and errors are those of `recommend`; also raises PlanError for a preset without drafts.
    """
    question = ask(model, gpu, 1, options, **changes)
    longest = question.shape.max_context
    sizes = contexts or tuple(context for context in CONTEXTS if context <= longest) or (longest,)
    preset = preset or _fitting(question.resized(min(sizes), min(batches)).as_executed)
    plan = named_plan(preset, question.workload)
    active, drafter = plan.speculation.active, plan.speculation.drafter
    require(active, f"preset {preset!r} drafts nothing; allowed: one that speculates, such as quantspec")
    known = not drafter.active or proposal_acceptance(drafter.kind, plan.workload).known
    require(known, f"proposals of preset {preset!r} depend on the text; allowed: with text, or self-drafts")
    question.require_engine_runs(plan)
    return tuple(_cell(question.resized(*size).as_executed, preset) for size in product(sizes, batches))


def _fitting(question: Question) -> str:
    """The name of the plan whose gammas are shown unless the user names one."""
    drafting = [
        candidate.name
        for candidate in ranked(penalize_unmeasured_rates(search(question), question))
        if candidate.plan.speculation.self_drafts and not candidate.rejection(question)
    ]
    return DEFAULT_PRESET if DEFAULT_PRESET in drafting else short_name(next(iter(drafting), DEFAULT_PRESET))


def _cell(question: Question, preset: str) -> GammaCell:
    workload = question.workload
    family = family_of(preset, named_plan(preset, workload))
    ratio = family.template.speculation.ratio
    plans = [family.plan(gamma, ratio, depth) for gamma, depth in product(family.gammas, family.depths)]
    plain, *drafting = (each.best for each in predict_question([autoregressive(workload), *plans], question))
    fits = np.array([each.peak_memory_bytes for each in drafting]) <= question.memory_limit_bytes
    best = int(np.argmin(np.where(fits | ~fits.any(), [each.tpot_ms for each in drafting], np.inf)))
    tpot_ms, speculation = drafting[best].tpot_ms, plans[best].speculation
    drafter = speculation.drafter
    return GammaCell(
        plan=preset,
        context=workload.context,
        batch=workload.batch,
        gamma=speculation.gamma,
        passes=drafter.passes,
        depth=drafter.depth * drafter.cascades,
        tpot_ms=tpot_ms,
        speedup=plain.tpot_ms / tpot_ms,
        fits=bool(fits[best]),
        plain_fits=plain.peak_memory_bytes <= question.memory_limit_bytes,
    )
