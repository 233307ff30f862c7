"""Drafts read every token, as upper codes where the plan says so (QuantSpec, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.metadata import AttentionMetadata


@dataclass(frozen=True)
class AllTokens:
    """The whole cache: the ratio is 1."""

    ratio: float = 1.0

    def select(self, cache: Cache, ahead: int) -> AttentionMetadata:
        """See `DraftPolicy`."""
        return cache.draft_metadata(ahead)
