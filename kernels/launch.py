"""Launch of a compiled CUDA kernel that may start while the one before it on the stream still runs.

Programmatic dependent launch (CUDA C++ Programming Guide): the kernel's blocks take processors as they become free,
run what depends on nothing (a weight's first bytes travel) and wait with `griddepcontrol.wait` before they touch what
earlier kernels wrote. In a captured graph it is an edge of its own kind. A kernel lets the next one start by
`griddepcontrol.launch_dependents`, else when it ends.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

PROGRAMMATIC_STREAM_SERIALIZATION = 6  # the driver's CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


class _Configuration(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


def launch_early(
    kernel: Any, grid: tuple[int, int, int], block: tuple[int, int, int], args: list[Tensor | int], shared_bytes: int
) -> None:
    """Launches a kernel of `torch.cuda._compile_kernel` on the current stream, early if the one before permits.

    Tensors go as pointers, integers as 32-bit values. Raises RuntimeError when the driver refuses.
    """
    values = [ctypes.c_void_p(arg.data_ptr()) if isinstance(arg, Tensor) else ctypes.c_int(arg) for arg in args]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    attribute = _Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
    configuration = _Configuration(
        (ctypes.c_uint * 3)(*grid),
        (ctypes.c_uint * 3)(*block),
        shared_bytes,
        torch.cuda.current_stream().cuda_stream,
        ctypes.pointer(attribute),
        1,
    )
    driver = torch.cuda._utils._get_gpu_runtime_library()
    status = driver.cuLaunchKernelEx(ctypes.byref(configuration), kernel.func, pointers, None)
    if status:
        raise RuntimeError(f"the CUDA driver refused a launch of grid {grid}, block {block}: error {status}")
