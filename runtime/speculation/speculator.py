"""Speculator: drafts tokens, verifies them with the target, and holds the result of each round.

With gamma 0 a round is one step of plain decoding, with the same code path and the same rule for flushes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeplan.kernels.sampling import draw, rejection_sample, row_uniform
from ridgeplan.kernels.sampling.reference import Choice, Greedy, VerifyResult
from ridgeplan.roofline.execution import RoundKind, RoundShape, round_shape
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.runtime.policies.base import AllTokensSelector, PromptObserver, TokenSelector
from ridgeplan.runtime.sampling import SamplingParams, all_finite
from ridgeplan.runtime.speculation.proposer import Proposed, Proposer
from ridgeplan.runtime.speculation.sparse_target import SparseTargetAttention


@dataclass(frozen=True, eq=False)
class RoundFigures:
    """A round's figures in one tensor, int64 [rows, gamma + 9], so that a single copy transfers them to the host."""

    values: Tensor

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        kept: Tensor,
        accepted: Tensor,
        verified: Tensor,
        finite: Tensor,
        proposed: Sequence[Tensor] = (),
    ) -> RoundFigures:
        """Packs a round's result.

        tokens: int64 [rows, gamma + 1]. kept: int64 [rows], tokens appended to the text, 0 for an inactive row.
        accepted, verified: int64 [rows], drafts that the target agreed with, and those compared with it. finite: bool
        [rows], whether all of the target's logits were finite. proposed: the last four fields of `RowResult`, int64
        [rows] each; zeros by default.
        """
        figures = [kept, accepted, verified, finite.long(), *(proposed or [torch.zeros_like(kept)] * 4)]
        return cls(torch.cat([tokens, torch.stack(figures, dim=1)], dim=1))

    @staticmethod
    def width(gamma: int) -> int:
        """Figures per row: tokens, of which it keeps the first `kept`, and the other eight arguments of `of`."""
        return gamma + 9

    def rows(self) -> list[RowResult]:
        """The result of each row, on the host."""
        return [RowResult(row[: row[-8]], row[-7], row[-6], bool(row[-5]), *row[-4:]) for row in self.values.tolist()]


@dataclass(frozen=True)
class RowResult:
    """One row's part of a round: the tokens that it keeps, and the number of its accepted and verified drafts.

    finite: whether all of the target's logits were finite. Of a plan with a drafter: drafted, the row's drafts that a
    cascade or the drafter made; proposals, those that the drafter had before the round, whether they were used or not;
    proposals_compared, those of them that can be compared with the row's tokens; proposals_matched, that equal them.
    """

    tokens: list[int]
    accepted: int
    verified: int
    finite: bool = True
    drafted: int = 0
    proposals: int = 0
    proposals_compared: int = 0
    proposals_matched: int = 0


FIRST, DRAFT, VERIFY, PROPOSE = range(4)  # what random numbers are for: `row_uniform`'s streams
NOTHING = RowResult([], 0, 0)  # the result of a finished row


@dataclass(frozen=True)
class RoundResult:
    """One round on the host.

    kind: as it was launched. seconds: device time of drafting, of verification with rejection sampling, and of
    keeping; "idle" is the device's wait since the previous round.
    """

    rows: list[RowResult]
    seconds: dict[str, float]
    kind: RoundKind = 0


@dataclass(frozen=True, eq=False)
class Drafts:
    """Drafted tokens int64 [rows, gamma], and the distributions, each of [rows], that they were drawn from.

    counts: int64 [rows], the first drafts of each row that count; None for all. proposed: what the plan's drafter
    proposed before the round.
    """

    tokens: Tensor
    choices: Sequence[Choice]
    counts: Tensor | None = None
    proposed: Proposed | None = None


@dataclass(frozen=True, eq=False)
class VerifiedRound:
    """The result of rejection sampling. finite: whether the target's logits were finite, bool [rows].

    drafts: what was verified, of a plan with a drafter.
    """

    result: VerifyResult
    finite: Tensor
    drafts: Drafts | None = None


