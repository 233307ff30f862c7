"""Acceptance model: measured and published rows, extrapolated to other models and contexts.

It works on disagreement, 1 - acceptance, which is roughly additive: drafts that read both fewer bits and fewer tokens
disagree with the target about as often as both kinds together. All figures are conditional acceptance.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ridgeplan.planner.plan import (
    MAX_TOKENS,
    MIN_RATIO,
    DraftCodes,
    DraftSelection,
    KVFormat,
    Plan,
    PlanError,
)
from ridgeplan.planner.policies import selections
from ridgeplan.planner.policies.policy import Role
from ridgeplan.planner.policies.selection.all import ALL
from ridgeplan.roofline.catalog.checks import Checked, build, number, one_of, text, whole
from ridgeplan.roofline.catalog.profile import SOURCES
from ridgeplan.roofline.catalog.shapes import ModelShape

REFERENCE_RATIO = 0.25
# How a draft differs from the target: in the bits or in the tokens that it reads.
DRAFTS = ("kv8", "kv4", "w4", "w4kv4", *(policy.name for policy in selections(Role.DRAFT) if policy is not ALL))
# Drafts that read fewer bits of both weights and KV, and of only one of them: the latter agree at least as often.
JOINT, JOINT_PARTS = "w4kv4", ("w4", "kv4")


@dataclass(frozen=True)
class AcceptanceRow(Checked):
    """One known acceptance. Raises PlanError for values out of range."""

    error = PlanError
    draft: str = one_of(DRAFTS)
    model: str = text()
    parameters: float = number(1e-6, 1e5)  # billions
    context: int = whole(1, MAX_TOKENS)  # tokens
    acceptance: float = number(1e-6, 1)
    source: str = one_of(SOURCES)
    where: str = text()
    ratio: float = number(MIN_RATIO, 1, default=1.0)

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> AcceptanceRow:
        """From a profile. Raises PlanError, also for fields that are missing or unknown."""
        return build(cls, row, "acceptance row: ")

    def _owner(self) -> str:
        return "acceptance row: "

    @property
    def disagreement(self) -> float:
        """1 - acceptance, scaled to `REFERENCE_RATIO` for policies that read a share of the tokens."""
        return (1 - self.acceptance) / ratio_factor(self.ratio) if self.ratio < 1 else 1 - self.acceptance


@dataclass(frozen=True)
class Acceptance:
    """A conditional acceptance with its band and its source."""

    low: float
    best: float
    high: float
    source: str
    where: str


CERTAIN = Acceptance(1.0, 1.0, 1.0, "measured", "the draft reads what the target reads")


def ratio_factor(ratio: Any) -> Any:
    """Disagreement at `ratio` of the tokens over that at 25%: ln(1/ratio) / ln 4.

    Zero where all tokens are read. The six pairs of measured rows at 25% and 7% have quotients of 1.1 to 2.2, their
    mean 1.7, against 1.9 here.
    """
    return np.log(ratio) / math.log(REFERENCE_RATIO)


@dataclass(frozen=True)
class AcceptanceModel:
    """Acceptance of the drafts of one model at one context, by how they differ from the target."""

    by_kind: Mapping[str, Acceptance]

    @classmethod
    def for_model(cls, shape: ModelShape, context: int, own_rows: Iterable[Mapping[str, Any]] = ()) -> AcceptanceModel:
        """From the shipped rows and `own_rows`, those of a profile, measured on the user's machine."""
        rows = (*shipped_rows(), *map(AcceptanceRow.read, own_rows))
        known = {
            kind: _look_up([row for row in rows if row.draft == kind], shape, context)
            for kind in dict.fromkeys(row.draft for row in rows)
        }
        for kind in JOINT_PARTS:
            known[kind] = _at_least(known[kind], known[JOINT])
        for policy in selections(Role.DRAFT):
            if policy.acceptance_between:
                known.setdefault(policy.name, _between(known, *policy.acceptance_between))
        return cls(known)

    def of(self, plan: Plan) -> Acceptance:
        """Conditional acceptance of a plan's drafts, with its band."""
        parts = [self.by_kind[kind] for kind in _numeric_kinds(plan)]
        if plan.speculation.selection is not DraftSelection.ALL:
            found = self.by_kind[plan.speculation.selection.value]
            parts.append(_scaled(found, ratio_factor(plan.speculation.ratio)))
        return _combined(parts) if plan.speculation.active and parts else CERTAIN

    def best(self, plan: Plan, ratios: np.ndarray) -> np.ndarray:
        """The best estimate of `of(plan)`, with each of `ratios` [n] instead of the plan's own ratio."""
        numeric = math.prod(self.by_kind[kind].best for kind in _numeric_kinds(plan))
        if not plan.speculation.active:
            return np.ones_like(ratios)
        if plan.speculation.selection is DraftSelection.ALL:
            return np.full_like(ratios, numeric)
        missed = 1 - self.by_kind[plan.speculation.selection.value].best
        return numeric * np.maximum(0, 1 - missed * ratio_factor(ratios))


