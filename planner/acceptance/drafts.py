"""How a draft differs from its target: in the bits and in the tokens that it reads."""

from __future__ import annotations

from functools import cache

from ridgeplan.planner.plan import DraftCodes, KVFormat, Plan
from ridgeplan.planner.policies import selections
from ridgeplan.planner.policies.policy import Role
from ridgeplan.planner.policies.selection.all import ALL

BITS = ("kv8", "kv4", "w4")
SELECTIONS = tuple(policy.name for policy in selections(Role.DRAFT) if policy is not ALL)
FEWER_BITS = ("w4kv4", "w4", "kv4")  # that drafts may have besides reading fewer tokens
# Names of rows: one difference, both kinds of fewer bits, or fewer bits of fewer tokens.
DRAFTS = (*BITS, "w4kv4", *SELECTIONS, *(f"{bits}+{tokens}" for tokens in SELECTIONS for bits in FEWER_BITS))


@cache
def differences(draft: str) -> tuple[str, ...]:
    """The single differences that a row's draft has together."""
    return tuple(one for name in draft.split("+") for one in (("w4", "kv4") if name == "w4kv4" else (name,)))


def row_name(plan: Plan) -> str:
    """The draft of a row that is measured with the plan; "" for drafts that are certain to be accepted."""
    return "+".join(draft_names(plan))


def draft_names(plan: Plan) -> tuple[str, ...]:
    """The drafts, as rows name them, that a plan's drafts are together."""
    found = plan_differences(plan)
    return ("w4kv4", *found[2:]) if found[:2] == ("w4", "kv4") else found


def plan_differences(plan: Plan) -> tuple[str, ...]:
    """The differences between a plan's drafts and its target; none for drafts that are certain to be accepted."""
    speculation = plan.speculation
    if not speculation.active:
        return ()
    weights = ("w4",) if plan.weights.draft_bits == 4 and plan.weights.draft_differs else ()
    codes = ("kv4",) if speculation.codes is DraftCodes.UPPER else ()
    tokens = (speculation.selection.name,) if speculation.sparse else ()
    found = (*weights, *codes, *tokens)
    # Drafts of a cache with an INT4 shadow that read its full precision: priced like INT8 storage.
    return found or (("kv8",) if plan.kv.format is KVFormat.SHADOW else ())
