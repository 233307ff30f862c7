"""Retrieval head: a distilled head chooses tokens for all layers before the pass."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor

from ridgeplan.kernels.selection.head_scores import head_logits, head_scores
from ridgeplan.roofline.execution import PREFILL_CHUNK_TOKENS
from ridgeplan.roofline.plan.policies import selections
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.policies.base import SparseSelector, TokenIndex
from ridgeplan.runtime.policies.registry import SELECTORS
from ridgeplan.runtime.retrieval.head import Head, Rotary

ALIGNED_SLOTS = 64  # an odd number of columns of scores keeps cuBLAS from its fast products: 2.4 ms instead of 0.3
NO_HEAD = "the plan chooses tokens by a retrieval head and none was given; `ridgeplan distill` trains one"


@SELECTORS.register("retrieval-head")
class RetrievalHeadSelector(SparseSelector):
    """A set for each KV head of the target, or one for all ("batch": by the mean over them), for all layers.

    A head that was trained by layer has a set for each KV head of each of them.
    keys: [batch, kv_heads, slots, head_dim], of every token, by its position in the text.
    """

    selection: selections.RetrievalHead
    selected_before_pass = True
    uses_head = True
    inputs: ClassVar[str] = "embedding"  # of the head, as its configuration calls them

    def __init__(
        self, selection: selections.RetrievalHead, builder: AttentionMetadataBuilder, head: Head | None = None
    ) -> None:
        """Raises WorkloadError without a head, and for one that needs the target's features."""
        super().__init__(selection, builder)
        cache = self.cache
        if head is None or head.tokens is None:
            raise WorkloadError(NO_HEAD)
        if head.config.inputs != self.inputs:
            raise WorkloadError("the retrieval head needs the target's features; allowed here: one of embeddings alone")
        config, self.head = head.config, head
        slots = -(-(cache.config.longest + cache.config.gamma + 1) // ALIGNED_SLOTS) * ALIGNED_SLOTS
        sizes = (cache.config.batch, config.kv_heads, slots, config.head_dim)
        self.keys = torch.zeros(sizes, dtype=head.tokens.dtype, device=head.tokens.device)
        self.rotary = Rotary(config, cache.config.longest, head.tokens.device)
        self._queries = self.keys.new_zeros(0)
        self._query = 0
        self.layers = config.layers if selection.level == "head" else 1
        self.shared_across_layers = self.layers == 1
        self._chosen: tuple[TokenIndex, ...] = ()

    def project(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of tokens [...] at positions [...], as `Head.project` has them."""
        return self.head.project(tokens, positions, self.rotary)

    def before_prefill(self, row: int, prompt: Tensor) -> None:
        for start in range(0, len(prompt), PREFILL_CHUNK_TOKENS):
            part = slice(start, start + PREFILL_CHUNK_TOKENS)
            positions = torch.arange(len(prompt), device=prompt.device)[part]
            _, keys = self.project(prompt[part], positions)
            self.keys[row, :, part][:, : len(keys)] = keys.transpose(0, 1)

    def before_pass(self, tokens: Tensor, offset: int) -> None:
        rows, queries = tokens.shape
        offsets = torch.arange(offset, offset + queries, device=tokens.device)
        positions = self.builder.lengths[:rows, None].long() + offsets
        self._queries, keys = self.project(tokens, positions)
        places = positions[:, None, :, None].expand(-1, keys.shape[2], -1, keys.shape[3])
        self.keys[:rows].scatter_(2, places, keys.transpose(1, 2))
        self._query = 0

    def with_offset(self, offset: int) -> Self:
        other = super().with_offset(offset)
        other._query = offset
        return other

    def draft_metadata(self, offset: int | Tensor, queries: int = 1) -> AttentionMetadata:
        """Chooses for the query of the pass that is about to run, then as for every sparse policy."""
        assert isinstance(offset, int), "offsets by row are those of cascades, which read every token"
        index, count = self.top_pages(self._scores(offset), 1)
        by_layer = (part.unflatten(1, (-1, self.layers)).movedim(2, 0).contiguous() for part in (index, count))
        self._chosen = tuple(TokenIndex(*of_layer) for of_layer in zip(*by_layer, strict=True))
        return super().draft_metadata(offset, queries)

    def select(self, layer: int, query: Tensor) -> TokenIndex:
        assert self._chosen, "a pass has begun"
        return self._chosen[0 if self.shared_across_layers else layer]

    def _scores(self, offset: int) -> Tensor:
        """Of all tokens up to the query's own, float32 [rows, 1 or kv_heads * layers, slots]; later ones have any."""
        rows, sets = self.cache.rows, self.cache.kv_heads * self.head.config.layers
        queries, keys = self._queries[:, self._query], self.keys[:rows]
        if sets == self.head.config.q_heads and self.selection.level == "head":
            return head_logits(queries, keys)
        scores = head_scores(queries, keys, self.builder.lengths[:rows] + offset + 1, sets)
        return scores.mean(1, keepdim=True) if self.selection.level == "batch" else scores
