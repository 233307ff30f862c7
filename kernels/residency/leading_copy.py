"""Copies of the part of a cache that is in use, with counts on the device: from host memory to the device."""

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.kv_cache import require_rows
from ridgeplan.roofline.cost import Cost

WORD_BYTES = 4  # entries are copied as whole words


def copy_leading(source: Tensor, out: Tensor, count: Tensor, *, backend: Backend = "auto") -> None:
    """Copies the first `count` entries of every row and head, and leaves the others as they are.

    source, out: [B, Hkv, entries, ...], contiguous, of one dtype; `out` may have more entries, and an entry is a
    multiple of 4 bytes. count: int32 [B] on the device, so that a captured CUDA graph copies no more than rows hold at
    its replay. `source` may be host memory that the device reads by address.
    Raises ValueError for other shapes, dtypes or strides.
    """
    same = (*source.shape[:2], *source.shape[3:]) == (*out.shape[:2], *out.shape[3:]) and source.dtype == out.dtype
    if not same or out.shape[2] < source.shape[2]:
        raise ValueError(
            f"source is {source.dtype} {list(source.shape)} and out {out.dtype} {list(out.shape)}; allowed: equal, or "
            "more entries in out"
        )
    if not (source.is_contiguous() and out.is_contiguous()) or entry_bytes(source) % WORD_BYTES:
        raise ValueError(f"entries of {entry_bytes(source)} bytes; allowed: contiguous multiples of {WORD_BYTES}")
    require_rows(len(source), torch.int32, count=count)
    if not uses_gpu_kernel(backend, source):
        copy_leading_reference(source, out, count)
        return
    from ridgeplan.kernels.residency.leading_copy_triton import copy_leading_triton

    copy_leading_triton(source, out, count)


def copy_leading_reference(source: Tensor, out: Tensor, count: Tensor) -> None:
    """The same in plain torch."""
    for row, used in enumerate(count.tolist()):
        out[row, :, :used] = source[row, :, :used]


def entry_bytes(source: Tensor) -> int:
    """Bytes of one entry."""
    return source[0, 0, 0].nbytes


def copy_leading_cost(source: Tensor, entries: int) -> Cost:
    """`copy_leading` of `entries` entries of each row and head: read over PCIe, written to the device."""
    moved = source.shape[0] * source.shape[1] * entries * entry_bytes(source)
    return Cost(read_bytes=moved, write_bytes=moved)