@dataclass(frozen=True, eq=False)
class Speculator:
    """The parts of a round. Nothing here waits for the device, so a whole round can be captured as a graph.

    Between rounds, `pending` [rows] is each row's last token: emitted, but not in the cache yet. selector: chooses what
    drafts read. sparse_target: attention of a target that selects; None if it reads everything. seed: int64 [] on the
    device. Seed, row and position are the key of all random numbers, so that what a row samples does not depend on the
    other rows of its batch, as long as gamma does not. proposer: proposes up to `depth` tokens at a time.
    """

    decoder: Decoder
    target: DecoderWeights
    drafter: DecoderWeights
    cache: Cache
    selector: TokenSelector
    sampling: SamplingParams
    seed: Tensor
    sparse_target: SparseTargetAttention | None = None
    proposer: Proposer | None = None
    depth: int = 0

    @property
    def observers(self) -> list[PromptObserver]:
        """Whatever learns from prompts."""
        selectors = [each for each in self.selectors if not isinstance(each, AllTokensSelector)]
        return [*selectors, *([] if self.proposer is None else [self.proposer])]

    @property
    def selectors(self) -> list[TokenSelector]:
        """The drafts' selector, and the target's if it selects."""
        return [self.selector] if self.sparse_target is None else [self.selector, self.sparse_target.selector]

    def first(self, logits: Tensor) -> Tensor:
        """The tokens [rows] that follow the prompts, from logits [rows, vocab]."""
        return draw(self.sampling.choice(logits), self._uniform(FIRST, 1)[:, 0])

    def draft(self, pending: Tensor, kind: RoundKind) -> Drafts:
        """Drafts the tokens of a round; the cache has slots for up to `config.gamma`."""
        shape = round_shape(kind)
        self.cache.begin_streaming()
        self.selector.before_round()
        if self.proposer is None or not (shape.depth or self.proposer.free):
            return self._self_drafts(pending, shape.gamma)
        depth = self.depth if self.proposer.free else shape.depth
        proposed = self._proposals(self.proposer, pending[:, None], torch.zeros_like(pending), depth)
        if shape.proposes_to_target:
            tokens = proposed.tokens[:, : shape.depth].contiguous()
            return Drafts(tokens, proposed.choices[: shape.depth], proposed.counts.clamp_max(shape.depth), proposed)
        drafts = self._cascade(pending, shape, proposed) if shape.depth else self._self_drafts(pending, shape.gamma)
        return replace(drafts, proposed=proposed)

    def _proposals(self, proposer: Proposer, drafted: Tensor, counts: Tensor, depth: int, index: int = 0) -> Proposed:
        """What the proposer proposes to the pass `index` of a round, as `Proposer.propose` has it."""
        if proposer.free:
            return proposer.propose(drafted, counts, depth, self.sampling, self.seed)
        uniform = self._uniform(PROPOSE, (index + 1) * depth)[:, index * depth :]
        return proposer.propose(drafted, counts, depth, self.sampling, uniform)

    def _self_drafts(self, pending: Tensor, gamma: int) -> Drafts:
        """Drafts gamma tokens, with one forward pass each."""
        token, tokens, choices = pending, [], []
        uniform = self._uniform(DRAFT, gamma).t().contiguous()
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

    def _cascade(self, pending: Tensor, shape: RoundShape, proposed: Proposed) -> Drafts:
        """Drafts up to gamma tokens a row in passes of the self-draft, each of which verifies proposals.

        Proposals are accepted by rejection sampling from the self-draft's distribution, and each pass draws one token
        more. So drafts follow that distribution, as if it had drawn them one by one, and where a row's drafts end
        depends on no token after them: the target may verify them as it does all others.
        """
        assert self.proposer is not None, "a cascade has a drafter"
        gamma, passes, depth = shape
        rows = len(pending)
        ahead = torch.arange(depth + 1, device=pending.device)
        tokens = torch.cat([pending[:, None], pending.new_zeros(rows, gamma + depth + 1)], dim=1)
        counts, logits_at = torch.zeros_like(pending), None
        uniform = self._uniform(DRAFT, passes * (depth + 1)).unflatten(1, (passes, depth + 1))
        self.selector.before_drafts()
        for index in range(passes):
            if index:
                proposed = self._proposals(self.proposer, tokens, counts, depth, index)
            places = counts[:, None] + ahead
            queries = torch.cat([tokens.gather(1, counts[:, None]), proposed.tokens], dim=1)
            metadata = self.selector.draft_metadata(counts.int(), depth + 1)
            observer = self.proposer.observer(counts, depth + 1)
            logits = self.decoder.step(self.drafter, self.cache, queries, metadata, observer)
            choice, room = self.sampling.choice(logits), (gamma - counts).int()
            drawn_from = proposed.choices, proposed.tokens, room, uniform[:, index]
            result = rejection_sample(choice, *drawn_from, proposed.counts)
            tokens.scatter_(1, places + 1, result.tokens)
            if not isinstance(choice, Greedy):  # beyond a row's drafts the next pass writes over them
                if logits_at is None:
                    logits_at = logits.new_zeros(gamma + 1, rows, logits.shape[-1])
                row = torch.arange(rows, device=pending.device)[:, None]
                logits_at[places.clamp_max(gamma), row] = logits
            counts = counts + result.advance
        drafted = tokens[:, 1 : gamma + 1].contiguous()
        choices = [Greedy(token) for token in drafted.unbind(1)]
        if logits_at is not None:
            return Drafts(drafted, [self.sampling.choice(logits) for logits in logits_at[:gamma]], counts)
        return Drafts(drafted, choices, counts)

    def target_logits(self, tokens: Tensor) -> Tensor:
        """Logits [rows, queries, vocab] of the target for tokens [rows, queries] that follow the cached ones."""
        self.selector.before_pass(tokens, 0)
        if self.sparse_target is None:
            metadata = self.selector.target_metadata(tokens.shape[1])
        else:
            metadata = self.sparse_target.metadata(tokens)
        observer = None if self.proposer is None else self.proposer.observer(0, tokens.shape[1])
        return self.decoder.step(self.target, self.cache, tokens, metadata, observer)

    def append(self, tokens: Tensor) -> Tensor:
        """Adds tokens [rows, queries] to the cache as if a verification had accepted all; logits [rows, vocab] follow.

        queries: up to the cache's gamma + 1, and within one group.
        """
        queries = tokens.shape[1]
        self.cache.begin_streaming()
        self.selector.before_round()
        logits = self.target_logits(tokens)
        self.selector.after_verification(tokens.new_full((len(tokens),), queries - 1))
        self.cache.advance(self.cache.active().int() * queries)
        return logits[:, -1]

    def verify(self, pending: Tensor, drafts: Drafts) -> VerifiedRound:
        """Verifies the drafts in one pass of the target, whose KV replaces theirs."""
        tokens = torch.cat([pending[:, None], drafts.tokens], dim=1)
        logits = self.target_logits(tokens)
        uniform = self._uniform(VERIFY, tokens.shape[1])
        result = rejection_sample(
            self.sampling.choice(logits), drafts.choices, drafts.tokens, self.cache.max_tokens(), uniform, drafts.counts
        )
        self.selector.after_verification(result.accepted)
        return VerifiedRound(result, all_finite(logits).all(dim=1), None if self.proposer is None else drafts)

    def keep(self, pending: Tensor, verification: VerifiedRound, active: Tensor) -> tuple[Tensor, RoundFigures]:
        """Advances the rows in `active`, bool [rows]; the others repeat their last round without effect.

        Returns the next pending tokens and the round's figures.
        """
        result, finite = verification.result, verification.finite
        kept, accepted, verified = (count * active for count in (result.advance, result.accepted, result.verified))
        proposed: Sequence[Tensor] = ()
        if self.proposer is not None and verification.drafts is not None:
            if verification.drafts.proposed is not None:
                proposed = _compared(verification.drafts, verification.drafts.proposed, result.tokens, kept)
            self.proposer.keep(pending, result.tokens)
        self.cache.advance(kept.int())
        last = result.tokens.gather(1, (kept - 1).clamp_min(0)[:, None])[:, 0]
        figures = RoundFigures.of(result.tokens, kept, accepted, verified, finite, proposed)
        return torch.where(active, last, pending), figures

    def _uniform(self, stream: int, draws: int) -> Tensor:
        """Random numbers [rows, draws] of a purpose. Every round begins at another position of a row's text."""
        return row_uniform(self.seed, self.cache.accepted, stream, draws)


def _compared(drafts: Drafts, proposals: Proposed, tokens: Tensor, kept: Tensor) -> list[Tensor]:
    """The figures of a drafter, each int64 [rows], from the tokens [rows, gamma + 1] of which rows keep `kept`."""
    proposed, counts, _ = proposals
    width = min(proposed.shape[1], tokens.shape[1])
    inside = torch.minimum(kept, counts).clamp_max(width)
    equal = proposed[:, :width] == tokens[:, :width]
    matched = (equal & (torch.arange(width, device=tokens.device) < inside[:, None])).long().cumprod(1).sum(1)
    active = (kept > 0).long()
    drafted = torch.zeros_like(kept) if drafts.counts is None else drafts.counts * active
    return [drafted, counts * active, torch.minimum(matched + 1, inside), matched]
