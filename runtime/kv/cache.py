"""The KV cache of all layers: a full-precision store, groups of codes, and the rule that quantizes tokens.

A row of n tokens keeps quantized(n) = max(0, n // G - 1) * G of them as codes, so that G to 2G - 1 recent tokens stay
in full precision (QuantSpec, section 4.3.2). The split depends on the length alone, not on where rounds ended
(docs/papers.md, QuantSpec-4), so the quantized target is one well-defined model.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.shift import shift_slots
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, pack_draft_planes
from ridgeplan.planner.plan import DraftCodes
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.metadata import AttentionMetadata


class Cache:
    """Preallocated storage: keys and values [layers, batch, kv_heads, slots, head_dim], and their codes.

    With a buffer (formats int8 and int4x2), slot = position - quantized(n). The other formats keep every token in
    full precision, slot = position; bf16+int4 adds upper codes for drafts.
    lengths, ends: int32 [batch], cached tokens of each row and the length at which its generation stops.
    """

    def __init__(self, model: ModelShape, config: KVCacheConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.rows = config.batch
        self.layers, self.q_heads, self.kv_heads = model.layers, model.q_heads, model.kv_heads
        sizes = (model.layers, config.batch, model.kv_heads, config.slots, model.head_dim)
        self.keys = torch.zeros(sizes, dtype=dtype, device=device)
        self.values = torch.zeros(sizes, dtype=dtype, device=device)
        self.all_codes = _allocate_codes(model, config, device) if config.format.quantized else None
        self.all_planes = DraftPlanes.allocate(self.all_codes) if self.all_codes and config.draft_planes else None
        self.lengths = torch.zeros(config.batch, dtype=torch.int32, device=device)
        self.ends = torch.full_like(self.lengths, config.context)

    @property
    def bytes(self) -> int:
        """Storage of keys, values, codes and planes."""
        return sum(part.bytes for part in (self.all_codes, self.all_planes) if part) + 2 * self.keys.nbytes

    def reset(self, rows: int) -> None:
        """Empties the cache and activates its first `rows` rows, each up to the full context."""
        self.rows = rows
        self.lengths.zero_()
        self.ends.zero_()
        self.ends[:rows] = self.config.context

    def limit(self, new_tokens: int) -> None:
        """Ends every row `new_tokens` tokens after its current length."""
        self.ends[: self.rows] = self.lengths[: self.rows] + new_tokens

    def stop(self, row: int) -> None:
        """Ends a row now."""
        self.ends[row] = 0

    @contextlib.contextmanager
    def all_stopped(self) -> Iterator[None]:
        """Deactivates all rows inside the body, so that rounds only write to slots that the next round overwrites."""
        ends = self.ends.clone()
        self.ends.zero_()
        yield
        self.ends.copy_(ends)

    def quantized(self, lengths: Tensor) -> Tensor:
        """Tokens held as codes at these lengths: `quantized_groups` on the device."""
        return (lengths // self.config.group - 1).clamp_min(0) * self.config.group

    def active(self) -> Tensor:
        """bool [rows], whether a row has not reached its end."""
        return self.lengths[: self.rows] < self.ends[: self.rows]

    def max_tokens(self) -> Tensor:
        """Tokens [rows], at least 1, that a round may add to an active row.

        A round stops at the row's end and, if the target reads codes, at the next multiple of the group, where a flush
        changes what the target reads.
        """
        lengths, group = self.lengths[: self.rows], self.config.group
        max_tokens = (self.ends[: self.rows] - lengths).clamp_min(1)
        return torch.minimum(max_tokens, group - lengths % group) if self.config.buffered else max_tokens

    def reading(self, codes: DraftCodes) -> Cache:
        """The same storage for drafts that read other codes."""
        other = copy.copy(self)
        other.config = replace(self.config, draft_codes=codes)
        return other

    def full(self, layer: int) -> tuple[Tensor, Tensor]:
        """Full-precision keys and values [rows, kv_heads, slots, head_dim] of a layer."""
        return self.keys[layer, : self.rows], self.values[layer, : self.rows]

    def codes(self, layer: int) -> QuantizedKV:
        """Quantized groups of a layer."""
        return self._codes(self.layer_rows(layer))

    def planes(self, layer: int) -> DraftPlanes | None:
        """Quantized groups of a layer by token, if they are kept."""
        return self.all_planes.rows(self.layer_rows(layer)) if self.all_planes else None

    def layer_rows(self, layer: int) -> slice:
        """Where a layer's rows are in `all_codes`."""
        first = layer * self.config.batch
        return slice(first, first + self.rows)

    def oldest_group(self) -> tuple[Tensor, Tensor]:
        """Keys [layers, batch, kv_heads, group, head_dim] of the group that grows old next, and its first token.

        The latter is int32 [batch]. Keys of rows that do not hold the whole group are undefined.
        """
        first, group = self.quantized(self.lengths), self.config.group
        slots = torch.arange(group, device=first.device) + (0 if self.config.buffered else first[:, None])
        slots = slots.expand(len(first), group).clamp_max(self.config.slots - 1).long()
        sizes = (*self.keys.shape[:3], group, self.keys.shape[4])
        return self.keys.gather(3, slots[None, :, None, :, None].expand(sizes)), first

    def target_metadata(self, queries: int) -> AttentionMetadata:
        """For a pass of the target over `queries` tokens that follow the cached ones."""
        return self._metadata(queries, 0, coded=self.config.buffered, lower=True)

    def draft_metadata(self, ahead: int, queries: int = 1) -> AttentionMetadata:
        """For a draft's pass over `queries` tokens, from `ahead` after the cached ones on, that reads every token."""
        upper = self.config.drafts_read_upper
        return self._metadata(queries, ahead, coded=self.config.buffered or upper, lower=not upper)

    def _metadata(self, queries: int, ahead: int, coded: bool, lower: bool) -> AttentionMetadata:
        lengths, buffered = self.lengths[: self.rows], self.config.buffered
        quantized = self.quantized(lengths)
        first = lengths + ahead
        slot = first - quantized if buffered else first
        offsets = torch.arange(queries, device=lengths.device)
        return AttentionMetadata(
            positions=first[:, None] + offsets,
            slots=slot[:, None] + offsets,
            begin=quantized if coded and not buffered else torch.zeros_like(lengths),
            end=slot + 1,
            groups=quantized // self.config.group if coded else None,
            lower=lower,
        )

    def store_prompt(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Stores a whole prompt's KV of one layer and row, [kv_heads, tokens, head_dim]."""
        tokens = keys.shape[1]
        whole = self.config.quantized_groups(tokens) * self.config.group
        if whole:
            place = layer * self.config.batch + row
            codes = self._codes(slice(place, place + 1))
            first = torch.zeros(1, dtype=torch.int32, device=keys.device)
            quantize(keys[None, :, :whole], values[None, :, :whole], codes, first)
            if self.all_planes:
                planes = self.all_planes.rows(slice(place, place + 1))
                pack_draft_planes(codes, planes, first, whole // self.config.group)
        start = whole if self.config.buffered else 0
        self.keys[layer, row, :, : tokens - start] = keys[:, start:]
        self.values[layer, row, :, : tokens - start] = values[:, start:]

    def finish_prompt(self, row: int, tokens: int) -> None:
        """Sets a row's length to that of its prompt, once every layer has stored it."""
        self.lengths[row] = tokens

    def advance(self, tokens: Tensor) -> None:
        """Extends each row by `tokens`, int32 [rows], and quantizes groups that are no longer recent."""
        before = self.quantized(self.lengths)
        self.lengths[: self.rows] += tokens
        if self.all_codes is not None:
            self._flush(self.all_codes, before, self.quantized(self.lengths) > before)

    def _flush(self, codes: QuantizedKV, before: Tensor, crossed: Tensor) -> None:
        """Quantizes the oldest full-precision group of the rows in `crossed`, bool [batch], of all layers at once."""
        if not crossed.is_cuda and not bool(crossed.any()):
            return  # on a GPU, masked kernels are cheaper than a synchronization
        mask = crossed.repeat(self.layers)
        keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        first_slot = torch.zeros_like(before) if self.config.buffered else before
        index = (before // self.config.group).repeat(self.layers)
        quantize(keys, values, codes, index, mask, first_slot=first_slot.repeat(self.layers))
        if self.all_planes:
            pack_draft_planes(codes, self.all_planes, index, mask=mask)
        if self.config.buffered:
            shift_slots(keys, values, self.config.group, mask)

    def _codes(self, rows: slice) -> QuantizedKV:
        assert self.all_codes is not None, "this KV format holds no codes"
        return self.all_codes.rows(rows)


def _allocate_codes(model: ModelShape, config: KVCacheConfig, device: torch.device) -> QuantizedKV:
    """Codes of all layers, concatenated along the batch dimension."""
    rows = model.layers * config.batch
    return QuantizedKV.allocate(
        rows, model.kv_heads, config.groups, config.group, model.head_dim, device, lower=config.buffered
    )
