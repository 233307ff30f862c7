"""The flush of full-precision layers on the host: their oldest group of recent tokens moves there."""

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.kv_cache import require_rows
from ridgeplan.roofline.cost import Cost


def store_group(
    recent: Tensor, out: Tensor, first: Tensor, group: int, mask: Tensor, *, backend: Backend = "auto"
) -> None:
    """Writes the first `group` slots of the rows where `mask` is True to tokens first[b], first[b] + 1, ... of `out`.

    recent: [B, Hkv, slots, D], out: [B, Hkv, tokens, D], which may be host memory that the device writes by address,
    with contiguous channels. first: int32 [B], mask: bool [B], on the device.
    Raises ValueError for other shapes or dtypes.
    """
    alike = (*recent.shape[:2], recent.shape[3], recent.dtype) == (*out.shape[:2], out.shape[3], out.dtype)
    if not alike or recent.shape[2] < group or recent.stride(3) != 1 or out.stride(3) != 1:
        raise ValueError(f"slots {list(recent.shape)} and tokens {list(out.shape)} disagree with a group of {group}")
    require_rows(len(recent), torch.int32, first=first)
    require_rows(len(recent), torch.bool, mask=mask)
    if not uses_gpu_kernel(backend, recent):
        store_group_reference(recent, out, first, group, mask)
        return
    from ridgeplan.kernels.residency.group_store_triton import store_group_triton

    store_group_triton(recent, out, first, group, mask)


def store_group_reference(recent: Tensor, out: Tensor, first: Tensor, group: int, mask: Tensor) -> None:
    """The same in plain torch."""
    for row in mask.nonzero().flatten().tolist():
        start = int(first[row])
        out[row, :, start : start + group] = recent[row, :, :group]


def store_group_cost(recent: Tensor, group: int) -> Cost:
    """`store_group` where every row moves a group: read on the device, written over PCIe."""
    moved = recent.shape[0] * recent.shape[1] * group * recent.shape[3] * recent.element_size()
    return Cost(read_bytes=moved, write_bytes=moved)
