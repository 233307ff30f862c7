"""Proposers, whose tokens self-drafts or the target verify, inside a captured round and on tensors of fixed size."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.sampling.suffix_lookup import Proposals, suffix_lookup
from ridgeplan.roofline.plan.plan import Drafter, DrafterKind
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.policies.base import PromptObserver


class SuffixProposer(PromptObserver):
    """Proposes tokens by suffix lookup in the prompt and in what was generated. Proposals are certain: not drawn."""

    def __init__(self, drafter: Drafter, cache: Cache) -> None:
        self._cache, self._min_match = cache, drafter.min_match
        # A row's text, the tokens of its last round, and those that passes of the self-draft write beyond them.
        capacity = cache.config.context + 2 * cache.config.round_slots
        self._text = torch.zeros(cache.config.batch, capacity, dtype=torch.int32, device=cache.lengths.device)

    def before_prefill(self, row: int, prompt: Tensor) -> None:
        self._text[row, : len(prompt)] = prompt

    def propose(self, drafted: Tensor, counts: Tensor, depth: int) -> Proposals:
        """Proposes `depth` tokens after each row's text and `counts` drafts of this round, int64 [rows].

        drafted: int64 [rows, n], the pending token and the drafts; what follows a row's drafts is not read.
        """
        self._write(drafted)
        rows = self._cache.rows
        return suffix_lookup(self._text[:rows], (self._cache.accepted + 1 + counts).int(), depth, self._min_match)

    def keep(self, pending: Tensor, tokens: Tensor) -> None:
        """A round has ended, and the cache is about to advance. tokens: int64 [rows, gamma + 1], some of which stay."""
        self._write(torch.cat([pending[:, None], tokens], dim=1))

    def _write(self, tokens: Tensor) -> None:
        """Writes tokens [rows, n] from the pending one on."""
        places = self._cache.accepted[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self._text[: self._cache.rows].scatter_(1, places.long(), tokens.int())


def make_proposer(drafter: Drafter, cache: Cache) -> SuffixProposer | None:
    """The proposer of a plan's drafter over one cache; None without one."""
    return SuffixProposer(drafter, cache) if drafter.kind is DrafterKind.SUFFIX else None
