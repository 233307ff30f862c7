"""Loads of chosen tokens from host memory into slots, by address: rows of 128 to 256 bytes that lie apart.

Copies by the DMA engines reach a tenth of PCIe's bandwidth at such sizes; loads by a kernel nearly all of it.
"""

from __future__ import annotations

import torch

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.residency.slot_table import KeysAndValues, SlotLoads
from ridgeplan.roofline.cost import Cost


def gather_into_slots(
    source: KeysAndValues,
    out: KeysAndValues,
    loads: SlotLoads,
    page: int = 1,
    *,
    beside: bool = False,
    backend: Backend = "auto",
) -> None:
    """Copies the units of `loads` into their slots.

    source: keys and values [B, Hkv, tokens, D], which may be host memory that the device reads by address. out: slots
    [B, Hkv, slots * page or more, D]. loads: of [B, 1 or Hkv] sets; a unit is `page` tokens, from unit * page on.
    beside: whether other kernels run at the same time, which are to lose little by it.
    Raises ValueError for other shapes or dtypes, and channels that are not contiguous.
    """
    _check(source, out, loads)
    if not uses_gpu_kernel(backend, source[0]):
        gather_into_slots_reference(source, out, loads, page)
        return
    from ridgeplan.kernels.residency.gather_triton import ALONE, BESIDE, gather_into_slots_triton

    gather_into_slots_triton(source, out, loads, page, BESIDE if beside else ALONE)


def gather_into_slots_reference(source: KeysAndValues, out: KeysAndValues, loads: SlotLoads, page: int) -> None:
    """The same in plain torch."""
    batch, kv_heads = source[0].shape[:2]
    sets = loads.count.shape[1]
    offsets = torch.arange(page, device=loads.units.device)
    for row in range(batch):
        for head in range(kv_heads):
            own = row, head % sets
            count = int(loads.count[own])
            at = (loads.units[own][:count, None] * page + offsets).flatten().long()
            to = (loads.into[own][:count, None] * page + offsets).flatten().long()
            for held, slots in zip(source, out, strict=True):
                slots[row, head, to] = held[row, head, at]


def gather_cost(source: KeysAndValues, units: int, page: int = 1) -> Cost:
    """`gather_into_slots` of `units` units of every row and KV head: read over PCIe, written to the device."""
    batch, kv_heads, _, head_dim = source[0].shape
    moved = 2 * batch * kv_heads * units * page * head_dim * source[0].element_size()
    return Cost(read_bytes=moved, write_bytes=moved)


def _check(source: KeysAndValues, out: KeysAndValues, loads: SlotLoads) -> None:
    batch, kv_heads, _, head_dim = source[0].shape
    tensors = (*source, *out)
    alike = all((*x.shape[:2], x.shape[3], x.dtype) == (batch, kv_heads, head_dim, source[0].dtype) for x in tensors)
    paired = source[0].shape == source[1].shape and out[0].shape == out[1].shape
    if not alike or not paired or any(x.stride(3) != 1 for x in tensors):
        raise ValueError(f"source {list(source[0].shape)} and slots {list(out[0].shape)} disagree, or have strides")
    if loads.count.shape[0] != batch or loads.count.shape[1] not in (1, kv_heads):
        raise ValueError(f"loads of sets {list(loads.count.shape)}; allowed: [{batch}, 1 or {kv_heads}]")
