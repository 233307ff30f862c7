"""The KV cache of all layers: a full-precision store, quantized groups, and the rule that moves tokens.

A row of n tokens keeps quantized(n) = max(0, n // G - 1) * G of them as codes, so that G to 2G - 1 recent
tokens stay full precision (QuantSpec sec. 4.3.2). The split is a function of the length alone (errata 4):
however rounds fall, the target is one well-defined model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.shift import shift_slots
from ridgeplan.planner.plan import DraftCodes, KVFormat, Plan
from ridgeplan.roofline.catalog.shapes import ModelShape


def quantized_groups(tokens: int, group: int) -> int:
    """Groups of a row of `tokens` tokens that are held as codes, as `Cache.quantized` says of rows on the device."""
    return max(0, tokens // group - 1)


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """What one forward pass writes and sees; all tensors are on the device.

    positions, slots: int64 [rows, queries], of the new tokens in the sequence and in the store.
    begin, end: int32 [rows], full-precision slots that the first query sees. groups: int32 [rows], or None.
    """

    positions: Tensor
    slots: Tensor
    begin: Tensor
    end: Tensor
    groups: Tensor | None
    lower: bool


class Cache:
    """Preallocated storage for `plan.workload`: [layers, batch, kv_heads, slots, head_dim] and codes alike.

    Formats int8 and int4x2 hold recent tokens in a buffer of `plan.buffer_tokens` slots, slot = position -
    quantized(n). The others hold the whole context, slot = position; a shadow adds upper codes for drafts.
    lengths, ends: int32 [batch], cached tokens of each row and where its generation stops.
    """

    def __init__(self, model: ModelShape, plan: Plan, device: torch.device, dtype: torch.dtype) -> None:
        self.group = plan.kv.group
        self.gamma = plan.speculation.gamma
        self.buffered = plan.kv.format in (KVFormat.INT8, KVFormat.HIERARCHICAL)
        self.draft_codes = plan.speculation.codes
        self.batch = self.rows = plan.workload.batch
        self.layers = model.layers
        last = plan.workload.final_context + self.gamma + 1
        slots = plan.buffer_tokens if self.buffered else last
        shape = (model.layers, self.batch, model.kv_heads, slots, model.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.all_codes = (
            QuantizedKV.allocate(
                model.layers * self.batch,
                model.kv_heads,
                max(1, quantized_groups(last, self.group)),
                self.group,
                model.head_dim,
                device,
                lower=self.buffered,
            )
            if plan.kv.quantized
            else None
        )
        self.lengths = torch.zeros(self.batch, dtype=torch.int32, device=device)
        self._capacity = plan.workload.final_context
        self.ends = torch.full_like(self.lengths, self._capacity)

    @property
    def bytes(self) -> int:
        """Storage of keys, values and codes."""
        return self.keys.nbytes + self.values.nbytes + (self.all_codes.bytes if self.all_codes else 0)

    def reset(self, rows: int) -> None:
        """Empties the cache and uses its first `rows` rows, each up to the plan's final context."""
        self.rows = rows
        self.lengths.zero_()
        self.ends.zero_()
        self.ends[:rows] = self._capacity

    def quantized(self, lengths: Tensor) -> Tensor:
        """Tokens held as codes at these lengths."""
        return (lengths // self.group - 1).clamp_min(0) * self.group

    def active(self) -> Tensor:
        """Rows, bool [rows], that have not reached their ends."""
        return self.lengths[: self.rows] < self.ends[: self.rows]

    def max_tokens(self) -> Tensor:
        """Tokens [rows], 1 or more, that a round may add to an active row.

        Up to the row's end, and to the next boundary, where a quantized target changes.
        """
        lengths = self.lengths[: self.rows]
        max_tokens = (self.ends[: self.rows] - lengths).clamp_min(1)
        return torch.minimum(max_tokens, self.group - lengths % self.group) if self.buffered else max_tokens

    def full(self, layer: int) -> tuple[Tensor, Tensor]:
        """Full-precision keys and values [rows, kv_heads, slots, head_dim] of a layer."""
        return self.keys[layer, : self.rows], self.values[layer, : self.rows]

    def codes(self, layer: int) -> QuantizedKV:
        """Quantized groups of a layer."""
        return self._codes(layer * self.batch, self.rows)

    def target_metadata(self, queries: int) -> AttentionMetadata:
        """The target forwards `queries` tokens that follow the cached ones."""
        return self._metadata(queries, 0, coded=self.buffered, lower=True)

    def draft_metadata(self, ahead: int) -> AttentionMetadata:
        """A draft forwards one token, `ahead` positions after the cached ones."""
        upper = self.draft_codes is DraftCodes.UPPER
        return self._metadata(1, ahead, coded=self.buffered or upper, lower=not upper)

    def _metadata(self, queries: int, ahead: int, coded: bool, lower: bool) -> AttentionMetadata:
        lengths = self.lengths[: self.rows]
        quantized = self.quantized(lengths)
        first = lengths + ahead
        slot = first - quantized if self.buffered else first
        offsets = torch.arange(queries, device=lengths.device)
        return AttentionMetadata(
            positions=first[:, None] + offsets,
            slots=slot[:, None] + offsets,
            begin=quantized if coded and not self.buffered else torch.zeros_like(lengths),
            end=slot + 1,
            groups=quantized // self.group if coded else None,
            lower=lower,
        )

    def store_prompt(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Takes a whole prompt's KV of one layer and row, [kv_heads, tokens, head_dim]."""
        tokens = keys.shape[1]
        whole = quantized_groups(tokens, self.group) * self.group
        if self.all_codes is not None and whole:
            codes = self._codes(layer * self.batch + row, 1)
            first = torch.zeros(1, dtype=torch.int32, device=keys.device)
            quantize(keys[None, :, :whole], values[None, :, :whole], codes, first)
        start = whole if self.buffered else 0
        self.keys[layer, row, :, : tokens - start] = keys[:, start:]
        self.values[layer, row, :, : tokens - start] = values[:, start:]

    def advance(self, tokens: Tensor) -> None:
        """Keeps `tokens` (int32 [rows]) more of each row, and quantizes groups that are no longer recent."""
        before = self.quantized(self.lengths)
        self.lengths[: self.rows] += tokens
        if self.all_codes is not None:
            self._flush(before, self.quantized(self.lengths) > before)

    def _flush(self, before: Tensor, crossed: Tensor) -> None:
        if not crossed.is_cuda and not bool(crossed.any()):
            return  # on the device a masked kernel is cheaper than asking the host
        assert self.all_codes is not None
        mask = crossed.repeat(self.layers)
        keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        first_slot = torch.zeros_like(before) if self.buffered else before
        index = (before // self.group).repeat(self.layers)
        quantize(keys, values, self.all_codes, index, mask, first_slot=first_slot.repeat(self.layers))
        if self.buffered:
            shift_slots(keys, values, self.group, mask)

    def _codes(self, first: int, count: int) -> QuantizedKV:
        assert self.all_codes is not None, "this plan's KV format holds no codes"
        return self.all_codes.rows(slice(first, first + count))
