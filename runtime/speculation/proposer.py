"""Proposers: what drafts below the self-drafts. They work inside a captured round, on tensors of fixed size."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ridgeplan.kernels.sampling.suffix_lookup import Proposals, suffix_lookup
from ridgeplan.roofline.plan.plan import Drafter, DrafterKind
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.policies.base import PromptObserver


class Proposer(Protocol):
    """Proposes tokens that a pass of the self-draft, or the target, verifies. Proposals are certain: not drawn."""

    def propose(self, drafted: Tensor, counts: Tensor, depth: int) -> Proposals:
        """Proposes `depth` tokens after each row's text and `counts` drafts of this round, int64 [rows].

        drafted: int64 [rows, n], the pending token and the drafts; what follows a row's drafts is not read.
        """

    def keep(self, pending: Tensor, tokens: Tensor) -> None:
        """A round has ended, and the cache is about to advance. tokens: int64 [rows, gamma + 1], some of which stay."""


class SuffixProposer(PromptObserver):
    """Suffix lookup in the prompt and in what was generated. text: int32 [batch, capacity]."""

    def __init__(self, drafter: Drafter, cache: Cache) -> None:
        self._cache, self._min_match = cache, drafter.min_match
        # A row's text, the tokens of its last round, and those that passes of the self-draft write beyond them.
        capacity = cache.config.context + 2 * cache.config.round_slots
        self._text = torch.zeros(cache.config.batch, capacity, dtype=torch.int32, device=cache.lengths.device)

    def before_prefill(self, row: int, prompt: Tensor) -> None:
        self._text[row, : len(prompt)] = prompt

    def propose(self, drafted: Tensor, counts: Tensor, depth: int) -> Proposals:
        self._write(drafted)
        rows = self._cache.rows
        return suffix_lookup(self._text[:rows], (self._positions() + 1 + counts).int(), depth, self._min_match)

    def keep(self, pending: Tensor, tokens: Tensor) -> None:
        self._write(torch.cat([pending[:, None], tokens], dim=1))

    def _positions(self) -> Tensor:
        """The place of each row's pending token in its text, int32 [rows]."""
        return (self._cache.lengths + self._cache.evicted)[: self._cache.rows]

    def _write(self, tokens: Tensor) -> None:
        """Writes tokens [rows, n] from the pending one on."""
        places = self._positions()[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self._text[: self._cache.rows].scatter_(1, places.long(), tokens.int())


def make_proposer(drafter: Drafter, cache: Cache) -> SuffixProposer | None:
    """The proposer of a plan's drafter over one cache; None without one."""
    return SuffixProposer(drafter, cache) if drafter.kind is DrafterKind.SUFFIX else None
