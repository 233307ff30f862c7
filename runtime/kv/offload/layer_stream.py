"""The stream that brings offloaded layers to the device, one after another, ahead of the pass that reads them.

Two or more slots take turns: while attention reads one, the next layers are copied into the others, on a stream of
their own. All of it can be captured in a CUDA graph: the copies read host memory by address and their lengths from the
device, so that one graph copies what rows hold at its replay, ragged or not, whatever the cache was allocated for.
(Copies by the DMA engines are a tenth faster, 55 against 50 GB/s, but their sizes are constants of a graph.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.residency.leading_copy import copy_leading

Parts = Sequence[Tensor]  # of one layer, each [batch, kv_heads, entries, ...]


class LayerStream:
    """Copies `layers`, their parts on the host, into slots on the device, in order, once per pass of the target.

    A pass asks for each layer in turn, and releases it once attention has been launched. Copies may `begin` long before
    the pass, for example while drafts run.
    """

    def __init__(self, layers: Sequence[Parts], slots: int, device: torch.device, spare: int = 0) -> None:
        """slots: layers that are on the device at once, one more than are copied ahead. spare: entries of each row and
        head behind those that are copied, for others to follow them.
        """
        self.layers = layers
        self.slots = [[_with_spare(part, spare, device) for part in layers[0]] for _ in range(slots)]
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._joined = torch.zeros(1, device=device)
        self._arrived: dict[int, Any] = {}
        self._entries: Tensor | None = None
        self._copied = 0

    @property
    def bytes(self) -> int:
        """Device memory of the slots."""
        return sum(part.nbytes for slot in self.slots for part in slot)

    def reset(self) -> None:
        """Forgets a pass that was not finished."""
        self._entries, self._copied = None, 0
        self._arrived.clear()

    def begin(self, entries: Tensor) -> None:
        """Starts copies of the first layers; entries: int32 [batch] that rows hold on the host."""
        self._entries, self._copied = entries, 0
        for _ in range(min(len(self.slots), len(self.layers))):
            self._copy_next()

    @property
    def begun(self) -> bool:
        """Whether copies have begun for a pass that has not ended."""
        return self._entries is not None

    def fetch(self, layer: int) -> Parts:
        """The parts of a layer on the device; what is launched from now on reads them after the copy."""
        if self._side is not None:
            torch.cuda.current_stream().wait_event(self._arrived.pop(layer))
            # Kernels with programmatic launch may read codes before the kernel ahead of them has ended, and that
            # must not be a copy: an ordinary kernel stands between.
            self._joined.zero_()
        return self.slots[layer % len(self.slots)]

    def release(self, layer: int) -> None:
        """The layer's reads are launched: its slot may take another layer."""
        if layer == len(self.layers) - 1:
            self._entries = None
        elif self._copied < len(self.layers):
            self._copy_next()

    def _copy_next(self) -> None:
        """Copies one more layer, after all that has been launched so far."""
        assert self._entries is not None, "a pass has begun"
        layer, self._copied = self._copied, self._copied + 1
        with self._beside():
            for part, slot in zip(self.layers[layer], self.slots[layer % len(self.slots)], strict=True):
                copy_leading(part, slot, self._entries)
            if self._side is not None:
                self._arrived[layer] = self._side.record_event()

    def _beside(self) -> Any:
        """The side stream, behind what the current stream has been given; nothing without a GPU."""
        if self._side is None:
            return contextlib.nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)


def _with_spare(part: Tensor, spare: int, device: torch.device) -> Tensor:
    batch, heads, entries, *rest = part.shape
    return torch.zeros(batch, heads, entries + spare, *rest, dtype=part.dtype, device=device)
