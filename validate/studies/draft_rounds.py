"""Rounds of speculative decoding that are observed: what drafts and target have in common, and what rounds keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from ridgeplan.kernels.sampling.reference import Choice, Greedy
from ridgeplan.runtime.decode_loop import DecodeLoop
from ridgeplan.runtime.request import Request
from ridgeplan.runtime.speculation.gamma_control import FixedGamma
from ridgeplan.runtime.speculation.rounds import EagerRounds
from ridgeplan.runtime.speculation.speculator import Drafts, Speculator, VerifiedRound
from ridgeplan.runtime.statistics import Stopwatch


@dataclass(frozen=True)
class RoundCounts:
    """Some rounds of one kind of draft.

    verified: drafts by position whose predecessors in the round were all accepted. accepted: of these, the sum of their
    probabilities of acceptance. tokens: that the rounds kept; 0 if no token was rejected, however unlikely.
    """

    rounds: int
    verified: tuple[int, ...]
    accepted: tuple[float, ...]
    tokens: int = 0

    @classmethod
    def total(cls, parts: Iterable[RoundCounts]) -> Self:
        """All rounds of the parts, which have equally many positions; at least one part."""
        every = list(parts)
        verified, accepted = (
            zip(*(getattr(part, name) for part in every), strict=True) for name in ("verified", "accepted")
        )
        sums = tuple(map(sum, verified)), tuple(map(sum, accepted))
        return cls(sum(part.rounds for part in every), *sums, sum(part.tokens for part in every))


def common_share(target: Choice, draft: Choice, position: int) -> Tensor:
    """The probability [rows] that the target accepts a token drawn from the draft's choice [rows] at a position.

    target: the choices [rows, positions]. Of two distributions that is sum(min(p, q)) (Leviathan et al. 2023, section
    3.3), of greedy choices 1 or 0.
    """
    if isinstance(target, Greedy) and isinstance(draft, Greedy):
        return (target.best[:, position] == draft.best).float()
    assert not isinstance(target, Greedy) and not isinstance(draft, Greedy), "one request samples both"
    shared = torch.minimum(target.probabilities()[:, position], draft.probabilities()).sum(-1)
    return shared.clamp_max(1)  # sums of float32 probabilities may pass 1


@dataclass(frozen=True, eq=False)
class ObservedSpeculator(Speculator):
    """A speculator of one sequence that counts its rounds in `observed`."""

    observed: list[RoundCounts] = field(default_factory=list)
    _logits: list[Tensor] = field(default_factory=list)

    def target_logits(self, tokens: Tensor) -> Tensor:
        self._logits.append(super().target_logits(tokens))
        return self._logits[-1]

    def verify(self, pending: Tensor, drafts: Drafts) -> VerifiedRound:
        verification = super().verify(pending, drafts)
        target, result = self.sampling.choice(self._logits.pop()), verification.result
        shared = torch.cat([common_share(target, draft, place) for place, draft in enumerate(drafts.choices)]).tolist()
        verified = tuple(int(place < int(result.verified)) for place in range(len(shared)))
        accepted = tuple(share * counts for share, counts in zip(shared, verified, strict=True))
        self.observed.append(RoundCounts(1, verified, accepted, int(result.advance)))
        return verification


def observe_rounds(speculator: ObservedSpeculator, request: Request, first: Tensor) -> RoundCounts:
    """Rounds that go on after the first tokens [1], as an engine's generation does, to the end of the request.

    The cache holds the prompt. Neither the first round counts, whose sets come from prefill, nor the last, which the
    request's end may cut. Raises ValueError for a request of fewer than three rounds.
    """
    schedule, stopwatch = FixedGamma(speculator.cache.config.gamma), Stopwatch(speculator.cache.lengths.device)
    loop = DecodeLoop(request, speculator, schedule, None, lambda speculator, _: EagerRounds(speculator), stopwatch)
    for _ in loop.steps(first):
        pass
    counted = speculator.observed[1:-1]
    if not counted:
        raise ValueError(f"{request.max_new_tokens} tokens took {len(speculator.observed)} rounds; needed: 3")
    return RoundCounts.total(counted)
