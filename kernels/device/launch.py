"""Launch of a compiled CUDA kernel that may start while those before it on the stream still run.

Programmatic dependent launch (CUDA C++ Programming Guide): once every block of a kernel has executed
`griddepcontrol.launch_dependents` (or ended), blocks of the next kernel take what the processors have free, run what
depends on nothing that was just written (a weight's first bytes travel), and meet earlier results only after
`griddepcontrol.wait`. In a captured graph it is an edge of its own kind.

Rules for every kernel launched this way, and for Triton's with `launch_pdl=True`:
- All its threads that read what another kernel wrote, or write anything, wait first. A chain of such kernels is then
  ordered as usual, since a kernel ends only after the ones before it.
- Before the wait it reads only what is constant during a round: weights, and codes of the cache. Kernels that write
  those never let the next one start early, and another kernel stands between: that all blocks of a kernel have ended
  lets the next one start, but what they wrote is only sure to be seen after its wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

PROGRAMMATIC_STREAM_SERIALIZATION = 6  # the driver's CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


class Configuration(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


def launch_with_pdl(
    kernel: Any,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    args: Sequence[Tensor | int | float],
    shared_bytes: int = 0,
    *,
    early: bool = True,
) -> None:
    """Launches a kernel of `torch.cuda._compile_kernel` on the current stream, early if the one before permits.

    Not `early` where what it reads before it waits was written only now. Tensors go as pointers, integers as int,
    floats as double. Raises ValueError for an integer beyond 32 bits, RuntimeError when the driver refuses.
    """
    values = [_argument(arg) for arg in args]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    attribute = _Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=int(early))
    configuration = Configuration(
        (ctypes.c_uint * 3)(*grid),
        (ctypes.c_uint * 3)(*block),
        shared_bytes,
        torch.cuda.current_stream().cuda_stream,
        ctypes.pointer(attribute),
        1,
    )
    status = driver().cuLaunchKernelEx(ctypes.byref(configuration), kernel.func, pointers, None)
    if status:
        raise RuntimeError(f"the CUDA driver refused a launch of grid {grid}, block {block}: error {status}")


def pdl_options(tensor: Tensor) -> dict[str, bool]:
    """Launch options of a Triton kernel that begins with `pdl_launch_dependents_and_wait`: on Hopper and newer."""
    early = tensor.is_cuda and torch.version.cuda is not None and _capability(tensor.device) >= (9, 0)
    return {"PDL": early, "launch_pdl": early}


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def driver() -> ctypes.CDLL:
    """The CUDA driver's library, as torch loads it."""
    library: ctypes.CDLL = torch.cuda._utils._get_gpu_runtime_library()
    return library


def _argument(arg: Tensor | int | float) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_double:
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, float):
        return ctypes.c_double(arg)
    if not -(1 << 31) <= arg < 1 << 31:  # ctypes would pass its lower half
        raise ValueError(f"{arg} does not fit a kernel's 32-bit argument; allowed: {-(1 << 31)} to {(1 << 31) - 1}")
    return ctypes.c_int(arg)
