"""Presets: named plans such as the systems of the papers, collected from the policies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from ridgeplan.roofline.catalog.parallel import SINGLE
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.plan.plan import DraftCodes, HostPart, KVFormat, Plan, PlanError, Workload
from ridgeplan.roofline.plan.policies.dense import DENSE_PRESETS, autoregressive
from ridgeplan.roofline.plan.policy import EVICTIONS, SELECTIONS, Preset, TokenEviction, TokenSelection

OFFLOADED = {HostPart.ALL: "offload", HostPart.LOWER: "offloaded lower codes"}


KV_NAMES = {KVFormat.INT8: "INT8", KVFormat.HIERARCHICAL: "INT4x2", KVFormat.SHADOW: "BF16+INT4"}


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
        raise PlanError(f"unknown preset {brief(name)}.{hint} Allowed: {', '.join(PRESETS)}, and stored for GGUF files")
    return PRESETS[name](workload)


def preset_name(plan: Plan) -> str:
    """The preset that the plan equals up to hyperparameters, else a description of its axes."""
    key = family_key(plan)
    return next((name for name, make in PRESETS.items() if family_key(make(plan.workload)) == key), describe(plan))


def divided_name(name: str, plan: Plan) -> str:
    """A plan's name with its degrees of parallelism, where it spans several GPUs."""
    return name if plan.parallel == SINGLE else f"{name}, {plan.parallel}"


def describe(plan: Plan) -> str:
    """The plan's name: its differences from plain decoding, in a few words."""
    speculation = plan.speculation
    words = [
        f"{plan.weights.target_bits}-bit weights" if plan.weights.target_bits != 16 else "",
        "stored weights" if plan.weights.stored else "",
        f"{KV_NAMES[plan.kv.format]} KV" if plan.kv.format.quantized else "",
        plan.eviction.policy + (" in chunks" if plan.eviction.chunk else "") if plan.eviction.active else "",
        OFFLOADED[plan.placement.part] if plan.placement.offload else "",
        f"target on tokens chosen by {plan.attention.selection.name}" if plan.attention.active else "",
    ]
    if speculation.self_drafts:
        drafts = f"{plan.weights.draft_bits}-bit drafts" if plan.weights.draft_differs else "drafts"
        upper, chosen = speculation.codes is DraftCodes.UPPER, f"tokens chosen by {speculation.selection.name}"
        read = ["upper codes"] * upper + [chosen] * speculation.sparse
        words.append(" on ".join((drafts, " of ".join(read))) if read else drafts)
    words.append(speculation.drafter.kind.value if speculation.drafter.active else "")
    return " + ".join(word for word in words if word) or "autoregressive"


# Abbreviations, in this order: `8-bit weights + INT4x2 KV + 4-bit drafts on upper codes of tokens chosen by quest` is
# `w8+int4x2+upper:quest/w4`.
ABBREVIATIONS = (
    (r"(\d+)-bit drafts(.*)", r"drafts\2/w\1"), (r"(\d+)-bit weights", r"w\1"), (" of tokens chosen by ", ":"),
    ("target on tokens chosen by ", "target:"), ("drafts on tokens chosen by ", "full:"),
    ("drafts on upper codes", "upper"), ("drafts", "full"), (" lower codes", "-lower"), (" in chunks", "-chunks"),
    (" KV", ""), (" weights", ""), ("INT", "int"), ("BF", "bf"), (r" \+ ", "+"),
)  # fmt: skip


def short_name(name: str) -> str:
    """A plan's name in a narrow column, which `--preset` and `explain` accept. Presets keep their names."""
    if " " not in name:
        return name
    for words, letters in ABBREVIATIONS:
        name = re.sub(words, letters, name)
    return name


def family_key(plan: Plan) -> tuple[object, ...]:
    """What distinguishes one system from another: everything but hyperparameters, budgets and group sizes."""
    speculation = plan.speculation
    return (
        plan.weights.target_bits,
        plan.weights.draft_bits,
        plan.weights.stored,
        plan.kv.format,
        plan.eviction.policy,
        plan.eviction.chunk > 0,
        plan.placement.offload,
        plan.placement.part,
        plan.attention.selection.name,
        speculation.active,
        speculation.codes,
        speculation.selection.name,
        speculation.drafter.kind,
        speculation.drafter.cascades,
        speculation.drafter.cascades and speculation.adaptive,
    )


__all__ = [
    "PRESETS",
    "Preset",
    "autoregressive",
    "describe",
    "divided_name",
    "family_key",
    "preset",
    "preset_name",
    "short_name",
]
