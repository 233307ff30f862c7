"""What a policy has to do, and what those that read all tokens do."""

from __future__ import annotations

import copy
from typing import Self

from torch import Tensor

from ridgeplan.planner.axes.draft_selection import DraftSelection
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.metadata import AttentionMetadata


class DraftPolicy:
    """Chooses what each draft of a round reads, or each query of a target, with the hyperparameters of the plan.

    An engine makes one for drafts and one for a target that selects (target_reads.py), beside its cache. Between
    `start` and the end of a generation its methods run inside the round that a CUDA graph captures: they work on
    tensors of fixed size and never ask the device for a value. Only `before_prefill` and `after_prefill` run outside.
    """

    window = 0  # of a prompt's last queries, which `after_prefill` is given

    def __init__(self, selection: DraftSelection, cache: Cache) -> None:
        self.selection, self.cache = selection, cache

    def start(self) -> None:
        """Forgets the last generation; the cache has been emptied."""

    def before_prefill(self, row: int, prompt: Tensor) -> None:
        """A row's prompt, int64 [tokens], is about to be processed."""

    def after_prefill(self, layer: int, row: int, queries: Tensor, keys: Tensor, positions: Tensor) -> None:
        """A layer of a prompt is in the cache.

        queries: [window or fewer, q_heads, head_dim], of the prompt's last tokens. keys: [kv_heads, tokens, head_dim],
        as far as an eviction keeps them. positions: int64 [kv_heads or 1, tokens], of the keys, from the prompt's end:
        its last token is at -1.
        """

    def before_round(self) -> None:
        """A round begins, with drafts or without: what keeps step with the cache does so here."""

    def before_drafts(self) -> None:
        """A round's drafts begin: what they share is chosen here. Rounds of plain decoding have none."""

    def before_pass(self, tokens: Tensor, ahead: int) -> None:
        """A pass over tokens [rows, queries] is about to run, from `ahead` positions after the cached ones on."""

    def at(self, ahead: int) -> Self:
        """This policy for a target's query at `ahead` positions after the cached tokens. State is shared."""
        other = copy.copy(self)
        other.cache = self.cache.later(ahead)
        return other

    def draft_metadata(self, ahead: int, queries: int = 1) -> AttentionMetadata:
        """For a draft that forwards `queries` tokens per row, from `ahead` positions after the cached ones on."""
        return self.cache.draft_metadata(ahead, queries)

    def target_metadata(self, queries: int) -> AttentionMetadata:
        """For the verification of `queries` tokens; a policy that chooses by it asks for its scores here."""
        return self.cache.target_metadata(queries)
