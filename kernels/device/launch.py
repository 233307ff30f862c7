"""Launch of compiled CUDA kernels with programmatic dependent launch (PDL).

With PDL (CUDA C++ Programming Guide), once every CTA of a kernel has executed `griddepcontrol.launch_dependents` or
ended, CTAs of the next kernel start where SMs have room. They first do independent work, for example fetch the first
bytes of a weight, and read earlier results only after `griddepcontrol.wait`. In a captured graph, PDL is a separate
type of edge.

Rules for every kernel launched this way, and for Triton's with `launch_pdl=True`:
- All threads that read other kernels' results, or write anything, wait first. A chain of such kernels is then ordered
  as usual, since a kernel ends only after the ones before it.
- Before the wait, a kernel reads only data that is constant during a round: weights, and codes of the cache. Kernels
  that write such data never let the next one start early, and another kernel runs in between: a kernel may start when
  all CTAs of the one before have ended, but their writes are only guaranteed to be visible after its wait.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

PROGRAMMATIC_STREAM_SERIALIZATION = 6  # the driver's CUlaunchAttributeID


class LaunchAttribute(ctypes.Structure):
    """The driver's CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


def launch_with_pdl(
    kernel: Any,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    params: ctypes.Structure,
    shared_bytes: int = 0,
    *,
    early: bool = True,
) -> None:
    """Launches a kernel of `compile_kernel` on the current stream, with `params` as its only argument.

    early: the kernel may start before the previous one has ended, if that one allows it; False if data that it reads
    before its wait has only just been written. Raises RuntimeError when the driver refuses.
    """
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    attribute = LaunchAttribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=int(early))
    config = LaunchConfig(
        (ctypes.c_uint * 3)(*grid),
        (ctypes.c_uint * 3)(*block),
        shared_bytes,
        torch.cuda.current_stream().cuda_stream,
        ctypes.pointer(attribute),
        1,
    )
    status = driver().cuLaunchKernelEx(ctypes.byref(config), kernel.func, arguments, None)
    if status:
        raise RuntimeError(f"the CUDA driver refused a launch of grid {grid}, block {block}: error {status}")


def pdl_options(tensor: Tensor) -> dict[str, bool]:
    """Launch options of a Triton kernel that begins with `pdl_launch_dependents_and_wait`: PDL on Hopper and newer."""
    early = tensor.is_cuda and torch.version.cuda is not None and _capability(tensor.device) >= (9, 0)
    return {"PDL": early, "launch_pdl": early}


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def driver() -> ctypes.CDLL:
    """The CUDA driver's library, as torch loads it."""
    library: ctypes.CDLL = torch.cuda._utils._get_gpu_runtime_library()
    return library
