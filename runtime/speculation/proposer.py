"""Proposers, whose tokens self-drafts or the target verify, inside a captured round and on tensors of fixed size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeplan.kernels.sampling import draw
from ridgeplan.kernels.sampling.reference import Choice, Greedy
from ridgeplan.kernels.sampling.suffix_lookup import suffix_lookup
from ridgeplan.roofline.execution import PREFILL_CHUNK_TOKENS
from ridgeplan.roofline.plan.plan import Drafter, DrafterKind
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata, LayerKV
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.model.decoder import StreamObserver
from ridgeplan.runtime.policies.base import PromptObserver
from ridgeplan.runtime.sampling import SamplingParams
from ridgeplan.runtime.speculation.draft_head import DraftHead
from ridgeplan.runtime.speculation.mtp_head import MTPHead


class Proposed(NamedTuple):
    """Proposed tokens int64 [rows, depth], how many of them count, int64 [rows], and what each was drawn from."""

    tokens: Tensor
    counts: Tensor
    choices: Sequence[Choice]


class Proposer(PromptObserver):
    """Proposes tokens that follow each row's text, which it keeps."""

    free = False  # whether proposals cost so little that rounds which do not use them have them, too

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        # A row's text, the tokens of its last round, and those that passes of the self-draft write beyond them.
        self._capacity = cache.config.context + 2 * cache.config.round_slots
        self._text = torch.zeros(cache.config.batch, self._capacity, dtype=torch.int32, device=cache.lengths.device)

    def before_prefill(self, row: int, prompt: Tensor) -> None:
        self._text[row, : len(prompt)] = prompt

    def propose(
        self, drafted: Tensor, counts: Tensor, depth: int, sampling: SamplingParams, uniform: Tensor
    ) -> Proposed:
        """Proposes `depth` tokens after each row's text and `counts` drafts of this round, int64 [rows].

        drafted: int64 [rows, n], the pending token and the drafts; what follows a row's drafts is not read.
        uniform: float64 [rows, depth], random numbers.
        """
        raise NotImplementedError

    def observer(self, counts: Tensor | int, queries: int) -> StreamObserver | None:
        """What learns from a pass over `queries` tokens, from `counts` tokens after the cached ones on."""
        return None

    def keep(self, pending: Tensor, tokens: Tensor) -> None:
        """A round has ended, and the cache is about to advance. tokens: int64 [rows, gamma + 1], some of which stay."""
        self._write(torch.cat([pending[:, None], tokens], dim=1))

    def _write(self, tokens: Tensor) -> None:
        """Writes tokens [rows, n] from the pending one on."""
        places = self._cache.accepted[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self._text[: self._cache.rows].scatter_(1, places.long(), tokens.int())


class SuffixProposer(Proposer):
    """Proposes tokens by suffix lookup in the prompt and in what was generated. Proposals are certain: not drawn."""

    free = True

    def __init__(self, drafter: Drafter, cache: Cache) -> None:
        super().__init__(cache)
        self._min_match = drafter.min_match

    def propose(
        self, drafted: Tensor, counts: Tensor, depth: int, sampling: SamplingParams, uniform: Tensor
    ) -> Proposed:
        self._write(drafted)
        text, lengths = self._text[: self._cache.rows], (self._cache.accepted + 1 + counts).int()
        tokens, matched = suffix_lookup(text, lengths, depth, self._min_match)
        return Proposed(tokens, matched, [Greedy(token) for token in tokens.unbind(1)])


class HeadProposer(Proposer):
    """Proposes tokens by a draft head, which reads the target's stream at some depths.

    Position p of the head's cache belongs to the target's stream at p and the token at p + 1. A pass leaves its
    streams in a ring of the latest positions, where they cost nothing but a copy; the next proposals bring the head's
    cache up to date with them. In a cascade the self-draft's passes leave theirs, and the verification replaces them.
    Positions that no proposals followed in time are lost: the head then reads from the next one on.
    """

    def __init__(self, drafter: Drafter, cache: Cache, head: DraftHead | MTPHead) -> None:
        super().__init__(cache)
        self._head, self._window, config = head, drafter.window, cache.config
        # The positions that a pass of the target or of the self-draft adds.
        self._recent = max(config.gamma, drafter.depth) + 1
        shape, embedding = head.config.layer.shape, head.weights.embedding
        # The last place takes what is not to be kept.
        self._streams = embedding.new_zeros(len(head.config.depths), config.batch, self._recent + 1, shape.hidden)
        # Slots ahead of the first position take what is not to be written.
        sizes = config.batch, shape.kv_heads, self._recent + self._capacity + drafter.depth, shape.head_dim
        self._keys, self._values = embedding.new_zeros(sizes), embedding.new_zeros(sizes)
        self._features = embedding.new_zeros(0)  # of the prompt that is being processed
        # By row: the first position in the ring and in the cache without a gap, and the end of those in the cache.
        self._in_ring, self._in_cache, self._end = (torch.zeros_like(cache.lengths, dtype=torch.int64) for _ in "abc")
        self._offsets = torch.arange(self._recent, device=embedding.device)

    states = None

    @property
    def accepted(self) -> Tensor:
        """See `KVAccess`."""
        return self._cache.accepted

    def full(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `KVAccess`."""
        rows = self._cache.rows
        return self._keys[:rows], self._values[:rows]

    @contextlib.contextmanager
    def layer_kv(self, layer: int, metadata: AttentionMetadata) -> Iterator[LayerKV]:
        """See `KVAccess`."""
        yield LayerKV(*self.full(layer), metadata.begin, metadata.end, None, None)

    def before_prefill(self, row: int, prompt: Tensor) -> None:
        super().before_prefill(row, prompt)
        tokens = len(prompt)
        self._in_ring[row], self._end[row] = max(0, tokens - self._recent), tokens
        self._prompt_tokens, self._first = tokens, max(0, tokens - self._window) if self._window else 0
        self._in_cache[row] = self._first

    def observe_prompt(self, depth: int, row: int, start: int, stream: Tensor) -> None:
        depths, stop, first = self._head.config.depths, start + len(stream), max(start, self._first)
        if depth not in depths or stop <= first:
            return
        stream = stream[first - start :]
        if depth == min(depths):
            self._features = stream.new_zeros(stream.shape)
        for index in (index for index, each in enumerate(depths) if each == depth):
            for chunk in range(0, len(stream), PREFILL_CHUNK_TOKENS):
                part = slice(chunk, chunk + PREFILL_CHUNK_TOKENS)
                self._features[part] += self._head.fuse_part(index, stream[part])
            latest = stream[max(0, self._prompt_tokens - self._recent - first) :]
            places = torch.arange(stop - len(latest), stop, device=stream.device) % self._recent
            self._streams[index, row, places] = latest
        if depth == max(depths):
            self._store_prompt(row, first, min(stop, self._prompt_tokens - 1))

    def _store_prompt(self, row: int, first: int, stop: int) -> None:
        """Keys and values of the prompt's positions from `first` to `stop`: those whose next token it has."""
        rows, text = slice(row, row + 1), self._text[row].long()
        for start in range(first, stop, PREFILL_CHUNK_TOKENS):
            end = min(stop, start + PREFILL_CHUNK_TOKENS)
            positions = torch.arange(start, end, device=text.device)[None]
            features, slots = self._features[None, start - first : end - first], positions + self._recent
            tokens = text[None, start + 1 : end + 1]
            self._head.project(tokens, features, positions, slots, self._keys[rows], self._values[rows])
        self._features = self._features.new_zeros(0)

    def observer(self, counts: Tensor | int, queries: int) -> StreamObserver:
        """Rows that are not active keep what the ring has of them."""
        rows, active = self._cache.rows, self._cache.active()
        start = self._cache.accepted.long() + counts
        places = (start[:, None] + torch.arange(queries, device=start.device)) % self._recent
        known = torch.maximum(torch.minimum(self._in_ring[:rows], start), start + queries - self._recent)
        self._in_ring[:rows] = torch.where(active, known, self._in_ring[:rows])
        places = torch.where(active[:, None], places, self._recent)
        return _RingWriter(self._head.config.depths, self._streams[:, :rows], places[..., None])

    def propose(
        self, drafted: Tensor, counts: Tensor, depth: int, sampling: SamplingParams, uniform: Tensor
    ) -> Proposed:
        self._write(drafted)
        rows, recent, head = self._cache.rows, self._recent, self._head
        in_ring, accepted = self._in_ring[:rows], self._cache.accepted.long()
        last = accepted + counts  # the last token's position
        positions = (last - recent)[:, None] + self._offsets
        # Only what the ring has is written, and that again which the cache has already.
        slots = torch.where(positions >= in_ring[:, None], positions + recent, self._offsets)
        self._in_cache[:rows] = torch.where(in_ring > self._end[:rows], in_ring, self._in_cache[:rows])
        self._end[:rows] = accepted
        # Made before any other kernel: attention may read them before the kernel ahead of it has ended.
        begin, ends = (self._in_cache[:rows] + recent).int(), [(last + recent + step).int() for step in range(depth)]
        ring = self._streams[:, :rows]
        places = (positions % recent)[None, ..., None].expand(len(ring), -1, -1, ring.shape[-1])
        features = head.fused(ring.gather(2, places))
        inputs = self._text[:rows].gather(1, (positions + 1).clamp_min(0)).long()
        tokens: list[Tensor] = []
        choices: list[Choice] = []
        for step in range(depth):
            residual, queries = head.project(inputs, features, positions.clamp_min(0), slots, self._keys, self._values)
            metadata = AttentionMetadata(positions, slots, begin, ends[step], None, lower=False)
            features, logits = head.finish(residual[:, -1:], queries[:, -1:].contiguous(), self, metadata)
            choices.append(sampling.choice(head.in_target_vocabulary(logits[:, 0])))
            tokens.append(draw(choices[-1], uniform[:, step].contiguous()))
            inputs, positions = tokens[-1][:, None], (last + step)[:, None]
            slots = positions + recent
        return Proposed(torch.stack(tokens, dim=1), torch.full_like(counts, depth), choices)


class _RingWriter:
    """Copies the streams of a pass to a ring [depths, rows, places, hidden]. places: int64 [rows, queries, 1]."""

    def __init__(self, depths: Sequence[int], streams: Tensor, places: Tensor) -> None:
        self._depths, self._streams, self._places = depths, streams, places

    def observe(self, depth: int, stream: Tensor) -> None:
        """See `StreamObserver`."""
        for index in (index for index, each in enumerate(self._depths) if each == depth):
            self._streams[index].scatter_(1, self._places.expand(stream.shape), stream)


def make_proposer(drafter: Drafter, cache: Cache, head: DraftHead | MTPHead | None = None) -> Proposer | None:
    """The proposer of a plan's drafter over one cache; None without one. head: of plans that have one."""
    if drafter.kind is DrafterKind.SUFFIX:
        return SuffixProposer(drafter, cache)
    return HeadProposer(drafter, cache, head) if head is not None else None
