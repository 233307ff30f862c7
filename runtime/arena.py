"""The scratch arena: preallocated memory for the tensors of one prompt."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes, torch's own alignment on a GPU


class Arena:
    """A bump allocator over one piece of memory; a tensor that does not fit is allocated by torch instead."""

    def __init__(self, memory: Tensor) -> None:
        """memory: uint8 [bytes], aligned."""
        self._memory = memory
        self._taken = 0
        self.reached = 0  # bytes from the start that tensors have used

    @classmethod
    def without_memory(cls, device: torch.device) -> Arena:
        """An arena that allocates every tensor on `device`."""
        return cls(torch.empty(0, dtype=torch.uint8, device=device))

    def clear(self) -> None:
        """Frees all tensors: the next one starts at the beginning again."""
        self._taken = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor."""
        start = aligned(self._taken)
        stop = start + math.prod(shape) * dtype.itemsize
        if stop > self._memory.numel():
            return torch.empty(shape, dtype=dtype, device=self._memory.device)
        self._taken = stop
        self.reached = max(self.reached, stop)
        return self._memory[start:stop].view(dtype).view(shape)


def aligned(size: int) -> int:
    """Bytes rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT
