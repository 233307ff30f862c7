"""Best number of draft tokens per round over contexts and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ridgeplan.planner.capacity import MEMORY_UTILIZATION
from ridgeplan.planner.lowering import estimate_gammas
from ridgeplan.planner.question import Question, ask
from ridgeplan.planner.resolution import workload_for
from ridgeplan.planner.search import GAMMAS
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.plan.plan import require
from ridgeplan.roofline.plan.policies.selections import autoregressive
from ridgeplan.roofline.plan.presets import preset as preset_of

CONTEXTS = (4096, 16384, 32768, 65536, 131072)
BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class GammaCell:
    """The gamma with the least time per token of those that fit at one size, and its speed-up over plain decoding.

    Where none fits, it is the best of all gammas.
    """

    context: int
    batch: int
    gamma: int
    tpot_ms: float
    speedup: float
    fits: bool


def best_gamma(
    model: str | ModelShape,
    gpu: str,
    *,
    preset: str = "quantspec",
    contexts: Sequence[int] = (),
    batches: Sequence[int] = BATCHES,
    new_tokens: int = 1024,
    memory_limit: float | str | None = None,
    memory_utilization: float = MEMORY_UTILIZATION,
    profile: Profile | str | None = None,
    yarn: bool = False,
) -> tuple[GammaCell, ...]:
    """The best gamma of a preset that drafts, for every context and batch.

    `contexts` default to those of `CONTEXTS` within the model's limit. Other arguments, and errors, are those of
    `recommend`; raises PlanError for a preset without drafts.
    """
    asked = ask(
        model, gpu, 1, new_tokens=new_tokens, memory_limit=memory_limit, memory_utilization=memory_utilization,
        profile=profile, yarn=yarn,
    )  # fmt: skip
    drafts = preset_of(preset, asked.workload).speculation.active
    require(drafts, f"preset {preset!r} drafts nothing; allowed: one that speculates, such as quantspec")
    longest = asked.shape.max_context
    sizes = contexts or tuple(one for one in CONTEXTS if one <= longest) or (longest,)
    questions = [
        replace(asked, workload=workload_for(asked.shape, asked.profile, context, new_tokens, batch, yarn=yarn))
        for context in sizes
        for batch in batches
    ]
    return tuple(_cell(question.as_executed, preset) for question in questions)


def _cell(question: Question, preset: str) -> GammaCell:
    workload = question.workload
    priced = question.shape, question.profile, question.machine
    found = estimate_gammas(preset_of(preset, workload), *priced, GAMMAS)
    plain = estimate_gammas(autoregressive(workload), *priced, (0,))
    fits = np.broadcast_to(found.memory.peak <= question.memory_limit_bytes, (len(GAMMAS),))
    best = int(np.argmin(np.where(fits | ~fits.any(), found.tpot_s, np.inf)))
    tpot_s = float(found.tpot_s[best])
    return GammaCell(
        context=workload.context,
        batch=workload.batch,
        gamma=GAMMAS[best],
        tpot_ms=1e3 * tpot_s,
        speedup=float(plain.tpot_s[0]) / tpot_s,
        fits=bool(fits[best]),
    )
