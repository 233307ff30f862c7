"""KV in host memory: copies and gathers that read it by address over PCIe, and the slots that hold it on the device.

Copies by the DMA engines reach a tenth of PCIe's bandwidth at such sizes; loads by a kernel nearly all of it.

Elastic loading (SpeContext, section 5.4): of the tokens S_now that a step chooses, only S_now - S_last have to be
loaded, where S_last is what the slots hold. The slots that were used least recently make room. All of it happens on the
device, without the host.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.kv_cache import require_rows
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.token_rows import WORD_BYTES as ROW_WORD_BYTES
from ridgeplan.kernels.kv_cache.token_rows import pack_token_rows
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.execution import token_row_bytes

KeysAndValues = tuple[Tensor, Tensor]


def flush_to_host(
    recent: Tensor, out: Tensor, first: Tensor, group: int, mask: Tensor, *, backend: Backend = "auto"
) -> None:
    """Writes the first `group` slots of the rows where `mask` is True to tokens first[b], first[b] + 1, ... of `out`.

    recent: [B, Hkv, slots, D], out: [B, Hkv, tokens, D], which may be host memory that the device writes by address,
    with contiguous channels. first: int32 [B], mask: bool [B], on the device.
    Raises ValueError for other shapes or dtypes.
    """
    agree = (*recent.shape[:2], recent.shape[3], recent.dtype) == (*out.shape[:2], out.shape[3], out.dtype)
    if not agree or recent.shape[2] < group or recent.stride(3) != 1 or out.stride(3) != 1:
        raise ValueError(f"slots {list(recent.shape)} and tokens {list(out.shape)} disagree with a group of {group}")
    require_rows(len(recent), torch.int32, recent.device, first=first)
    require_rows(len(recent), torch.bool, recent.device, mask=mask)
    if not uses_gpu_kernel(backend, recent):
        flush_to_host_reference(recent, out, first, group, mask)
        return
    from ridgeplan.kernels.offload.triton import flush_to_host_triton

    flush_to_host_triton(recent, out, first, group, mask)


def flush_to_host_reference(recent: Tensor, out: Tensor, first: Tensor, group: int, mask: Tensor) -> None:
    """The same in plain torch."""
    for row in mask.nonzero().flatten().tolist():
        start = int(first[row])
        out[row, :, start : start + group] = recent[row, :, :group]


def flush_to_host_cost(recent: Tensor, group: int) -> Cost:
    """Cost of `flush_to_host` where every row moves a group: read on the device, written over PCIe."""
    return ops.copy(recent[:, :, :group].numel(), recent.element_size())


def flush_codes_to_host(
    codes: QuantizedKV, out: KeysAndValues, first: Tensor, mask: Tensor, *, backend: Backend = "auto"
) -> None:
    """Writes one group of codes of the rows where `mask` is True to tokens first[b], first[b] + 1, ... of `out`.

    codes: of one group a row, with both planes. out: keys and values, int64 [B, Hkv, tokens, words], rows as
    `TokenRows` has them, which may be host memory that the device writes by address. first: int32 [B], mask: bool [B].
    Raises ValueError for other shapes or dtypes.
    """
    width = token_row_bytes(codes.head_dim) // ROW_WORD_BYTES
    fits = all((*x.shape[:2], x.shape[3], x.dtype) == (codes.batch, codes.kv_heads, width, torch.int64) for x in out)
    if codes.groups != 1 or codes.planes != 2 or not fits:
        raise ValueError(f"rows {[list(x.shape) for x in out]} disagree with a group of {codes.batch} rows of codes")
    require_rows(codes.batch, torch.int32, codes.key_upper.device, first=first)
    require_rows(codes.batch, torch.bool, codes.key_upper.device, mask=mask)
    if not uses_gpu_kernel(backend, codes.key_upper):
        for rows, held in zip(pack_token_rows(codes), out, strict=True):
            flush_to_host_reference(rows, held, first, codes.group, mask)
        return
    from ridgeplan.kernels.offload.triton import flush_codes_to_host_triton

    flush_codes_to_host_triton(codes, out, first, mask)


WORD_BYTES = 4  # entries are copied as whole words


def copy_prefix(source: Tensor, out: Tensor, count: Tensor, *, backend: Backend = "auto") -> None:
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
    require_rows(len(source), torch.int32, out.device, count=count)
    if not uses_gpu_kernel(backend, source):
        copy_prefix_reference(source, out, count)
        return
    from ridgeplan.kernels.offload.triton import copy_prefix_triton

    copy_prefix_triton(source, out, count)


def copy_prefix_reference(source: Tensor, out: Tensor, count: Tensor) -> None:
    """The same in plain torch."""
    for row, used in enumerate(count.tolist()):
        out[row, :, :used] = source[row, :, :used]


def entry_bytes(source: Tensor) -> int:
    """Bytes of one entry."""
    return source[0, 0, 0].nbytes


def copy_prefix_cost(source: Tensor, entries: int) -> Cost:
    """Cost of `copy_prefix` of `entries` entries of each row and head: read over PCIe, written to the device."""
    return ops.copy(source[:, :, 0].numel() * entries, source.element_size())


MAX_SLOTS = 1 << 14  # of one set; a program holds their times of use in registers
EMPTY = -1


@dataclass(frozen=True, eq=False)
class SlotTable:
    """The contents of the slots of one layer. A unit is a token, or a page of tokens that are chosen together.

    slot_of: int32 [B, sets, units], the slot that holds a unit, or EMPTY. unit_of: int32 [B, sets, slots], the reverse.
    used: int32 [B, sets, slots], the step of a slot's last use. step: int32 [1], steps so far. requested, loaded: int64
    [B, sets], units that steps have chosen, and those that were missing.
    """

    slot_of: Tensor
    unit_of: Tensor
    used: Tensor
    step: Tensor
    requested: Tensor
    loaded: Tensor

    @classmethod
    def allocate(cls, batch: int, sets: int, units: int, slots: int, device: torch.device) -> SlotTable:
        """Empty slots. Raises ValueError for more than MAX_SLOTS."""
        if not 0 < slots <= MAX_SLOTS:
            raise ValueError(f"{slots} slots on the device; allowed: 1 to {MAX_SLOTS}")

        def filled(value: int, count: int) -> Tensor:
            return torch.full((batch, sets, count), value, dtype=torch.int32, device=device)

        counters = [torch.zeros(batch, sets, dtype=torch.int64, device=device) for _ in range(2)]
        step = torch.zeros(1, dtype=torch.int32, device=device)
        return cls(filled(EMPTY, units), filled(EMPTY, slots), filled(0, slots), step, *counters)

    def forget(self) -> None:
        """Empties the slots, of which those used last are still the last to be used again."""
        self.slot_of.fill_(EMPTY)
        self.unit_of.fill_(EMPTY)

    def reset(self) -> None:
        """As they were made."""
        self.forget()
        for tensor in (self.used, self.step, self.requested, self.loaded):
            tensor.zero_()

    def first(self, rows: int) -> SlotTable:
        """The table of the first rows."""
        slot_of, unit_of, used = (x[:rows] for x in (self.slot_of, self.unit_of, self.used))
        return SlotTable(slot_of, unit_of, used, self.step, self.requested[:rows], self.loaded[:rows])

    @property
    def bytes(self) -> int:
        """Device memory of the table."""
        return sum(tensor.nbytes for tensor in (self.slot_of, self.unit_of, self.used))


@dataclass(frozen=True, eq=False)
class SlotLoads:
    """What one step loads. slots: int32 [B, sets, K], where each chosen unit is once it is done. units, into: int32 [B,
    sets, K], of which the first `count`, int32 [B, sets], are loaded, each into its slot.
    """

    slots: Tensor
    units: Tensor
    into: Tensor
    count: Tensor


def gather_into_slots(
    source: KeysAndValues,
    out: KeysAndValues,
    loads: SlotLoads,
    page: int = 1,
    *,
    concurrent: bool = False,
    backend: Backend = "auto",
) -> None:
    """Copies the units of `loads` into their slots.

    source: keys and values [B, Hkv, tokens, D], which may be host memory that the device reads by address. out: slots
    [B, Hkv, slots * page or more, D]. loads: of [B, 1 or Hkv] sets; a unit is `page` tokens, from unit * page on.
    concurrent: whether other kernels run at the same time; it then takes less of the memory system from them.
    Raises ValueError for other shapes or dtypes, and channels that are not contiguous.
    """
    _check(source, out, loads)
    if not uses_gpu_kernel(backend, source[0]):
        gather_into_slots_reference(source, out, loads, page)
        return
    from ridgeplan.kernels.offload.triton import CONCURRENT, EXCLUSIVE, gather_into_slots_triton

    gather_into_slots_triton(source, out, loads, page, CONCURRENT if concurrent else EXCLUSIVE)


def gather_into_slots_reference(source: KeysAndValues, out: KeysAndValues, loads: SlotLoads, page: int) -> None:
    """The same in plain torch."""
    batch, kv_heads = source[0].shape[:2]
    sets = loads.count.shape[1]
    offsets = torch.arange(page, device=loads.units.device)
    for row in range(batch):
        for head in range(kv_heads):
            unit_set = row, head % sets
            count = int(loads.count[unit_set])
            at = (loads.units[unit_set][:count, None] * page + offsets).flatten().long()
            to = (loads.into[unit_set][:count, None] * page + offsets).flatten().long()
            for store, slots in zip(source, out, strict=True):
                slots[row, head, to] = store[row, head, at]


def gather_cost(source: KeysAndValues, units: int, page: int = 1) -> Cost:
    """Cost of `gather_into_slots` of `units` units of every row and KV head: read over PCIe, written to the device."""
    return ops.copy(2 * source[0][:, :, 0].numel() * units * page, source[0].element_size())


def _check(source: KeysAndValues, out: KeysAndValues, loads: SlotLoads) -> None:
    batch, kv_heads, _, head_dim = source[0].shape
    tensors = (*source, *out)
    agree = all((*x.shape[:2], x.shape[3], x.dtype) == (batch, kv_heads, head_dim, source[0].dtype) for x in tensors)
    paired = source[0].shape == source[1].shape and out[0].shape == out[1].shape
    if not agree or not paired or any(x.stride(3) != 1 for x in tensors):
        raise ValueError(f"source {list(source[0].shape)} and slots {list(out[0].shape)} disagree, or have strides")
    if loads.count.shape[0] != batch or loads.count.shape[1] not in (1, kv_heads):
        raise ValueError(f"loads of sets {list(loads.count.shape)}; allowed: [{batch}, 1 or {kv_heads}]")


def allocate_slots(table: SlotTable, index: Tensor, count: Tensor, *, backend: Backend = "auto") -> SlotLoads:
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
        allocate_slots_reference(table, index, count, loads)
        return loads
    from ridgeplan.kernels.offload.triton import allocate_slots_triton

    allocate_slots_triton(table, index, count, loads)
    return loads


def allocate_slots_reference(table: SlotTable, index: Tensor, count: Tensor, out: SlotLoads) -> None:
    """The same in plain torch, set by set."""
    now = int(table.step)
    for row, unit_set in itertools.product(*map(range, count.shape)):
        chosen = index[row, unit_set, : int(count[row, unit_set])].long()
        slots = table.slot_of[row, unit_set, chosen].long()
        used, held = table.used[row, unit_set], table.unit_of[row, unit_set]
        used[slots[slots != EMPTY]] = now
        missing = chosen[slots == EMPTY]
        into = used.argsort(stable=True)[: len(missing)].sort().values
        evicted = held[into]
        table.slot_of[row, unit_set, evicted[evicted != EMPTY].long()] = EMPTY
        table.slot_of[row, unit_set, missing] = into.int()
        held[into], used[into] = missing.int(), now
        slots[slots == EMPTY] = into
        out.slots[row, unit_set, : len(chosen)] = slots.int()
        out.units[row, unit_set, : len(missing)], out.into[row, unit_set, : len(missing)] = missing.int(), into.int()
        out.count[row, unit_set] = len(missing)
        table.requested[row, unit_set] += len(chosen)
        table.loaded[row, unit_set] += len(missing)


def allocate_slots_cost(table: SlotTable, index: Tensor) -> Cost:
    """Cost of `allocate_slots` where nothing is missing."""
    batch, sets, chosen = index.shape
    return ops.allocate_slots(batch, sets, chosen, table.used.shape[2])
