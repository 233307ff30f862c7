"""The search space: families of plans, each with a grid over gamma and the drafts' sparse ratio."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from ridgeplan.planner.axes.draft_selection import draft_selection
from ridgeplan.planner.axes.offload import HostPart
from ridgeplan.planner.plan import (
    MAX_GAMMA,
    DraftCodes,
    Eviction,
    KVCache,
    KVFormat,
    Placement,
    Plan,
    Speculation,
    Weights,
    Workload,
)
from ridgeplan.planner.policies import selections
from ridgeplan.planner.policies.eviction.dapq import dapq
from ridgeplan.planner.policies.policy import KV_BUDGET, Role
from ridgeplan.planner.presets import PRESETS, describe, family_key
from ridgeplan.planner.quality import Quality, quality_of

RATIOS = (0.02, 0.04, 0.07, 0.1, 0.15, 0.25, 0.5)
GAMMAS = tuple(range(1, MAX_GAMMA + 1))


@dataclass(frozen=True)
class Family:
    """Plans that differ only in gamma and ratio: a template, and the values of both.

    Budgets of lossy policies are the template's: fewer tokens are always faster, and a latency model cannot weigh that
    against the loss of quality.
    """

    name: str
    template: Plan
    gammas: tuple[int, ...]
    ratios: tuple[float, ...]

    @property
    def size(self) -> int:
        """Number of plans in the grid."""
        return len(self.gammas) * len(self.ratios)

    def grid(self) -> tuple[np.ndarray, np.ndarray]:
        """gamma and ratio of every plan, each [size]."""
        return np.repeat(self.gammas, len(self.ratios)), np.tile(self.ratios, len(self.gammas))

    def plan(self, gamma: int, ratio: float) -> Plan:
        """The plan at one point of the grid."""
        speculation = replace(self.template.speculation, gamma=int(gamma))
        return replace(self.template, speculation=speculation.with_ratio(float(ratio)))


@lru_cache(maxsize=16)
def families(workload: Workload, *, offload: bool, quality: Quality = Quality.NEAR_LOSSLESS) -> tuple[Family, ...]:
    """Every preset, and the joint space of weights, cache formats, draft codes and selections that `quality` allows.

    `offload` adds plans with layers on the host, for what would not fit otherwise: plain decoding on all formats, and
    drafts where only lower codes leave. How often drafts are accepted that read a few tokens of some layers is not
    known, so that such plans are run but not searched.
    """
    named = {
        family_key(plan): (name, plan) for name, plan in ((name, make(workload)) for name, make in PRESETS.items())
    }
    for plan in (*_joint(workload, quality), *(_offloaded(workload, quality) if offload else ())):
        named.setdefault(family_key(plan), (describe(plan), plan))
    return tuple(family_of(name, plan) for name, plan in named.values())


# Cache formats with the codes that drafts read: the upper ones where they are stored.
DRAFT_READS = (
    (KVFormat.FULL, DraftCodes.FULL),
    (KVFormat.INT8, DraftCodes.FULL),
    (KVFormat.SHADOW, DraftCodes.UPPER),
    (KVFormat.HIERARCHICAL, DraftCodes.UPPER),
)
# Bits of the target's weights with those of the drafts'.
WEIGHT_BITS = ((16, 16), (16, 4), (8, 8), (8, 4), (4, 4))


def _joint(workload: Workload, quality: Quality) -> Iterator[Plan]:
    evicted = dapq(workload).eviction  # the policy that loses least, by published figures
    for eviction, (kv, codes), (target_bits, draft_bits) in product((Eviction(), evicted), DRAFT_READS, WEIGHT_BITS):
        target = Plan(workload, Weights(target_bits, target_bits), KVCache(kv), eviction=eviction)
        if not quality.allows(quality_of(target)):
            continue
        if codes is DraftCodes.FULL and draft_bits == target_bits:
            yield target
        yield from _drafting(target, Weights(target_bits, draft_bits), codes)


def _offloaded(workload: Workload, quality: Quality) -> Iterator[Plan]:
    budget = min(KV_BUDGET, workload.context)
    for target_bits, draft_bits in WEIGHT_BITS:
        weights = Weights(target_bits, target_bits)
        for kv in (KVFormat.FULL, KVFormat.INT8) if draft_bits == target_bits else ():
            plain = Plan(workload, weights, KVCache(kv), placement=Placement(True, budget))
            if quality.allows(quality_of(plain)):
                yield plain
        lower = Placement(True, part=HostPart.LOWER)
        halved = Plan(workload, weights, KVCache(KVFormat.HIERARCHICAL), placement=lower)
        if quality.allows(quality_of(halved)):
            yield replace(
                halved, weights=Weights(target_bits, draft_bits), speculation=Speculation(1, DraftCodes.UPPER)
            )


def _drafting(plain: Plan, weights: Weights, codes: DraftCodes) -> Iterator[Plan]:
    """Drafts that read all tokens or, if none were evicted, what a policy selects."""
    for policy in selections(Role.DRAFT):
        speculation = Speculation(1, codes, draft_selection(policy.name))
        missing_codes = speculation.selection.needs_codes and not plain.kv.format.quantized
        if missing_codes or not policy.searched or (speculation.sparse and plain.eviction.active):
            continue
        if not speculation.sparse and codes is DraftCodes.FULL and not weights.draft_differs:
            continue  # the draft would be the target itself
        yield replace(plain, weights=weights, speculation=speculation)


def family_of(name: str, template: Plan) -> Family:
    """All plans that differ from the template only in gamma and ratio."""
    speculation = template.speculation
    return Family(
        name,
        template,
        gammas=GAMMAS if speculation.active else (0,),
        ratios=RATIOS if speculation.sparse else (1.0,),
    )
