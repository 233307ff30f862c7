"""Policies that the cost model cannot price for a model: their plans are refused rather than priced wrongly."""

from __future__ import annotations

from ridgeplan.planner.plan import EvictionPolicy, Plan, TargetSelection
from ridgeplan.roofline.catalog.shapes import ModelShape

# Policies that read everything, or choose tokens by position alone.
UNSCORED = {EvictionPolicy.NONE.value, TargetSelection.FULL.value, "all", "streamingllm"}


def unpriced(plan: Plan, shape: ModelShape) -> str | None:
    """Why the plan's policies cannot be priced for this model; None if they can."""
    if shape.is_mla and (chosen := _chosen_by(plan)):
        return (
            f"{chosen} chooses tokens for each KV head, and {shape.name} caches one latent row for all heads; allowed: "
            "plans that read every token, and StreamingLLM"
        )
    return None


def _chosen_by(plan: Plan) -> str | None:
    """The policy that scores tokens head by head, to keep or read some of them."""
    policies = (plan.eviction.policy.value, plan.attention.selection.value, plan.speculation.selection.name)
    return next((name for name in policies if name not in UNSCORED), None)
