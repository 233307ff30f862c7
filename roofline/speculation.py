"""Speculative decoding: expected tokens per round, break-even acceptance and best gamma.

Acceptance is conditional throughout: the probability that a drafted token is accepted, given that all earlier ones of
its round were (Leviathan et al. 2023; SpecAttn, section 3.2). QuantSpec's tables report accepted / (gamma x rounds)
instead, which `accepted_share` computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from ridgeplan.roofline.cost import Term, is_symbolic, minimum

MAX_GAMMA = 15  # gamma + 1 verification queries fill one 16-row tensor-core tile


def tokens_per_round(acceptance: Term, gamma: Term) -> Term:
    """Expected tokens per round, the target's own included: (1 - a^(gamma + 1)) / (1 - a) at acceptance a.

    Leviathan et al., Eq 1. The limit at a = 1 is gamma + 1; numbers are clamped to just below 1.
    """
    below_one = acceptance if is_symbolic(acceptance) else minimum(acceptance, 1 - 1e-9)
    return (1 - below_one ** (gamma + 1)) / (1 - below_one)


def tokens_at(acceptance_at: Sequence[float], gamma: int) -> float:
    """Expected tokens per round from the conditional acceptance of each position: 1 + a1 + a1 a2 + ... a_gamma.

    `tokens_per_round` is the case of equal ones (Leviathan et al., Eq 1).
    """
    return 1 + sum(accumulate(acceptance_at[:gamma], mul))


def accepted_share(acceptance: Term, gamma: Term) -> Term:
    """Accepted over drafted tokens, which QuantSpec calls acceptance rate (QuantSpec-6)."""
    return (tokens_per_round(acceptance, gamma) - 1) / gamma


def conditional_acceptance(share: float, gamma: int) -> float:
    """The acceptance at which `accepted_share` is `share`, for gamma of 1 or more: its inverse (QuantSpec-6).

    a + a^2 + ... + a^gamma = gamma x share has one positive root.
    """
    roots = np.roots([*[1.0] * gamma, -gamma * share])
    return float(max(root.real for root in roots if abs(root.imag) < 1e-9))


def flush_capped(tokens: Term, group: Term) -> Term:
    """Tokens per round where rounds end at flush boundaries, every `group` tokens (QuantSpec-4).

    A round that would cross a boundary loses the tokens beyond it: (tokens - 1) / 2 per boundary on average.
    """
    return tokens * group / (group + (tokens - 1) / 2)


def speedup(acceptance: Any, gamma: Any, draft_cost: Any, verify_cost: Any) -> Any:
    """Speed-up over plain decoding; costs are in units of one plain step (Leviathan et al., Theorem 3.8)."""
    return tokens_per_round(acceptance, gamma) / (gamma * draft_cost + verify_cost)


def best_gamma(acceptance: float, draft_cost: float, verify_cost: float = 1.0) -> int:
    """The gamma in 0..15 with the highest speed-up; 0 where none is faster than plain decoding."""
    gains = {
        gamma: tokens_per_round(acceptance, gamma) / (gamma * draft_cost + verify_cost)
        for gamma in range(1, MAX_GAMMA + 1)
    }
    best = max(gains, key=lambda gamma: gains[gamma])
    return best if gains[best] > 1 else 0


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a round by gamma, the first of which is 0: a plain step of the same target.

    acceptance: the predicted conditional acceptance of the drafts.
    """

    seconds: dict[int, float]
    acceptance: float

    @property
    def gammas(self) -> tuple[int, ...]:
        """Ascending, from 0."""
        return tuple(self.seconds)

    @property
    def plain_s(self) -> float:
        """A plain step."""
        return self.seconds[0]