@cache
def shipped_rows() -> tuple[AcceptanceRow, ...]:
    """The rows of acceptance.toml. Fields shared by a table's entries are written once."""
    tables = tomllib.loads(Path(__file__).with_name("acceptance.toml").read_text(encoding="utf-8"))["row"]
    return tuple(AcceptanceRow(**table, **entry) for table in tables for entry in table.pop("entries"))


def _numeric_kinds(plan: Plan) -> list[str]:
    """Which of a draft's numbers have fewer bits than the target's: codes, weights, both, or neither."""
    upper = plan.speculation.codes is DraftCodes.UPPER
    fewer_bits = plan.weights.draft_bits == 4 and plan.weights.draft_differs
    kind = ("w4" if fewer_bits else "") + ("kv4" if upper else "")
    if kind or plan.speculation.selection is not DraftSelection.ALL:
        return [kind] if kind else []
    # A draft that reads exactly what the target reads; with INT8 storage both read the same codes.
    return [] if plan.kv.format is not KVFormat.SHADOW else ["kv8"]


def _look_up(matching: list[AcceptanceRow], shape: ModelShape, context: int) -> Acceptance:
    """The model's own rows if there are any, else all rows, weighted by similarity."""
    own = [row for row in matching if same_model(row.model, shape.name)]
    used = own or matching
    weights = [_weight(row, shape, context) for row in used]
    near = [(row, weight) for row, weight in zip(used, weights, strict=True) if weight >= max(weights) / 20]
    best = sum(row.disagreement * weight for row, weight in near) / sum(weight for _, weight in near)
    spread = [row.disagreement for row, _ in near]
    nearest = max(near, key=lambda pair: pair[1])[0]
    margin = 0.15 * best  # samples of a few hundred tokens, and other texts than the source's
    low, high = 1 - min(1.0, max(spread) + margin), 1 - max(0.0, min(spread) - margin)
    source = nearest.source if own else "transferred"
    return Acceptance(low, 1 - best, high, source, f"{nearest.model} at {nearest.context} tokens: {nearest.where}")


def _at_least(part: Acceptance, joint: Acceptance) -> Acceptance:
    """`part`, or `joint` where that is higher and `part` comes from other models."""
    return joint if part.source == "transferred" and part.best < joint.best else part


def _between(known: Mapping[str, Acceptance], below: str, above: str) -> Acceptance:
    worst, best = known[below], known[above]
    middle = (worst.best + best.best) / 2
    return Acceptance(
        min(worst.low, best.low),
        middle,
        max(worst.high, best.high),
        "prior",
        f"between {below} and {above}",
    )


def _weight(row: AcceptanceRow, shape: ModelShape, context: int) -> float:
    """A row's weight: halved per factor of 2 in model size, quartered per factor of 2 in context."""
    size = abs(math.log2(row.parameters * 1e9 / shape.parameters))
    length = 2 * abs(math.log2(row.context / context))
    return float(0.5 ** (size + length))


def _scaled(found: Acceptance, factor: float) -> Acceptance:
    low, best, high = (max(0.0, 1 - (1 - value) * factor) for value in (found.low, found.best, found.high))
    return Acceptance(low, best, high, found.source, found.where)


def _combined(parts: list[Acceptance]) -> Acceptance:
    """Disagreements are independent, so acceptances multiply. The result has the weakest source."""
    weakest = max(parts, key=lambda part: SOURCES.index(part.source))
    return Acceptance(
        math.prod(part.low for part in parts),
        math.prod(part.best for part in parts),
        math.prod(part.high for part in parts),
        weakest.source,
        "; ".join(dict.fromkeys(part.where for part in parts)),
    )


def same_model(one: str, other: str) -> bool:
    """Whether two names are of one model, ignoring case, tuning (-Instruct, -Coder) and GGUF type (.Q4_1)."""

    def core(name: str) -> str:
        plain = re.sub(r"[.-](i?q\d\w*|b?f16|f32)$", "", name.rsplit("/", 1)[-1].casefold())
        for suffix in ("-instruct", "-coder"):
            plain = plain.replace(suffix, "")
        return plain

    return core(one) == core(other)
