"""Draft-weight swap: prefill uses the memory of the draft's own weights for its buffers.

Prefill does not read those weights. On a GPU they are allocated as one piece of memory, which serves as prefill's
scratch arena; before the first round, a copy on the host restores what was overwritten. The weights keep their
addresses, so CUDA graphs that use them stay valid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.roofline.plan.support import swaps_draft_weights
from ridgeplan.runtime.buffers import Arena, aligned
from ridgeplan.runtime.model.weights import DecoderWeights


class DraftSwap:
    """Weights in one piece of device memory, and their copy on the host.

    Swaps run on the current stream, which all readers of the weights must use too.
    """

    def __init__(self, copies: list[Tensor], device: torch.device) -> None:
        """copies: the weights on the host; `device` holds them in the same order."""
        size = sum(aligned(copy.nbytes) for copy in copies)
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
        """The memory as an arena inside the body; afterwards the weights are restored, also after an exception."""
        arena = Arena(self._memory)
        try:
            yield arena
        finally:
            self._restore(arena.reached)

    def _restore(self, reached: int) -> None:
        """Copies back the weights that start in the first `reached` bytes."""
        for weight, copy in self._pairs:
            if weight.data_ptr() < self._memory.data_ptr() + reached:
                weight.copy_(copy, non_blocking=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class SwappableWeights(DecoderWeights):
    """Draft weights whose memory can serve as a scratch arena. Engines that share them share the swap."""

    swap: DraftSwap


def draft_weights_for(plan: Plan, target: DecoderWeights, make: Callable[[], DecoderWeights]) -> DecoderWeights:
    """The draft weights that `make` returns, swappable if the plan's prompts use their memory.

    Nothing else may reference what `make` returns, as it has to be freed before the one piece of memory is allocated.
    """
    return _swappable(make, target) if _swaps(plan, target.embedding.device) else make()


@contextlib.contextmanager
def prompt_arena(plan: Plan, drafts: DecoderWeights, device: torch.device) -> Iterator[Arena]:
    """The arena for the long buffers of the plan's prompts, inside the body."""
    if isinstance(drafts, SwappableWeights) and _swaps(plan, device):
        with drafts.swap.scratch_arena() as arena:
            yield arena
    else:
        yield Arena.without_memory(device)


def _swaps(plan: Plan, device: torch.device) -> bool:
    """Only on CUDA: on a CPU, a copy on the host would save nothing."""
    return device.type == "cuda" and swaps_draft_weights(plan)


def _swappable(make: Callable[[], DecoderWeights], target: DecoderWeights) -> SwappableWeights:
    """Moves the draft's own weights through the host, so that the device never holds them twice."""
    shared = {tensor.data_ptr() for tensor in target.tensors()}
    copies: dict[int, Tensor] = {}  # by address on the device, so that tied weights stay tied

    def to_host(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() in shared:
            return tensor
        if tensor.data_ptr() not in copies:
            # Page-locked if it comes from a GPU, so that it can be restored asynchronously.
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copies[tensor.data_ptr()] = copy.copy_(tensor)
        return copies[tensor.data_ptr()]

    on_host = make().with_tensors(to_host)
    swap = DraftSwap(list(copies.values()), target.embedding.device)
    on_device = {id(copy): weight for copy, weight in zip(copies.values(), swap.weights, strict=True)}
    weights = on_host.with_tensors(lambda tensor: on_device.get(id(tensor), tensor))
    return SwappableWeights(**vars(weights), swap=swap)
