"""Builds the attention metadata of a pass from what a cache stores: positions, slots, and the ranges to read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ridgeplan.roofline.plan.plan import DraftCodes, HostPart
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata
from ridgeplan.runtime.kv.cache import Cache


class AttentionMetadataBuilder:
    """Builds metadata for passes over one cache, at its current lengths or at an offset from them.

    lengths: int32 [batch], tokens of each row that the pass sees before its own, in the layers that hold most.
    config: the cache's, with the codes that drafts of this builder read.
    """

    def __init__(
        self,
        cache: Cache,
        draft_codes: DraftCodes | None = None,
        lengths: Tensor | None = None,
        max_quantized: Tensor | None = None,
    ) -> None:
        """draft_codes: by default those of the cache's configuration. lengths: by default the cache's, which it
        updates in place. max_quantized: int32 [batch], a bound on `quantized`, for an offset within a pass.
        """
        self.cache = cache
        self.config = cache.config if draft_codes is None else replace(cache.config, draft_codes=draft_codes)
        self.lengths = cache.lengths if lengths is None else lengths
        self._max_quantized = max_quantized

    def with_offset(self, tokens: int) -> AttentionMetadataBuilder:
        """For a query of a pass that sees `tokens` more tokens of each row, already in their slots.

        No group moves to the host within a pass: rounds end where one does, and later queries do not count.
        """
        lengths = self.lengths + tokens
        max_quantized = self.quantized(self.lengths) if self.config.target_loads else None
        return AttentionMetadataBuilder(self.cache, self.config.draft_codes, lengths, max_quantized)

    def quantized(self, lengths: Tensor) -> Tensor:
        """Tokens held as codes at these lengths, int32 of the same shape."""
        tokens = self.cache.quantized(lengths)
        bound = self._max_quantized
        return tokens if bound is None else torch.minimum(tokens, bound[: tokens.shape[-1]])

    def target_metadata(self, queries: int) -> AttentionMetadata:
        """For a pass of the target over `queries` tokens that follow the cached ones."""
        metadata = self._all_layers(queries, 0, coded=self.config.buffered, lower=True)
        return metadata.changed(streamed=self.config.streams and self.cache.first_on_host < self.cache.layers)

    def draft_metadata(self, offset: int | Tensor, queries: int = 1) -> AttentionMetadata:
        """For a draft over `queries` tokens that reads every token; the first is `offset` after the cached ones.

        offset: of all rows, or int32 [rows].
        """
        upper = self.config.drafts_read_upper
        metadata = self._all_layers(queries, offset, coded=self.config.buffered or upper, lower=not upper)
        return self._with_host_layers(metadata, self._window_of) if self.config.keeps_window else metadata

    def _all_layers(self, queries: int, offset: int | Tensor, coded: bool, lower: bool) -> AttentionMetadata:
        """The metadata of all layers; where they hold different numbers of tokens, `by_layer` has each store's."""
        cache = self.cache
        if not self.config.budgets:
            metadata = self._build(self.lengths[: cache.rows], queries, offset, coded, lower)
            if not self.config.buffered:
                metadata = self._with_host_layers(metadata, self._behind_slots)
            return self._with_windows(metadata, queries, offset)
        stacked = self._build((self.lengths - cache.fewer)[:, : cache.rows], queries, offset, coded, lower)
        by_store = [stacked.of_store(index) for index in range(len(cache.stores))]
        by_layer = {layer: by_store[cache.store_of(layer)] for layer in range(cache.layers)}
        return self._with_windows(replace(by_store[0], by_layer=by_layer), queries, offset)

    def _with_windows(self, metadata: AttentionMetadata, queries: int, offset: int | Tensor) -> AttentionMetadata:
        """The metadata with that of layers that hold a window alone, in full precision."""
        cache, by_layer = self.cache, dict(metadata.by_layer)
        for store, layers in cache.window_layers.items():
            first = (self.lengths - cache.fewer[store])[: cache.rows] + offset
            slots = first[:, None] + torch.arange(queries, device=first.device)
            begin, end = torch.zeros_like(first), first + 1
            reads = replace(
                metadata, slots=slots, begin=begin, end=end, groups=None, windowed=True, attend=None, by_layer={}
            )
            by_layer |= dict.fromkeys(layers, reads)
        return replace(metadata, by_layer=by_layer) if cache.config.windows else metadata

    def _build(self, stored: Tensor, queries: int, offset: int | Tensor, coded: bool, lower: bool) -> AttentionMetadata:
        """For rows that hold `stored` tokens, int32 [rows] or [stores, rows]."""
        quantized, buffered, rows = self.quantized(stored), self.config.buffered, self.cache.rows
        first = stored + offset
        slot = first - quantized if buffered else first
        offsets = torch.arange(queries, device=stored.device)
        position = self.lengths[:rows] + self.cache.evicted[:rows] + offset
        return AttentionMetadata(
            positions=position[:, None] + offsets,
            slots=slot[..., None] + offsets,
            begin=quantized if coded and not buffered else torch.zeros_like(stored),
            end=slot + 1,
            groups=quantized // self.config.group if coded else None,
            lower=lower,
        )

    def _with_host_layers(
        self, metadata: AttentionMetadata, change: Callable[[AttentionMetadata], AttentionMetadata]
    ) -> AttentionMetadata:
        """The metadata with that of layers on the host changed."""
        first, layers = self.cache.first_on_host, self.cache.layers
        if first == layers:
            return metadata
        changed = change(metadata.layer_metadata(first))
        return replace(metadata, by_layer=dict.fromkeys(range(first, layers), changed))

    def _behind_slots(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """For full-precision layers on the host, whose recent tokens follow the slots for old ones."""
        first_recent, old = self.config.window_slots, self.quantized(self.lengths[: self.cache.rows])
        moved = first_recent - old
        begin = torch.full_like(old, first_recent)
        return replace(metadata, slots=metadata.slots + moved[:, None], begin=begin, end=metadata.end + moved)

    def _window_of(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """For drafts, which read of a layer on the host only the tokens that stay on the device."""
        max_groups = self.config.window_groups
        if metadata.groups is not None:
            lower_only = self.config.host_part is HostPart.LOWER
            return metadata if lower_only else replace(metadata, groups=metadata.groups.clamp_max(max_groups))
        old_groups = self.quantized(self.lengths[: self.cache.rows]) // self.config.group
        return replace(metadata, begin=metadata.begin - old_groups.clamp_max(max_groups) * self.config.group)
