"""Triton kernel of `take_slots`: one program per row and set.

Phases are separated by barriers, as threads read what others of the program have written. The time of use up to which
slots make room is found by bisection, so that no sort is needed.
"""

import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.residency.slot_table import SlotLoads, SlotTable

WARPS = 8


@triton.jit
def _leaving(last_use, now, misses):
    """Which of the slots make room: the `misses` that were used least recently, lower ones first."""
    # The latest use among them lies above `low`, up to `high`.
    low = now * 0 - 1
    high = now
    while high - low > 1:
        middle = (low + high) // 2
        enough = tl.sum((last_use <= middle).to(tl.int32), 0) >= misses
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    older = last_use < high
    tied = last_use == high
    ties = misses - tl.sum(older.to(tl.int32), 0)
    return older | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= ties))


@triton.jit(do_not_specialize=["units", "slots", "width"])
def _take_slots_kernel(
    slot_of,
    unit_of,
    used,
    step,
    wanted,
    loaded,
    index,
    count,
    out_slots,
    out_units,
    out_into,
    out_count,
    units,
    slots,
    width,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    own = tl.program_id(0).to(tl.int64)
    slot_of += own * units
    unit_of += own * slots
    used += own * slots
    out_units += own * width
    out_into += own * width
    now = tl.load(step)
    total = tl.load(count + own)
    place = tl.arange(0, WIDTH)
    chosen = place < total
    unit = tl.load(index + own * width + place, mask=chosen, other=0)
    slot = tl.load(slot_of + unit, mask=chosen, other=-1)
    hit = chosen & (slot >= 0)
    tl.store(used + slot, now, mask=hit)
    tl.debug_barrier()

    missing = chosen & (slot < 0)
    misses = tl.sum(missing.to(tl.int32), 0)
    all_slots = tl.arange(0, SLOTS)
    last_use = tl.load(used + all_slots, mask=all_slots < slots, other=2147483647)
    leaves = _leaving(last_use, now, misses)
    tl.store(out_into + tl.cumsum(leaves.to(tl.int32), 0) - 1, all_slots, mask=leaves)
    tl.debug_barrier()

    order = tl.cumsum(missing.to(tl.int32), 0) - 1
    into = tl.load(out_into + order, mask=missing, other=0)
    evicted = tl.load(unit_of + into, mask=missing, other=-1)
    tl.store(slot_of + evicted, -1, mask=missing & (evicted >= 0))
    tl.debug_barrier()
    tl.store(slot_of + unit, into, mask=missing)
    tl.store(unit_of + into, unit, mask=missing)
    tl.store(used + into, now, mask=missing)
    tl.store(out_units + order, unit, mask=missing)
    tl.store(out_slots + own * width + place, tl.where(hit, slot, into), mask=chosen)
    tl.store(out_count + own, misses)
    tl.store(wanted + own, tl.load(wanted + own) + total)
    tl.store(loaded + own, tl.load(loaded + own) + misses)


def take_slots_triton(table: SlotTable, index: Tensor, count: Tensor, out: SlotLoads) -> None:
    """See `ridgeplan.kernels.residency.slots.take_slots`."""
    batch, sets, width = index.shape
    slots = table.used.shape[2]
    _take_slots_kernel[(batch * sets,)](
        table.slot_of,
        table.unit_of,
        table.used,
        table.step,
        table.wanted,
        table.loaded,
        index.contiguous(),
        count.contiguous(),
        out.slots,
        out.units,
        out.into,
        out.count,
        table.slot_of.shape[2],
        slots,
        width,
        SLOTS=max(16, triton.next_power_of_2(slots)),
        WIDTH=max(16, triton.next_power_of_2(width)),
        num_warps=WARPS,
    )
