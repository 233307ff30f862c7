"""Acceptance of drafters by kind of text and context: published and measured rows, and a user's own figure.

A drafter's acceptance depends on the text more than on the model: a suffix repeats in code and hardly in prose. So rows
are of one kind of text, and a drafter without a row of the workload's kind is not searched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ridgeplan.planner.acceptance.drafter_rows import DrafterRow, acceptance_of, drafter_rows
from ridgeplan.planner.acceptance.rows import variant_name
from ridgeplan.planner.acceptance.speculation_profile import head_rows
from ridgeplan.roofline.catalog.profile import SOURCES
from ridgeplan.roofline.execution import MAX_ACCEPTANCE_LENGTH
from ridgeplan.roofline.plan.plan import DrafterKind, Workload

GIVEN_DEPTH = MAX_ACCEPTANCE_LENGTH - 1  # proposals of the passes whose tokens a user states
NEAR_CONTEXT = 4.0  # factor of context within which rows of a text make a band


@dataclass(frozen=True)
class ProposalAcceptance:
    """A drafter's hits, and the conditional acceptance of its proposals with a band.

    depth: proposals of the passes that were measured.
    """

    hit: float
    low: float
    best: float
    high: float
    source: str
    where: str
    depth: int

    @property
    def known(self) -> bool:
        """Whether there is a row of the workload's kind of text, or the user's own figure."""
        return self.source != "prior"


def proposal_acceptance(kind: DrafterKind, workload: Workload) -> ProposalAcceptance:
    """What is known of a drafter on a workload: the user's figure, else the nearest row of its kind of text.

    A head that the workload names has its own measured rows; where its text is not known, all of them. Without any it
    is a prior: the worst row of any text.
    """
    if workload.acceptance_length and workload.drafter == kind:
        length = workload.acceptance_length
        acceptance = acceptance_of(length, 1.0, GIVEN_DEPTH)
        return ProposalAcceptance(
            1.0, acceptance, acceptance, acceptance, "measured", f"given: {length:g} tokens a pass", GIVEN_DEPTH
        )
    rows = [row for row in drafter_rows() if row.kind is kind]
    of_head = head_rows(workload.drafter_head) if workload.drafter_head and kind is DrafterKind.HEAD else ()
    of_text = [row for row in of_head if not (row.text and workload.text) or row.text == workload.text]
    of_text = of_text or [row for row in rows if workload.text and row.text == workload.text]
    if not of_text:
        worst = min(rows, key=lambda row: row.pass_tokens)
        what = f"{workload.text} texts" if workload.text else "a text of unknown kind (--text)"
        chance = worst.proposal_acceptance
        return ProposalAcceptance(worst.hit, 0.0, chance, chance, "prior", f"no rows of {kind} on {what}: {worst}", 1)

    def distance(row: DrafterRow) -> tuple[float, bool, int]:
        factor = abs(math.log((row.context or workload.context) / workload.context))
        return factor, variant_name(row.model) != variant_name(workload.model), SOURCES.index(row.source)

    nearest = min(of_text, key=distance)
    near = [row for row in of_text if distance(row)[0] <= math.log(NEAR_CONTEXT)] or [nearest]
    acceptance = nearest.proposal_acceptance
    # The band is that of the tokens of a pass, at the nearest row's hits.
    ends = [acceptance_of(tokens(row.pass_tokens for row in near), nearest.hit, nearest.depth) for tokens in (min, max)]
    source = nearest.source if variant_name(nearest.model) == variant_name(workload.model) else "transferred"
    low, high = min(ends[0], acceptance), max(ends[1], acceptance)
    return ProposalAcceptance(nearest.hit, low, acceptance, high, source, str(nearest), nearest.depth)


EAGLE3 = "EAGLE-3"


@dataclass(frozen=True)
class ContextDecay:
    """Tokens of a pass of a drafter by context, between the contexts of its rows linear in the logarithm."""

    rows: tuple[DrafterRow, ...]

    @classmethod
    def of(cls, name: str) -> ContextDecay:
        """Of the rows of a drafter whose contexts are known."""
        return cls(tuple(sorted((row for row in drafter_rows() if row.name == name and row.context), key=_context)))

    def tokens(self, context: float) -> float:
        """Tokens of a pass; beyond the rows' contexts those of the nearest."""
        logs = [math.log(row.context) for row in self.rows]
        return float(np.interp(math.log(context), logs, [row.pass_tokens for row in self.rows]))

    def acceptance(self, context: float) -> float:
        """Conditional acceptance of a proposal."""
        return acceptance_of(self.tokens(context), 1.0, self.rows[0].depth)

    def __str__(self) -> str:
        """The first and the last row."""
        first, last = self.rows[0], self.rows[-1]
        ends = f"{first.tokens:g} tokens a pass at {first.context} and {last.tokens:g} at {last.context}"
        return f"{ends}, {first.where}"


def _context(row: DrafterRow) -> int:
    return row.context
