"""Sparse target attention: a policy selects the tokens that each query of the target reads.

Every query of a pass has its own selection, as if its token were decoded by itself, so a pass over gamma + 1 tokens
reads gamma + 1 selections. With one selection per verification the target's reads would depend on where rounds start,
and speculation would change its output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeplan.roofline.plan.plan import DraftCodes
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.policies import token_selector
from ridgeplan.runtime.policies.base import SparseSelector
from ridgeplan.runtime.retrieval.head import Head


@dataclass(frozen=True, eq=False)
class PerQuerySelection:
    """One query of a pass: its selector, at its own length, and the metadata of its attention."""

    selector: SparseSelector
    metadata: AttentionMetadata


class SparseTargetAttention:
    """Attention to the tokens that a selector selects, for one cache. queries: the queries of the current pass.

    Selectors with `selected_before_pass` have selected before the first layer.
    """

    def __init__(self, selector: SparseSelector) -> None:
        """selector: over a cache that is read as the target reads it."""
        self.selector = selector
        self.queries: tuple[PerQuerySelection, ...] = ()

    @classmethod
    def of(cls, selection: Any, cache: Cache, head: Head | None) -> SparseTargetAttention | None:
        """For a plan's `attention.chosen`; None where that cannot leave out any token."""
        if not 0 < selection.min_tokens < cache.config.longest:
            return None
        selector = token_selector(selection, AttentionMetadataBuilder(cache, DraftCodes.FULL), head)
        assert isinstance(selector, SparseSelector), "all others read every token"
        return cls(selector)

    def metadata(self, tokens: Tensor) -> AttentionMetadata:
        """For a pass over tokens [rows, queries] that follow the cached ones."""
        self.selector.before_pass(tokens, 0)
        self.queries = tuple(self._select(offset) for offset in range(tokens.shape[1]))
        return self.selector.builder.target_metadata(tokens.shape[1]).changed(attend=self._attend)

    def _select(self, offset: int) -> PerQuerySelection:
        selector = self.selector.with_offset(offset)
        selector.before_round()
        return PerQuerySelection(selector, selector.draft_metadata(0))

    def _attend(self, layer: int, query: Tensor, _: AttentionMetadata) -> Tensor:
        attended = [
            each.selector.attend(layer, part, each.metadata.layer_metadata(layer))
            for each, part in zip(self.queries, query.split(1, dim=1), strict=True)
        ]
        return torch.cat(attended, dim=1)
