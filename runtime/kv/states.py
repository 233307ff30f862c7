"""Recurrent states of all layers that have one, and the rings of inputs that a pass replays (kernels/state)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.kernels.state import StateRows
from ridgeplan.roofline.catalog.layers import State
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.execution import state_ring_rows
from ridgeplan.runtime.kv.config import KVCacheConfig


@dataclass(frozen=True, eq=False)
class StateStore:
    """States float32 [layers, batch, value_heads, key_dim, value_dim]; rings [layers, batch, rows, inputs].

    committed: int32 [batch], tokens of each row's text that the states hold. Later tokens' inputs are in the rings, as
    are those of drafts, which the target's replace.
    """

    sizes: State
    states: Tensor
    rings: Tensor
    committed: Tensor

    @classmethod
    def allocate(
        cls, model: ModelShape, config: KVCacheConfig, device: torch.device, dtype: torch.dtype
    ) -> StateStore | None:
        """Zero-filled storage for passes of up to `round_slots` tokens; None for a model without states."""
        if not model.states:
            return None
        ((sizes, layers),) = model.states
        rows = state_ring_rows(sizes.conv_width, config.round_slots)
        return cls(
            sizes,
            torch.zeros(layers, config.batch, sizes.value_heads, sizes.key_dim, sizes.value_dim, device=device),
            torch.zeros(layers, config.batch, rows, sizes.channels + sizes.scalars, dtype=dtype, device=device),
            torch.zeros(config.batch, dtype=torch.int32, device=device),
        )

    @property
    def queries(self) -> int:
        """Tokens of the longest pass that the rings have room for."""
        return (self.rings.shape[2] - self.sizes.conv_width + 1) // 2

    @property
    def bytes(self) -> int:
        """Storage on the device."""
        return self.states.nbytes + self.rings.nbytes

    def rows(self, layer: int, accepted: Tensor) -> StateRows:
        """What a pass reads of a layer. accepted: int32 [rows], tokens of each row's text."""
        rows = len(accepted)
        return StateRows(self.states[layer, :rows], self.rings[layer, :rows], self.committed[:rows], accepted)

    def commit(self, accepted: Tensor) -> None:
        """After a pass: all layers hold the rows' first `accepted` tokens."""
        self.committed[: len(accepted)] = accepted

    def begin_prompt(self, row: int) -> None:
        """Forgets a row."""
        self.states[:, row] = 0
        self.rings[:, row] = 0
        self.committed[row] = 0

    def earlier(self, layer: int, row: int, tokens: int) -> Tensor:
        """Inputs [conv_width - 1, inputs] of the last of a prompt's first `tokens`, as far as there are so many."""
        ring = self.rings[layer, row]
        return ring[_last(tokens, self.sizes.conv_width, ring)]

    def store_inputs(self, layer: int, row: int, tokens: int, inputs: Tensor) -> None:
        """Keeps the inputs [conv_width - 1, inputs] of the last of a prompt's first `tokens`."""
        ring = self.rings[layer, row]
        ring[_last(tokens, self.sizes.conv_width, ring)] = inputs


def _last(tokens: int, taps: int, ring: Tensor) -> Tensor:
    """The ring's places of positions tokens - taps + 1 to tokens - 1; those ahead of the text hold zeros."""
    return torch.arange(tokens - taps + 1, tokens, device=ring.device) % ring.shape[0]
