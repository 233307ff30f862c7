"""What a draft policy has to do."""

from __future__ import annotations

from typing import Protocol

from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.metadata import AttentionMetadata


class DraftPolicy(Protocol):
    """Chooses what each draft of a round reads.

    The speculator calls `select` before every draft's forward pass. A policy that learns from earlier tokens will
    have two more hooks: `before_round`, before the first draft, and `after_verify`, between the target's pass and the
    moment its tokens are kept. All of them run inside the round that a CUDA graph captures: they work on fixed device
    tensors and never ask the device for a value.
    """

    def select(self, cache: Cache, ahead: int) -> AttentionMetadata:
        """For a draft that forwards one token per row, `ahead` positions after the cached ones."""
