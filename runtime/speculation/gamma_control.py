"""Adaptive gamma: how many tokens the next round drafts, from measured acceptance and predicted times.

Two parts decide. `Evidence` estimates the acceptance of each position from the rounds so far, and the gamma with the
most tokens per second follows. A `LossBudget` bounds what drafting may lose where it does not pay: with it, whatever
the text, rounds take at most (1 + RUNNING_LOSS) times plain decoding's time for their tokens, plus STARTING_LOSS times
plain decoding's time for the whole generation.

Decisions depend on counts and on the cost model's times, never on a clock, so a seed reproduces its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ridgeplan.roofline.execution import RUNNING_LOSS, STARTING_LOSS, RoundKind, round_shape
from ridgeplan.roofline.round import RoundCosts, tokens_of
from ridgeplan.runtime.speculation.speculator import RowResult

SAVED_ROUNDS = 4  # saved gains pay for at most this many rounds of the largest gamma with all drafts rejected
HYSTERESIS = 0.03  # another gamma must promise that much more speed
MEMORY_ROUNDS = 32  # drafting rounds after which evidence has lost two thirds of its weight
PROBE_MEMORY_ROUNDS = 8  # the same while only probes draft, so that a few good ones suffice
PRIOR_DRAFTS = 2.0  # weight of the expected acceptance of a position that was never tried
FIRST_WAIT = 16  # plain rounds between probes, doubled after each that did not pay
LONGEST_WAIT = 128


class GammaSchedule(Protocol):
    """Chooses every round of a generation: its gamma, and which tiers draft."""

    def next(self) -> RoundKind:
        """The round that is launched now."""

    def add(self, kind: RoundKind, rows: Sequence[RowResult]) -> None:
        """Adds the result of the oldest round in flight. Rows that kept no token were not active."""


@dataclass(frozen=True)
class FixedGamma:
    """The same round every time."""

    kind: RoundKind

    def next(self) -> RoundKind:
        """See `GammaSchedule`."""
        return self.kind

    def add(self, kind: RoundKind, rows: Sequence[RowResult]) -> None:
        """Nothing to learn."""


@dataclass(frozen=True)
class Evidence:
    """Drafts that were compared with the target and accepted, by position in a round; older ones weigh less."""

    verified: tuple[float, ...]
    accepted: tuple[float, ...]

    @classmethod
    def none(cls, gamma: int) -> Evidence:
        """For rounds of up to `gamma` drafts."""
        return cls((0.0,) * gamma, (0.0,) * gamma)

    def add(self, rows: Sequence[RowResult], memory: int) -> Evidence:
        """Adds a round's rows with equal weight; earlier rounds keep 1 - 1/memory of their weight."""
        kept = 1 - 1 / memory
        return Evidence(
            tuple(kept * old + sum(row.verified > at for row in rows) for at, old in enumerate(self.verified)),
            tuple(kept * old + sum(row.accepted > at for row in rows) for at, old in enumerate(self.accepted)),
        )

    def faded(self, rounds: float) -> Evidence:
        """With at most the weight of `rounds` drafts at every position, the acceptance unchanged."""
        scales = [min(1.0, rounds / max(verified, rounds)) for verified in self.verified]
        return Evidence(
            tuple(scale * verified for scale, verified in zip(scales, self.verified, strict=True)),
            tuple(scale * accepted for scale, accepted in zip(scales, self.accepted, strict=True)),
        )

    def acceptance_at(self, expected: float) -> list[float]:
        """Conditional acceptance by position. A position's prior is the estimate before it, first `expected`."""
        acceptance: list[float] = []
        for verified, accepted in zip(self.verified, self.accepted, strict=True):
            expected = (accepted + PRIOR_DRAFTS * expected) / (verified + PRIOR_DRAFTS)
            acceptance.append(expected)
        return acceptance


@dataclass(frozen=True)
class LossBudget:
    """Seconds that rounds may still lose against plain steps.

    A round in flight counts as if the target rejects all its drafts, until it is collected. Gains beyond `max_s` are
    not saved, so that a text that turns bad is left soon.
    """

    left_s: float
    max_s: float
    plain_s: float

    @classmethod
    def of(cls, costs: RoundCosts, new_tokens: int) -> LossBudget:
        """At the start of a generation of up to `new_tokens` tokens."""
        max_s = SAVED_ROUNDS * (max(costs.seconds.values()) - costs.plain_s)
        return cls(min(STARTING_LOSS * new_tokens * costs.plain_s, max_s), max_s, costs.plain_s)

    def launch(self, round_s: float) -> LossBudget:
        """After the launch of a round, which yields a token at least."""
        return self._with(self.left_s + (1 + RUNNING_LOSS) * self.plain_s - round_s)

    def collect(self, tokens: float) -> LossBudget:
        """After a round yielded `tokens`."""
        return self._with(self.left_s + (tokens - 1) * (1 + RUNNING_LOSS) * self.plain_s)

    def allows(self, round_s: float) -> bool:
        """Whether a round may be launched; a plain step always may."""
        return self.launch(round_s).left_s >= 0

    def _with(self, left_s: float) -> LossBudget:
        return replace(self, left_s=min(left_s, self.max_s))


