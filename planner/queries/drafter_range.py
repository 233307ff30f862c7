"""From which context on a plan's drafter loses against the same plan without it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.acceptance.drafters import at_context, proposal_acceptance
from ridgeplan.planner.lowering import estimate_kinds
from ridgeplan.planner.quantities import tokens_text
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import Plan

UNIT, STEPS_PER_OCTAVE = 1024, 4  # of contexts


@dataclass(frozen=True)
class DrafterRange:
    """Contexts at which a drafter pays. loses_from: tokens from which on it never does; None if it does up to `last`, 0
    if it does nowhere.

    assumed: of its acceptance by context, in words, if no row says it; "" otherwise.
    """

    loses_from: int | None
    last: int
    assumed: str

    def __str__(self) -> str:
        """In words."""
        assumed = self.assumed and f", {self.assumed}"
        if self.loses_from == 0:
            return f"loses at all contexts{assumed}"
        if self.loses_from is None:
            return f"pays up to {tokens_text(self.last)} tokens of context{assumed}"
        return f"loses from about {tokens_text(self.loses_from)} tokens of context on{assumed}"


def drafter_range(plan: Plan, shape: ModelShape, profile: Profile, machine: Machine) -> DrafterRange | None:
    """Where the plan's rounds beat plain decoding, and self-drafts alone in a cascade; None without a drafter.

    Acceptance at each context is that of the rows nearest to it (`acceptance.drafters.proposal_acceptance`).
    """
    speculation, workload = plan.speculation, plan.workload
    if not speculation.drafter.active:
        return None
    last = max(int(workload.yarn_factor * shape.max_context), workload.context)
    steps = np.arange(0, max(np.log2(last / UNIT), 0), 1 / STEPS_PER_OCTAVE)
    contexts = sorted({*(UNIT * int(units) for units in np.round(2**steps)), last})
    at = {context: at_context(workload, context, speculation.drafter) for context in contexts}
    known = {proposal_acceptance(speculation.drafter.kind, each).best for each in at.values()}
    decays = len({each.acceptance_length for each in at.values()}) > 1
    assumed = "if it decays as EAGLE-3 was published to" if decays else "at the same acceptance" * (len(known) == 1)
    without = range(speculation.gamma + 1) if speculation.drafter.cascades else (0,)
    end: int | None = None
    for context in reversed(contexts):
        here = replace(plan, workload=at[context])
        model = AcceptanceModel.of_profile(shape, context, profile)
        *other, drafted = estimate_kinds(here, shape, machine, model, [*without, speculation.round_kind]).tpot_s
        if drafted < min(other):
            break
        end = context
    else:
        end = 0
    return DrafterRange(end, last, assumed)
