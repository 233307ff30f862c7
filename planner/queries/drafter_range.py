"""From which context on a plan's drafter loses against the same plan without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.acceptance.drafters import at_context, proposal_acceptance
from ridgeplan.planner.lowering import estimate_kinds
from ridgeplan.planner.quantities import tokens_text
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import Plan, Workload

UNIT, STEPS_PER_OCTAVE = 1024, 4  # of contexts, before the last one at which drafts win is searched to a unit


@dataclass(frozen=True)
class DrafterRange:
    """Contexts at which a drafter pays. loses_from: tokens, in units of 1024, beyond which it never does; None if it
    does up to `last`, 0 if it does nowhere.

    against: what it is compared with; "" where rounds adapt to the text. assumed: of its acceptance by context, in
    words, if no row says it; "" otherwise.
    """

    loses_from: int | None
    last: int
    against: str
    assumed: str

    def __str__(self) -> str:
        """In words."""
        if not self.against:
            return "only in rounds where it pays on the text, as texts of a kind differ too much for a fixed choice"
        rest = f" against {self.against}{self.assumed and f', {self.assumed}'}"
        if self.loses_from == 0:
            return f"loses at all contexts{rest}"
        if self.loses_from is None:
            return f"pays up to {tokens_text(self.last)} tokens of context{rest}"
        return f"loses from about {tokens_text(self.loses_from)} tokens of context on{rest}"


def drafter_range(plan: Plan, shape: ModelShape, profile: Profile, machine: Machine) -> DrafterRange | None:
    """Where the plan's rounds beat plain decoding, and self-drafts alone in a cascade.

    None without a drafter. Rounds that adapt to the text use it only where it pays. Acceptance is that of the next
    token at each context (`acceptance.drafters.at_context`).
    """
    speculation, workload = plan.speculation, plan.workload
    if not speculation.drafter.active:
        return None
    last = last_context(workload, shape)
    if speculation.adapts_to_text:
        return DrafterRange(None, last, "", "")
    without = range(speculation.gamma + 1) if speculation.drafter.cascades else (0,)

    def wins(context: int) -> bool:
        here = replace(plan, workload=at_context(workload, context, speculation.drafter))
        model = AcceptanceModel.of_profile(shape, context, profile)
        *other, drafted = estimate_kinds(here, shape, machine, model, [*without, speculation.round_kind]).tpot_s
        return bool(drafted < min(other))

    at = [at_context(workload, context, speculation.drafter) for context in _sampled(last)]
    decays = len({each.acceptance_length for each in at}) > 1
    known = {round(proposal_acceptance(speculation.drafter.kind, each).best, 3) for each in at}
    assumed = "if it decays as EAGLE-3 was published to" if decays else "at the same acceptance" * (len(known) == 1)
    against = "self-drafts alone" if speculation.drafter.cascades else "plain decoding"
    return DrafterRange(last_win(wins, last), last, against, assumed)


def last_context(workload: Workload, shape: ModelShape) -> int:
    """Up to which a drafter's end is searched: that of the model with the workload's YaRN, or the workload's."""
    return max(int(workload.yarn_factor * shape.max_context), workload.context)


def last_win(wins: Callable[[int], bool], last: int) -> int | None:
    """The last context, to a unit, of those up to `last` at which drafts win; None if they do there, 0 if nowhere."""
    longer = None
    for context in reversed(_sampled(last)):
        if wins(context):
            if longer is None:
                return None
            return next((between for between in range(longer - UNIT, context, -UNIT) if wins(between)), context)
        longer = context
    return 0


def _sampled(last: int) -> list[int]:
    """Contexts from a unit to `last`, in equal ratios."""
    steps = np.arange(0, max(np.log2(last / UNIT), 0), 1 / STEPS_PER_OCTAVE)
    return sorted({*(UNIT * int(units) for units in np.round(2**steps)), last})
