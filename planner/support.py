"""What the runtime can execute today. The planner never recommends anything else, and the runtime refuses it."""

from __future__ import annotations

from ridgeplan.planner.plan import Plan
from ridgeplan.planner.policies import draft_selection, eviction, target_selection
from ridgeplan.planner.policies.policy import Role
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.execution import EXECUTABLE_ARCHITECTURES


def missing_execution(plan: Plan, shape: ModelShape | None = None) -> list[str]:
    """The plan's values that the runtime cannot execute yet, one phrase each; empty if it can execute the plan.

    With `shape`, also the limits for this model.
    """
    evicting, target, drafts = eviction(plan), target_selection(plan), draft_selection(plan)
    window = shape.window_tokens if shape else None
    checks = {
        f"eviction {plan.eviction.policy.value!r}": evicting and not evicting.executable,
        "offloaded KV": plan.placement.offload,
        f"target selection {plan.attention.selection.value!r}": target and Role.TARGET not in target.executable,
        f"draft selection {drafts.name!r}": Role.DRAFT not in drafts.executable,
        f"{plan.weights.target_bits}-bit target weights": plan.weights.target_bits not in (16, 4),
        f"tensor parallelism {plan.tensor_parallel}": plan.tensor_parallel != 1,
        f"codes or drafts beyond a sliding window of {window} tokens": shape and exceeds_window(plan, shape),
    }
    return [name for name, missing in checks.items() if missing]


def exceeds_window(plan: Plan, shape: ModelShape) -> bool:
    """Whether codes or drafts would reach beyond the model's sliding window, which plain bf16 decoding alone may."""
    plain = not (plan.kv.format.quantized or plan.speculation.active)
    window = shape.window_tokens or plan.workload.final_context
    return plan.workload.final_context > window and not plain


def missing_architecture(shape: ModelShape) -> str | None:
    """Why the runtime cannot run this model, or None if it can."""
    if shape.architecture not in EXECUTABLE_ARCHITECTURES:
        known = ", ".join(EXECUTABLE_ARCHITECTURES)
        return f"the runtime does not execute architecture {shape.architecture!r} yet (it does {known})"
    return None
