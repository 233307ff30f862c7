"""What a draft policy has to do."""

from __future__ import annotations

from typing import Protocol

from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.metadata import AttentionMetadata


class DraftPolicy(Protocol):
    """Chooses what each draft of a round reads.

    The speculator calls `select` before every draft's forward pass, inside the round that a CUDA graph captures: it
    works on fixed device tensors and never asks the device for a value. What can be chosen is what `AttentionMetadata`
    expresses, one run of full-precision slots and the leading groups of codes, the same for all layers and heads; the
    draft's query is not known yet.
    """

    def select(self, cache: Cache, ahead: int) -> AttentionMetadata:
        """For a draft that forwards one token per row, `ahead` positions after the cached ones."""
