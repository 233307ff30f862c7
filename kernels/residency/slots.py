"""Which chosen tokens are in a layer's slots on the device, and which slots the missing ones take.

Elastic loading (SpeContext, section 5.4): of the tokens S_now that a step chooses, only S_now - S_last have to be
loaded, where S_last is what the slots hold. The slots that were used least recently make room. All of it happens on the
device, without the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.residency.slot_table import EMPTY, SlotLoads, SlotTable
from ridgeplan.roofline.cost import Cost


def take_slots(table: SlotTable, index: Tensor, count: Tensor, *, backend: Backend = "auto") -> SlotLoads:
    """Gives every chosen unit a slot, and lists those that have to be loaded; the table is as after the loads.

    index: int32 [B, sets, K] of distinct units, count: int32 [B, sets], the entries that hold; both on the device.
    Units that have a slot keep it. The others take the slots that were used least recently, of equally old ones those
    of lower number: in the order of the list, lower slots first.
    Raises ValueError for other shapes or dtypes, and for more units than slots.
    """
    if index.dtype != torch.int32 or count.dtype != torch.int32 or count.shape != index.shape[:2]:
        raise ValueError(f"index is {index.dtype} {list(index.shape)}, count {count.dtype} {list(count.shape)}")
    if index.shape[:2] != table.used.shape[:2] or index.shape[2] > table.used.shape[2]:
        raise ValueError(f"index {list(index.shape)} of slots {list(table.used.shape)}; allowed: no more than slots")
    table.step.add_(1)
    slots, units, into = (torch.empty_like(index) for _ in range(3))
    loads = SlotLoads(slots, units, into, torch.empty_like(count))
    if not uses_gpu_kernel(backend, index):
        take_slots_reference(table, index, count, loads)
        return loads
    from ridgeplan.kernels.residency.slots_triton import take_slots_triton

    take_slots_triton(table, index, count, loads)
    return loads


def take_slots_reference(table: SlotTable, index: Tensor, count: Tensor, out: SlotLoads) -> None:
    """The same in plain torch, set by set."""
    now = int(table.step)
    for at in torch.cartesian_prod(*(torch.arange(size) for size in count.shape)).tolist():
        row, own = at
        chosen = index[row, own, : int(count[row, own])].long()
        slots = table.slot_of[row, own, chosen].long()
        used, held = table.used[row, own], table.unit_of[row, own]
        used[slots[slots != EMPTY]] = now
        missing = chosen[slots == EMPTY]
        into = used.argsort(stable=True)[: len(missing)].sort().values
        evicted = held[into]
        table.slot_of[row, own, evicted[evicted != EMPTY].long()] = EMPTY
        table.slot_of[row, own, missing] = into.int()
        held[into], used[into] = missing.int(), now
        slots[slots == EMPTY] = into
        out.slots[row, own, : len(chosen)] = slots.int()
        out.units[row, own, : len(missing)], out.into[row, own, : len(missing)] = missing.int(), into.int()
        out.count[row, own] = len(missing)
        table.wanted[row, own] += len(chosen)
        table.loaded[row, own] += len(missing)


def take_slots_cost(table: SlotTable, index: Tensor) -> Cost:
    """`take_slots` where nothing is missing: chosen units, their slots and the times of use of all slots."""
    return Cost(read_bytes=2 * index.nbytes + table.used.nbytes, write_bytes=2 * index.nbytes)
