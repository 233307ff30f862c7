"""The choice among plans that run and fit: the fastest, or one that is more exact or simpler and as fast.

A faster plan must be faster beyond the noise of the predictions: in 84% of the sampled errors, which is one standard
deviation (the one-standard-error rule of Breiman et al. 1984), or by more than 3%.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ridgeplan.planner.plan import Plan
from ridgeplan.planner.prediction import Prediction
from ridgeplan.planner.quality import Quality, losses, published_loss, quality_of
from ridgeplan.planner.search.candidates import Candidate
from ridgeplan.planner.search.question import Objective, Question
from ridgeplan.planner.uncertainty import sampled_tpot_ms, sampled_ttft_ms

CONFIDENCE = 0.84  # that the faster plan is faster
TOLERANCE = 0.03  # how much slower, by the best estimates, the preferred plan may be


def contenders(possible: Sequence[Candidate], question: Question) -> list[Candidate]:
    """Those of the plans in order of their score that are within the tolerance of the best; memory has no noise."""
    tolerance = 0 if question.objective is Objective.MEMORY else TOLERANCE
    return [one for one in possible if one.score <= possible[0].score * (1 + tolerance)]


def chosen(plans: Sequence[Candidate], scores: np.ndarray) -> Candidate:
    """The most exact and then the simplest of the contenders that the first, the fastest, does not surely beat.

    scores: sampled, [plans, samples].
    """
    beaten = (scores[0] < scores).mean(axis=1)
    level = [one for one, sure in zip(plans, beaten, strict=True) if sure < CONFIDENCE]
    return min(level, key=lambda one: preference(one.plan))


def sampled_scores(predictions: Sequence[Prediction], question: Question) -> np.ndarray:
    """What the question minimizes, [plans, samples], in milliseconds or bytes."""
    if question.objective is Objective.MEMORY:
        return np.array([[one.best.peak_memory_bytes] for one in predictions])
    tpot_ms = sampled_tpot_ms(predictions, question.profile)
    if question.objective is Objective.LATENCY:
        return tpot_ms
    return sampled_ttft_ms(predictions, question.profile) + question.workload.new_tokens * tpot_ms


def preference(plan: Plan) -> tuple[float, ...]:
    """Plans in order of preference: exact before lossy, evictions that lose less by published figures before others,
    of whole prompts before those in chunks, then no layers on the host before some, no speculation before speculation,
    drafts that read every token before those that choose some, and few formats.

    Formats are those beside bf16: of the target's weights, of the drafts' own, and of the KV cache.
    """
    formats = (plan.weights.target_bits != 16) + plan.weights.draft_copy + plan.kv.format.quantized
    lost = len(losses(plan)), published_loss(plan), int(plan.eviction.chunk > 0)
    exactness = list(Quality).index(quality_of(plan)), *lost
    return *exactness, int(plan.placement.offload), int(plan.speculation.active), int(plan.speculation.sparse), formats


def why_preferred(one: Plan, other: Plan) -> str:
    """How `one`, which is preferred, differs from `other`: in exactness or in simplicity."""
    exactness = slice(0, 4)
    return "more exact" if preference(one)[exactness] < preference(other)[exactness] else "simpler"
