"""Presets: named plans such as the systems of the papers, collected from the policies."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.plan.plan import DraftCodes, HostPart, Plan, PlanError, Workload
from ridgeplan.roofline.plan.policies.dense import DENSE_PRESETS, autoregressive
from ridgeplan.roofline.plan.policy import EVICTIONS, SELECTIONS, Preset, TokenEviction, TokenSelection

OFFLOADED = {HostPart.ALL: "offload", HostPart.LOWER: "offloaded lower codes"}


def collect_presets(policies: Iterable[type[TokenSelection] | type[TokenEviction]]) -> dict[str, Preset]:
    """The dense presets and those of the policies, by name. Raises ValueError for a name that two of them have."""
    presets: dict[str, Preset] = dict(DENSE_PRESETS)
    for policy in policies:
        for name, make in policy.presets().items():
            if name in presets:
                raise ValueError(f"two presets are named {name!r}; rename the one of {policy.__name__}")
            presets[name] = make
    return presets


PRESETS = collect_presets([*SELECTIONS.values(), *EVICTIONS.values()])


def preset(name: str, workload: Workload) -> Plan:
    """The named preset for a workload. Raises PlanError with near names for an unknown one."""
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise PlanError(f"unknown preset {brief(name)}.{hint} Known: {', '.join(PRESETS)}")
    return PRESETS[name](workload)


def preset_name(plan: Plan) -> str:
    """The preset that the plan equals up to hyperparameters, else a description of its axes."""
    key = family_key(plan)
    return next((name for name, make in PRESETS.items() if family_key(make(plan.workload)) == key), describe(plan))


def describe(plan: Plan) -> str:
    """The differences from plain decoding, in a few words."""
    speculation = plan.speculation
    words = [
        f"w{plan.weights.target_bits}" if plan.weights.target_bits != 16 else "",
        f"{plan.kv.format.value} KV" if plan.kv.format.quantized else "",
        plan.eviction.policy + (" in chunks" if plan.eviction.chunk else "") if plan.eviction.active else "",
        OFFLOADED[plan.placement.part] if plan.placement.offload else "",
        f"target on {plan.attention.selection.name}" if plan.attention.active else "",
    ]
    if speculation.active:
        codes = "upper codes" if speculation.codes is DraftCodes.UPPER else "full codes"
        selected = f" of {speculation.selection.name}" if speculation.sparse else ""
        weights = f", w{plan.weights.draft_bits} drafts" if plan.weights.draft_differs else ""
        words.append(f"drafts on {codes}{selected}{weights}")
    return " + ".join(word for word in words if word) or "autoregressive"


def family_key(plan: Plan) -> tuple[object, ...]:
    """What distinguishes one system from another: everything but hyperparameters, budgets and group sizes."""
    speculation = plan.speculation
    return (
        plan.weights.target_bits,
        plan.weights.draft_bits,
        plan.kv.format,
        plan.eviction.policy,
        plan.eviction.chunk > 0,
        plan.placement.offload,
        plan.placement.part,
        plan.attention.selection.name,
        speculation.active,
        speculation.codes,
        speculation.selection.name,
        plan.tensor_parallel,
    )


__all__ = ["PRESETS", "Preset", "autoregressive", "describe", "family_key", "preset", "preset_name"]
