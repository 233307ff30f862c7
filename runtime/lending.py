"""Prompts borrow the memory of the draft's weights, which nothing reads while a prompt is prefilled.

On a GPU the weights that only the draft has lie in one piece of memory. Prefill takes its long buffers from it, and
before the first round a copy on the host brings back what they overwrote. Weights never move: CUDA graphs that were
captured over them stay valid.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.planner.capacity import swaps_draft_weights
from ridgeplan.planner.plan import Plan
from ridgeplan.runtime.model.weights import DecoderWeights

ALIGNMENT = 256  # bytes, as torch aligns what it allocates on a GPU


class Arena:
    """Memory that tensors are taken from, one behind the other; one that it does not hold whole is allocated."""

    def __init__(self, memory: Tensor) -> None:
        """memory: uint8 [bytes], aligned."""
        self._memory = memory
        self._taken = 0
        self.reached = 0  # bytes from the begin that tensors ever lay in

    @classmethod
    def without_memory(cls, device: torch.device) -> Arena:
        """One that allocates everything on `device`."""
        return cls(torch.empty(0, dtype=torch.uint8, device=device))

    def clear(self) -> None:
        """What was taken is no longer used: its memory can be taken again."""
        self._taken = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor."""
        start = _aligned(self._taken)
        stop = start + math.prod(shape) * dtype.itemsize
        if stop > self._memory.numel():
            return torch.empty(shape, dtype=dtype, device=self._memory.device)
        self._taken = stop
        self.reached = max(self.reached, stop)
        return self._memory[start:stop].view(dtype).view(shape)


class DraftSwap:
    """The memory of weights, with a copy of them on the host. Who reads them uses the stream that prompts run on."""

    def __init__(self, copies: list[Tensor], device: torch.device) -> None:
        """copies: the weights on the host; on `device` they come to lie in one piece, in the same order."""
        size = sum(_aligned(copy.nbytes) for copy in copies)
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        arena = Arena(self._memory)
        self._pairs = [(arena.empty(tuple(copy.shape), copy.dtype), copy) for copy in copies]
        self._restore(size)

    @property
    def weights(self) -> list[Tensor]:
        """The weights on the device, in the order of the copies."""
        return [weight for weight, _ in self._pairs]

    @contextlib.contextmanager
    def scratch_arena(self) -> Iterator[Arena]:
        """The memory for as long as the body runs; when it ends, in whatever way, the weights are back."""
        arena = Arena(self._memory)
        try:
            yield arena
        finally:
            self._restore(arena.reached)

    def _restore(self, reached: int) -> None:
        """Brings back the weights that begin in the first `reached` bytes."""
        for weight, copy in self._pairs:
            if weight.data_ptr() < self._memory.data_ptr() + reached:
                weight.copy_(copy, non_blocking=True)


@dataclass(frozen=True, eq=False)
class SwappableWeights(DecoderWeights):
    """Draft weights whose own memory can be lent; engines that share them share the lender and its copy."""

    swap: DraftSwap


def draft_weights_of(plan: Plan, target: DecoderWeights, make: Callable[[], DecoderWeights]) -> DecoderWeights:
    """Draft weights as `make` returns them; where prompts of the plan borrow, lendable.

    What `make` returns must be held by no one else for its memory to be freed before that in one piece is allocated.
    """
    return _arena_capacity(make, target) if _borrows(plan, target.embedding.device) else make()


@contextlib.contextmanager
def prompt_arena(plan: Plan, drafts: DecoderWeights, device: torch.device) -> Iterator[Arena]:
    """What prompts of the plan take their long buffers from while the body runs."""
    if isinstance(drafts, SwappableWeights) and _borrows(plan, device):
        with drafts.swap.scratch_arena() as arena:
            yield arena
    else:
        yield Arena.without_memory(device)


def _borrows(plan: Plan, device: torch.device) -> bool:
    """A CPU's memory is the host's own: there is nothing to gain."""
    return device.type == "cuda" and swaps_draft_weights(plan)


def _arena_capacity(make: Callable[[], DecoderWeights], target: DecoderWeights) -> SwappableWeights:
    """Through the host, so that the device never holds the weights twice."""
    shared = {tensor.data_ptr() for tensor in target.tensors()}
    copies: dict[int, Tensor] = {}  # by address on the device: tied weights stay tied

    def leave(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() in shared:
            return tensor
        if tensor.data_ptr() not in copies:
            copies[tensor.data_ptr()] = _on_host(tensor)
        return copies[tensor.data_ptr()]

    left = make().with_tensors(leave)
    swap = DraftSwap(list(copies.values()), target.embedding.device)
    back = {id(copy): weight for copy, weight in zip(copies.values(), swap.weights, strict=True)}
    returned = left.with_tensors(lambda tensor: back.get(id(tensor), tensor))
    return SwappableWeights(**vars(returned), swap=swap)


def _on_host(tensor: Tensor) -> Tensor:
    """A copy, page-locked where it comes from a GPU: only such is brought back without waiting."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