@dataclass(frozen=True)
class ProposalEvidence:
    """A drafter's proposals before one sequence's rounds, used or not; older rounds weigh less."""

    rounds: float = 0.0
    hits: float = 0.0
    compared: float = 0.0
    matched: float = 0.0

    def add(self, row: RowResult) -> ProposalEvidence:
        """Adds a round of the sequence."""
        new = 1, row.proposals > 0, row.proposals_compared, row.proposals_matched
        old = self.rounds, self.hits, self.compared, self.matched
        return ProposalEvidence(*((1 - 1 / MEMORY_ROUNDS) * each + more for each, more in zip(old, new, strict=True)))

    def acceptance(self, hit: float, proposal_acceptance: float) -> tuple[float, float]:
        """Share of rounds with proposals, and their conditional acceptance, from the expected ones."""
        hits = (self.hits + PRIOR_DRAFTS * hit) / (self.rounds + PRIOR_DRAFTS)
        return hits, (self.matched + PRIOR_DRAFTS * proposal_acceptance) / (self.compared + PRIOR_DRAFTS)


class AdaptiveGamma:
    """The round with the most tokens per second at the acceptance seen so far, as far as the loss budget allows it.

    Of a plan with a drafter, rounds differ in the tiers that draft: the self-draft alone, the drafter alone, or both.
    Proposals that cost nothing are compared with the text whatever is used, so that every round tells how good they
    are; those of a head, after the rounds that used them. The tokens of a round are the mean over the sequences, each
    with the proposals that it had.
    Where plain steps are fastest, the cheapest drafting rounds probe whether that is still so.
    new_tokens: the most that the generation may have. Rows of a batch share the round and the self-drafts' acceptance.
    """

    def __init__(self, costs: RoundCosts, new_tokens: int) -> None:
        self._costs = costs
        self._budget = LossBudget.of(costs, new_tokens)
        longest = max(round_shape(kind).gamma for kind in costs.gammas)
        self._evidence, self._expected = Evidence.none(longest), costs.acceptance
        self._proposals: dict[int, ProposalEvidence] = {}  # by sequence
        self._interval, self._wait, self._probes = FIRST_WAIT, FIRST_WAIT, 0
        self.gamma: RoundKind = max(costs.gammas, key=self._speeds().__getitem__)

    def next(self) -> RoundKind:
        """See `GammaSchedule`."""
        gamma = self._affordable() if self.gamma else self._probe()
        self._budget = self._budget.launch(self._costs.seconds[gamma])
        return gamma

    def add(self, kind: RoundKind, rows: Sequence[RowResult]) -> None:
        """See `GammaSchedule`."""
        active = [row for row in rows if row.tokens]
        if not active:
            return
        tokens = sum(len(row.tokens) for row in active) / len(active)
        self._budget = self._budget.collect(tokens)
        if self._costs.drafter_known and (self._costs.always_proposed or round_shape(kind).depth):
            seen = self._proposals
            self._proposals = {
                index: seen.get(index, ProposalEvidence()).add(row) for index, row in enumerate(rows) if row.tokens
            }
        if kind:
            if not round_shape(kind).proposes_to_target:
                self._evidence = self._evidence.add(active, MEMORY_ROUNDS if self.gamma else PROBE_MEMORY_ROUNDS)
            self._settle(paid=tokens * self._costs.plain_s > self._costs.seconds[kind])
        elif self._proposals and self.gamma == 0:
            self.gamma = chosen_gamma(self._speeds(), self.gamma)

    def _settle(self, paid: bool) -> None:
        """Chooses anew after a drafting round. paid: whether it was faster than plain steps."""
        before, self.gamma = self.gamma, chosen_gamma(self._speeds(), self.gamma)
        if self.gamma:
            return
        if before:  # what this text's drafts did replaces what was predicted
            self._expected = self._evidence.acceptance_at(self._expected)[0]
            self._evidence = self._evidence.faded(PROBE_MEMORY_ROUNDS)
        if before or paid:
            self._interval, self._wait = FIRST_WAIT, 0 if paid else FIRST_WAIT
        else:
            self._interval = self._wait = min(2 * self._interval, LONGEST_WAIT)

    def _speeds(self) -> dict[RoundKind, float]:
        """Tokens per second by round."""
        acceptance_at = self._evidence.acceptance_at(self._expected)
        expected = self._costs.hit, self._costs.proposal_acceptance
        known = [evidence.acceptance(*expected) for evidence in self._proposals.values()] or [expected]
        return {
            kind: sum(tokens_of(kind, acceptance_at, *each) for each in known) / len(known) / round_s
            for kind, round_s in self._costs.seconds.items()
        }

    def _affordable(self) -> RoundKind:
        """The chosen round, or the fastest one that the budget allows."""
        allowed = [gamma for gamma, round_s in self._costs.seconds.items() if self._budget.allows(round_s)]
        if self.gamma in allowed:
            return self.gamma
        return max([0, *allowed], key=self._speeds().__getitem__)

    def _probe(self) -> RoundKind:
        """The cheapest drafting round if it is time for a probe that the budget allows, else 0.

        Proposals that are compared anyway need no probe, and those of a head take turns with self-drafts.
        """
        of_head = bool(self._probes % 2) and not self._costs.always_proposed
        drafting = self._costs.gammas[1:]
        tiers = [kind for kind in drafting if round_shape(kind).proposes_to_target == of_head] or drafting
        smallest = min(tiers, key=self._costs.seconds.__getitem__)
        if self._wait > 0 or not self._budget.allows(self._costs.seconds[smallest]):
            self._wait -= 1
            return 0
        self._wait, self._probes = self._interval, self._probes + 1
        return smallest


def chosen_gamma(speeds: dict[RoundKind, float], current: RoundKind) -> RoundKind:
    """The round to use from now on, from the expected speed of each.

    The current one is kept unless the fastest is faster by HYSTERESIS, or plain steps are faster than it.
    """
    fastest = max(speeds, key=speeds.__getitem__)
    loses = speeds[current] < speeds[0]
    return fastest if loses or speeds[fastest] > (1 + HYSTERESIS) * speeds[current] else current
