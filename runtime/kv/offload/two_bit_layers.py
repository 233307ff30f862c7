"""2-bit keys, on the device, of full-precision layers on the host: by these a target chooses what is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, pack_draft_planes
from ridgeplan.kernels.selection.two_bit_keys import TwoBitKeys
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime.kv.config import KVCacheConfig

PROMPT_GROUPS = 32  # of a prompt that are quantized at once


@dataclass(frozen=True, eq=False)
class TwoBitLayers:
    """keys: of `layers` layers, concatenated along the batch: the 2-bit keys that codes on the device would have.

    The codes themselves are not kept. staged, planes: those of one group of every row and layer, while it is flushed.
    """

    config: KVCacheConfig
    layers: int
    keys: TwoBitKeys
    staged: QuantizedKV
    planes: DraftPlanes

    @classmethod
    def allocate(
        cls, model: ModelShape, config: KVCacheConfig, layers: int, tokens: int, device: torch.device
    ) -> TwoBitLayers:
        """Zero-filled, for rows of up to `tokens` tokens."""
        rows, heads, group, channels = layers * config.batch, model.kv_heads, config.group, model.head_dim
        keys = TwoBitKeys.allocate(rows, heads, config.groups(tokens), group, channels, device)
        staged = QuantizedKV.allocate(rows, heads, 1, group, channels, device, lower=False)
        return cls(config, layers, keys, staged, DraftPlanes.allocate(staged))

    @property
    def bytes(self) -> int:
        """Device memory."""
        return self.keys.bytes + self.staged.bytes + self.planes.bytes

    def of_layer(self, layer: int, rows: int) -> TwoBitKeys:
        """The keys of a layer's first rows."""
        first = layer * self.config.batch
        return self.keys.rows(slice(first, first + rows))

    def store_prompt(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Takes whole groups of a row's prompt, [kv_heads, tokens, head_dim], from its first token on."""
        group, at = self.config.group, layer * self.config.batch + row
        for first in range(0, keys.shape[1] // group, PROMPT_GROUPS):
            last = min(first + PROMPT_GROUPS, keys.shape[1] // group)
            tokens = slice(first * group, last * group)
            made = _two_bit_keys(keys[None, :, tokens], values[None, :, tokens], last - first, group)
            for held, new in zip(_tensors(self.keys), _tensors(made), strict=True):
                held[at, :, first:last] = new[0]

    def flush(self, keys: Tensor, values: Tensor, index: Tensor, first_slot: Tensor, crossed: Tensor) -> None:
        """Takes one more group of the rows in `crossed`; arguments as for `CodedLayers.flush`."""
        index, slot, mask = (x.repeat(self.layers) for x in (index, first_slot, crossed))
        first = torch.zeros_like(index)
        quantize(keys.flatten(0, 1), values.flatten(0, 1), self.staged, first, mask, first_slot=slot)
        pack_draft_planes(self.staged, self.planes, first, mask=mask)
        made = TwoBitKeys.of(self.staged, self.planes)
        row, place = torch.arange(len(index), device=index.device), index.clamp_max(self.keys.groups - 1).long()
        for held, new in zip(_tensors(self.keys), _tensors(made), strict=True):
            kept = mask.view(-1, *[1] * (held.dim() - 2))
            held[row, :, place] = torch.where(kept, new[:, :, 0], held[row, :, place])


def _two_bit_keys(keys: Tensor, values: Tensor, groups: int, group: int) -> TwoBitKeys:
    """Those of whole groups of keys and values [rows, kv_heads, tokens, head_dim]."""
    rows, heads, _, channels = keys.shape
    codes = QuantizedKV.allocate(rows, heads, groups, group, channels, keys.device, lower=False)
    planes, first = DraftPlanes.allocate(codes), torch.zeros(rows, dtype=torch.int32, device=keys.device)
    quantize(keys, values, codes, first)
    pack_draft_planes(codes, planes, first, groups)
    return TwoBitKeys.of(codes, planes)


def _tensors(keys: TwoBitKeys) -> tuple[Tensor, Tensor, Tensor]:
    return keys.codes, keys.scale, keys.minimum
