"""Quality as a constraint: how far a plan's target may deviate from the model."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from ridgeplan.planner.measured_quality import QualityRow, measured_quality
from ridgeplan.planner.plan import Plan
from ridgeplan.planner.policies import eviction, target_selection
from ridgeplan.planner.policies.policy import FULL_RULER


class Quality(StrEnum):
    """From strictest to loosest."""

    EXACT = "exact"
    NEAR_LOSSLESS = "near-lossless"
    LOSSY = "lossy"

    def allows(self, other: Quality) -> bool:
        """Whether this constraint admits a plan of quality `other`."""
        order = list(Quality)
        return order.index(other) <= order.index(self)


# Fidelity, 1 - total variation of the next token's distribution against full precision, by kind of 8-bit weights.
WEIGHT_FIDELITY = {
    "plain": "fidelity 0.992 on Qwen2.5-Coder-0.5B and 0.988 on SmolLM2-135M",
    "hierarchical": "fidelity 0.987 on Qwen2.5-Coder-0.5B and 0.983 on SmolLM2-135M",
}
FITTED = "fitted to a text, in float32 (docs/kernels/gptq.md)"


def losses(plan: Plan) -> list[str]:
    """What the plan's target gives up, with the published loss if there is one; empty for an exact plan.

    Speculation is never a loss: the output has the target's distribution whatever the drafts read.
    """
    found = []
    if plan.kv.target_bits == 8:
        found.append("INT8 KV: perplexity +0.16% on WikiText-2, +0.004% on C4 (QuantSpec, Table 2)")
    if plan.weights.target_bits == 8:
        kind = "hierarchical" if plan.weights.hierarchical else "plain"
        found.append(f"INT8 weights ({kind}): {WEIGHT_FIDELITY[kind]}, {FITTED}")
    if plan.weights.target_bits == 4:
        found.append("INT4 weights: perplexity 5.47 to 5.73 for Llama-2-7B, rounded to nearest (AWQ, Table 4)")
    policies = (eviction(plan), target_selection(plan))
    return found + [policy.loss(plan) for policy in policies if policy]


def stated_losses(plan: Plan, rows: Sequence[QualityRow]) -> list[str]:
    """What the plan gives up: with what was measured of it where there are rows, otherwise with what is published."""
    published = losses(plan)
    measured = measured_quality(plan, rows)
    if measured is None:
        return [f"{loss} [not measured here]" for loss in published]
    return [f"{', '.join(loss.partition(':')[0] for loss in published)}: {measured}"]


def published_loss(plan: Plan) -> float:
    """The share of RULER's average that the plan's eviction loses with EVICTION_BUDGET tokens; 1 if none is published.

    It ranks plans that are otherwise equal; it is not the loss at the plan's own budget.
    """
    policy = eviction(plan)
    if policy is None:
        return 0.0
    return 1.0 if policy.ruler is None else 1 - policy.ruler / FULL_RULER


def quality_of(plan: Plan) -> Quality:
    """The strictest quality that admits the plan."""
    if not losses(plan):
        return Quality.EXACT
    eight_bits = (plan.kv.target_bits == 8) + (plan.weights.target_bits == 8)
    return Quality.NEAR_LOSSLESS if len(losses(plan)) == eight_bits else Quality.LOSSY
