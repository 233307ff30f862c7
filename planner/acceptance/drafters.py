"""Acceptance of drafters by kind of text and context: published and measured rows, and a user's own figure.

A drafter's acceptance depends on the text more than on the model: a suffix repeats in code and hardly in prose. So rows
are of one kind of text, and a drafter without a row of the workload's kind is not searched.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import cache

import numpy as np

from ridgeplan.planner.acceptance.rows import HERE, variant_name
from ridgeplan.roofline.catalog.profile import SOURCES
from ridgeplan.roofline.catalog.validation import Checked, name_text, number, one_of, text, whole
from ridgeplan.roofline.drafters import pass_tokens
from ridgeplan.roofline.execution import MAX_ACCEPTANCE_LENGTH, MAX_GAMMA
from ridgeplan.roofline.plan.plan import MAX_TOKENS, DrafterKind, PlanError, TextKind, Workload
from ridgeplan.roofline.round import conditional_acceptance

GIVEN_DEPTH = MAX_ACCEPTANCE_LENGTH - 1  # proposals of the passes whose tokens a user states
NEAR_CONTEXT = 4.0  # factor of context within which rows of a text make a band


@dataclass(frozen=True)
class DrafterRow(Checked):
    """How often a drafter's proposals were accepted. Raises PlanError for values out of range.

    name: of the drafter. text: the kind of text; "" if it is not known. context: tokens; 0 if it is not known. depth:
    proposals of a pass. hit: share of the passes before which it had proposals. tokens: of a pass, its own included, of
    which the conditional acceptance follows, if that is not known.
    """

    error = PlanError
    kind: DrafterKind = one_of(DrafterKind)
    name: str = name_text()
    model: str = name_text()
    depth: int = whole(1, MAX_GAMMA)
    source: str = one_of(SOURCES)
    where: str = text()
    context: int = whole(0, MAX_TOKENS, default=0)
    hit: float = number(0, 1, default=1.0)
    acceptance: float = number(0, 1, default=0.0)
    tokens: float = number(0, MAX_GAMMA + 1, default=0.0)
    text: str = one_of(("", *TextKind), default="")  # last, as it hides the function of that name

    @property
    def proposal_acceptance(self) -> float:
        """Conditional acceptance of a proposal, given that there was one."""
        return _acceptance_of(self.tokens, self.hit, self.depth) if self.tokens else self.acceptance

    @property
    def pass_tokens(self) -> float:
        """Tokens of a pass, its own included."""
        return self.tokens or float(pass_tokens(self.hit, self.acceptance, self.depth))

    def __str__(self) -> str:
        """The drafter, its model and context, and where the figure is from."""
        at = f" at {self.context} tokens" if self.context else ""
        return f"{self.name} of {self.model}{at}: {self.where}"


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


@cache
def drafter_rows() -> tuple[DrafterRow, ...]:
    """The shipped rows of drafters.toml; fields that entries share are written once."""
    tables = tomllib.loads((HERE / "drafters.toml").read_text(encoding="utf-8"))["row"]
    return tuple(DrafterRow(**{**table, **entry}) for table in tables for entry in table.pop("entries"))


def proposal_acceptance(kind: DrafterKind, workload: Workload) -> ProposalAcceptance:
    """What is known of a drafter on a workload: the user's figure, else the nearest row of its kind of text.

    Without either it is a prior: the worst row of any text.
    """
    if workload.acceptance_length and workload.drafter == kind:
        length = workload.acceptance_length
        acceptance = _acceptance_of(length, 1.0, GIVEN_DEPTH)
        return ProposalAcceptance(
            1.0, acceptance, acceptance, acceptance, "measured", f"given: {length:g} tokens a pass", GIVEN_DEPTH
        )
    rows = [row for row in drafter_rows() if row.kind is kind]
    of_text = [row for row in rows if workload.text and row.text == workload.text]
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
    ends = [
        _acceptance_of(tokens(row.pass_tokens for row in near), nearest.hit, nearest.depth) for tokens in (min, max)
    ]
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
        return _acceptance_of(self.tokens(context), 1.0, self.rows[0].depth)

    def __str__(self) -> str:
        """The first and the last row."""
        first, last = self.rows[0], self.rows[-1]
        ends = f"{first.tokens:g} tokens a pass at {first.context} and {last.tokens:g} at {last.context}"
        return f"{ends}, {first.where}"


def _context(row: DrafterRow) -> int:
    return row.context


def _acceptance_of(tokens: float, hit: float, depth: int) -> float:
    """The conditional acceptance at which a pass of `depth` proposals, made in a share `hit`, has so many tokens."""
    share = (tokens - 1) / (depth * hit) if hit else 0.0
    return conditional_acceptance(min(share, 1.0), depth) if share > 0 else 0.0
