"""Acceptance of drafters by kind of text and context: published and measured rows, and a user's own figure.

A drafter's acceptance depends on the text more than on the model: a suffix repeats in code and hardly in prose. So rows
are of one kind of text, and a drafter without a row of the workload's kind is not searched. Proposals of a head that
reads the whole context decay with it; where no row says how, they do as EAGLE-3's were published to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ridgeplan.planner.acceptance.drafter_rows import EAGLE3, DrafterRow, acceptance_of, drafter_rows, load_drafter_rows
from ridgeplan.planner.acceptance.rows import variant_name
from ridgeplan.planner.acceptance.speculation_profile import head_rows, head_settings
from ridgeplan.roofline.catalog.profile import SOURCES
from ridgeplan.roofline.execution import MAX_ACCEPTANCE_LENGTH
from ridgeplan.roofline.plan.plan import Drafter, DrafterKind, Workload

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

    Of other models' rows at one context, that of the largest model: small ones repeat their context less, and are
    smaller than any that is served. Without any row it is a prior: the worst row of any text.
    """
    if workload.acceptance_length and workload.drafter == kind:
        length = workload.acceptance_length
        acceptance = acceptance_of(length, 1.0, GIVEN_DEPTH)
        return ProposalAcceptance(
            1.0, acceptance, acceptance, acceptance, "measured", f"given: {length:g} tokens a pass", GIVEN_DEPTH
        )
    rows = _rows_about(kind, workload)
    if not rows:
        worst = min((row for row in drafter_rows() if row.kind is kind), key=lambda row: row.pass_tokens)
        what = f"{workload.text} texts" if workload.text else "a text of unknown kind (--text)"
        chance = worst.proposal_acceptance
        return ProposalAcceptance(worst.hit, 0.0, chance, chance, "prior", f"no rows of {kind} on {what}: {worst}", 1)

    def distance(row: DrafterRow) -> tuple[float, bool, float, int]:
        other_model = variant_name(row.model) != variant_name(workload.model)
        return _context_factor(row, workload), other_model, -row.parameters, SOURCES.index(row.source)

    nearest = min(rows, key=distance)
    near = [row for row in rows if _context_factor(row, workload) <= NEAR_CONTEXT] or [nearest]
    acceptance, where = nearest.proposal_acceptance, str(nearest)
    beyond = nearest.context and workload.context > max(row.context for row in rows)
    if beyond and nearest.name == EAGLE3:
        decay = ContextDecay.of(EAGLE3)
        tokens_here = decay.tokens_at(workload.context, nearest.pass_tokens, nearest.context)
        acceptance = acceptance_of(tokens_here, nearest.hit, nearest.depth)
        where += f", which decays with the context as published: {decay}"
    # The band is that of the tokens of a pass, at the nearest row's hits.
    ends = [acceptance_of(tokens(row.pass_tokens for row in near), nearest.hit, nearest.depth) for tokens in (min, max)]
    source = nearest.source if variant_name(nearest.model) == variant_name(workload.model) else "transferred"
    low, high = min(ends[0], acceptance), max(ends[1], acceptance)
    return ProposalAcceptance(nearest.hit, low, acceptance, high, source, where, nearest.depth)


def at_context(workload: Workload, context: int, drafter: Drafter) -> Workload:
    """The workload at another context. A user's figure is of its own; that of a head which reads everything decays."""
    here = replace(workload, context=context)
    of_head = drafter.kind is workload.drafter is DrafterKind.HEAD and not drafter.window
    if not (workload.acceptance_length and of_head):
        return here
    length = ContextDecay.of(EAGLE3).tokens_at(context, workload.acceptance_length, workload.context)
    return replace(here, acceptance_length=min(length, float(MAX_ACCEPTANCE_LENGTH)))


def _rows_about(kind: DrafterKind, workload: Workload) -> Sequence[DrafterRow]:
    """Rows of the workload's kind of text: of the head that it names alone, else the user's near its context, else all.

    Where the kind of text is not known, all of the head's rows, and none of a drafter that any text may have.
    """
    if workload.drafter_head and kind is DrafterKind.HEAD:
        of_head = head_rows(workload.drafter_head)
        of_head = tuple(row for row in of_head if not (row.text and workload.text) or row.text == workload.text)
        name = head_settings(workload.drafter_head).row_name() if of_head else ""  # with the window that plans have
        return tuple(row for row in of_head if row.name == name) or of_head
    if not workload.text:
        return ()
    users = load_drafter_rows(workload.drafter_rows) if workload.drafter_rows else ()
    of_user, shipped = (
        [row for row in rows if (row.kind, row.text) == (kind, workload.text)] for rows in (users, drafter_rows())
    )
    return [row for row in of_user if _context_factor(row, workload) <= NEAR_CONTEXT] or [*of_user, *shipped]


def _context_factor(row: DrafterRow, workload: Workload) -> float:
    """By how much the contexts of a row and of a workload differ, 1 or more; 1 where the row's is not known."""
    context = row.context or workload.context
    return max(context / workload.context, workload.context / context)


@dataclass(frozen=True)
class ContextDecay:
    """Tokens of a pass of a drafter by context, between the contexts of its rows linear in the logarithm."""

    rows: tuple[DrafterRow, ...]

    @classmethod
    def of(cls, name: str) -> ContextDecay:
        """Of the rows of a drafter whose contexts are known, and that are of no kind of text alone."""
        rows = (row for row in drafter_rows() if row.name == name and row.context and not row.text)
        return cls(tuple(sorted(rows, key=lambda row: row.context)))

    def tokens(self, context: float) -> float:
        """Tokens of a pass; beyond the rows' contexts those of the nearest."""
        logs = [math.log(row.context) for row in self.rows]
        return float(np.interp(math.log(context), logs, [row.pass_tokens for row in self.rows]))

    def tokens_at(self, context: float, tokens: float, measured_at: float) -> float:
        """Tokens of a pass of a drafter that had `tokens` at another context: as many at shorter ones, else fewer."""
        return 1 + (tokens - 1) * min(1.0, (self.tokens(context) - 1) / (self.tokens(measured_at) - 1))

    def acceptance(self, context: float) -> float:
        """Conditional acceptance of a proposal."""
        return acceptance_of(self.tokens(context), 1.0, self.rows[0].depth)

    def __str__(self) -> str:
        """The first and the last row."""
        first, last = self.rows[0], self.rows[-1]
        ends = f"{first.tokens:g} tokens a pass at {first.context} and {last.tokens:g} at {last.context}"
        return f"{ends}, {first.where}"
