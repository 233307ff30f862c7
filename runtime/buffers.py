"""Memory that buffers are cut from: one device allocation, or pinned and mapped host memory.

The pages are pinned in place: torch's own allocator of pinned memory rounds every tensor up to a power of two, which
would double a cache. On a machine without a GPU the memory is ordinary, and its view is itself.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeplan.runtime.errors import WorkloadError

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


_MEMINFO = Path("/proc/meminfo")


def available_bytes(meminfo: Path = _MEMINFO) -> int | None:
    """Bytes that can be allocated without swapping, as Linux estimates them; None on other systems."""
    lines = meminfo.read_text(encoding="utf-8").splitlines() if meminfo.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


MAPPED = 2  # cudaHostRegisterMapped: the device may read and write the pages by address


@dataclass(frozen=True, eq=False)
class HostMemory:
    """Zero-filled bytes of the host, uint8 [bytes], as the device sees them. `nbytes` of them are pinned."""

    device_view: Tensor

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> HostMemory:
        """Raises WorkloadError where the host has not that much free, or does not let it be pinned."""
        free = available_bytes()
        if free is not None and nbytes > free:
            raise WorkloadError(_refusal(nbytes, f"{free / 1e9:.1f} GB are free"))
        pages = _pages(max(nbytes, 1))
        return cls(_mapped(pages, device) if device.type == "cuda" else pages)

    @property
    def nbytes(self) -> int:
        """Bytes of the host."""
        return self.device_view.nbytes

    def split(self, shapes: list[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
        """Tensors of these shapes, one after another, aligned."""
        tensors, start = [], 0
        for shape, dtype in shapes:
            size = shape.numel() * dtype.itemsize
            tensors.append(self.device_view[start : start + size].view(dtype).view(shape))
            start += aligned(size)
        return tensors


def split_bytes(shapes: list[tuple[torch.Size, torch.dtype]]) -> int:
    """Bytes that `HostMemory.split` needs for these shapes."""
    return sum(aligned(shape.numel() * dtype.itemsize) for shape, dtype in shapes)


def _pages(nbytes: int) -> Tensor:
    """Zero-filled pages of their own, large ones where the system has any: these are pinned faster."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise WorkloadError(_refusal(nbytes, f"the system refuses them ({error.strerror})")) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


@dataclass(frozen=True, eq=False)
class _Pinned:
    """Pages as an array on the device, by the interface that torch reads; it keeps them alive."""

    pages: Tensor

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shape, address = (self.pages.numel(),), (self.pages.data_ptr(), False)
        return {"shape": shape, "typestr": "|u1", "data": address, "strides": None, "version": 3}


def _mapped(pages: Tensor, device: torch.device) -> Tensor:
    """Pins `pages` until the returned view, a tensor on `device` over the same memory, is gone."""
    runtime, address = torch.cuda.cudart(), pages.data_ptr()
    status = runtime.cudaHostRegister(address, pages.nbytes, MAPPED)
    if int(status) != 0:
        with contextlib.suppress(RuntimeError):  # the next launch reports the failed call, once
            torch.zeros(1, device=device)
        raise WorkloadError(_refusal(pages.nbytes, f"the driver refuses to pin them (error {int(status)})"))
    pinned = _Pinned(pages)
    weakref.finalize(pinned, runtime.cudaHostUnregister, address)
    view = torch.as_tensor(pinned, device=device)
    if view.data_ptr() != address:
        raise WorkloadError(_refusal(pages.nbytes, "this machine's device cannot read it by address"))
    return view


def _refusal(nbytes: int, why: str) -> str:
    return (
        f"offloaded KV needs {nbytes / 1e9:.1f} GB of pinned host memory and {why}; allowed: a shorter context, a "
        "smaller batch, a higher memory_limit or another KV format"
    )
