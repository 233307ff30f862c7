"""Speculator: drafts tokens, verifies them with the target, and holds the result of each round.

With gamma 0 a round is one step of plain decoding, with the same code path and the same rule for flushes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.kernels.sampling import draw, rejection_sample, row_uniform
from ridgeplan.kernels.sampling.reference import Choice, VerifyResult
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.runtime.policies.base import TokenSelector
from ridgeplan.runtime.sampling import SamplingParams, all_finite
from ridgeplan.runtime.speculation.sparse_target import SparseTargetAttention


@dataclass(frozen=True, eq=False)
class RoundFigures:
    """A round's figures in one tensor, int64 [rows, gamma + 5], so that a single copy transfers them to the host."""

    values: Tensor

    @classmethod
    def of(cls, tokens: Tensor, kept: Tensor, accepted: Tensor, verified: Tensor, finite: Tensor) -> RoundFigures:
        """Packs a round's result.

        tokens: int64 [rows, gamma + 1]. kept: int64 [rows], tokens appended to the text, 0 for an inactive row.
        accepted, verified: int64 [rows], drafts that the target agreed with, and those compared with it. finite: bool
        [rows], whether all of the target's logits were finite.
        """
        return cls(torch.cat([tokens, torch.stack([kept, accepted, verified, finite], dim=1)], dim=1))

    @staticmethod
    def width(gamma: int) -> int:
        """Figures per row: tokens, of which it keeps the first `kept`, and the other four arguments of `of`."""
        return gamma + 5

    def rows(self) -> list[RowResult]:
        """The result of each row, on the host."""
        return [
            RowResult(row[: row[-4]], accepted=row[-3], verified=row[-2], finite=bool(row[-1]))
            for row in self.values.tolist()
        ]


@dataclass(frozen=True)
class RowResult:
    """One row's part of a round: the tokens that it keeps, and the number of its accepted and verified drafts.

    finite: whether all of the target's logits were finite.
    """

    tokens: list[int]
    accepted: int
    verified: int
    finite: bool = True


FIRST, DRAFT, VERIFY = range(3)  # what random numbers are for: `row_uniform`'s streams
NOTHING = RowResult([], 0, 0)  # the result of a finished row


@dataclass(frozen=True)
class RoundResult:
    """One round on the host.

    gamma: drafts of each row. seconds: device time of drafting, of verification with rejection sampling, and of
    keeping; "idle" is the device's wait since the previous round.
    """

    rows: list[RowResult]
    seconds: dict[str, float]
    gamma: int = 0


@dataclass(frozen=True, eq=False)
class Drafts:
    """Drafted tokens int64 [rows, gamma], and the distributions, each of [rows], that they were drawn from."""

    tokens: Tensor
    choices: Sequence[Choice]


@dataclass(frozen=True, eq=False)
class VerifiedRound:
    """The result of rejection sampling. finite: whether the target's logits were finite, bool [rows]."""

    result: VerifyResult
    finite: Tensor


@dataclass(frozen=True, eq=False)
class Speculator:
    """The parts of a round. Nothing here waits for the device, so a whole round can be captured as a graph.

    Between rounds, `pending` [rows] is each row's last token: emitted, but not in the cache yet. selector: chooses what
    drafts read. sparse_target: attention of a target that selects; None if it reads everything. seed: int64 [] on the
    device. Seed, row and position are the key of all random numbers, so that what a row samples does not depend on the
    other rows of its batch, as long as gamma does not.
    """

    decoder: Decoder
    target: DecoderWeights
    drafter: DecoderWeights
    cache: Cache
    selector: TokenSelector
    sampling: SamplingParams
    seed: Tensor
    sparse_target: SparseTargetAttention | None = None

    @property
    def selectors(self) -> list[TokenSelector]:
        """The selectors that learn from prompts: the drafts', and the target's if it selects."""
        return [self.selector] if self.sparse_target is None else [self.selector, self.sparse_target.selector]

    def first(self, logits: Tensor) -> Tensor:
        """The tokens [rows] that follow the prompts, from logits [rows, vocab]."""
        return draw(self.sampling.choice(logits), self._uniform(FIRST, 1)[:, 0])

    def draft(self, pending: Tensor, gamma: int) -> Drafts:
        """Drafts gamma tokens, with one forward pass each; the cache has slots for up to `config.gamma`."""
        token, tokens, choices = pending, [], []
        uniform = self._uniform(DRAFT, gamma).t().contiguous()
        self.cache.begin_streaming()
        self.selector.before_round()
        if gamma:
            self.selector.before_drafts()
        for offset in range(gamma):
            self.selector.before_pass(token[:, None], offset)
            metadata = self.selector.draft_metadata(offset)
            logits = self.decoder.step(self.drafter, self.cache, token[:, None], metadata)
            choices.append(self.sampling.choice(logits[:, 0]))
            token = draw(choices[-1], uniform[offset])
            tokens.append(token)
        drafted = torch.stack(tokens, dim=1) if tokens else pending.new_zeros(len(pending), 0)
        return Drafts(drafted, choices)

    def target_logits(self, tokens: Tensor) -> Tensor:
        """Logits [rows, queries, vocab] of the target for tokens [rows, queries] that follow the cached ones."""
        self.selector.before_pass(tokens, 0)
        if self.sparse_target is None:
            metadata = self.selector.target_metadata(tokens.shape[1])
        else:
            metadata = self.sparse_target.metadata(tokens)
        return self.decoder.step(self.target, self.cache, tokens, metadata)

    def verify(self, pending: Tensor, drafts: Drafts) -> VerifiedRound:
        """Verifies the drafts in one pass of the target, whose KV replaces theirs."""
        tokens = torch.cat([pending[:, None], drafts.tokens], dim=1)
        logits = self.target_logits(tokens)
        uniform = self._uniform(VERIFY, tokens.shape[1])
        result = rejection_sample(
            self.sampling.choice(logits), drafts.choices, drafts.tokens, self.cache.max_tokens(), uniform
        )
        self.selector.after_verification(result.accepted)
        return VerifiedRound(result, all_finite(logits).all(dim=1))

    def keep(self, pending: Tensor, verification: VerifiedRound, active: Tensor) -> tuple[Tensor, RoundFigures]:
        """Advances the rows in `active`, bool [rows]; the others repeat their last round without effect.

        Returns the next pending tokens and the round's figures.
        """
        result, finite = verification.result, verification.finite
        kept, accepted, verified = (count * active for count in (result.advance, result.accepted, result.verified))
        self.cache.advance(kept.int())
        last = result.tokens.gather(1, (kept - 1).clamp_min(0)[:, None])[:, 0]
        return torch.where(active, last, pending), RoundFigures.of(result.tokens, kept, accepted, verified, finite)

    def _uniform(self, stream: int, draws: int) -> Tensor:
        """Random numbers [rows, draws] of a purpose. Every round begins at another position of a row's text."""
        cache = self.cache
        return row_uniform(self.seed, (cache.lengths + cache.evicted)[: cache.rows], stream, draws)
