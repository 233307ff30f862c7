"""Triton kernel of `gather_into_slots`: a fixed number of programs share the loads of all rows and KV heads.

A program copies ROWS tokens at once, so that enough loads are in flight to cover PCIe's latency. More of them only wait
before the caches, where other kernels' loads then wait too: beside the products of a layer few programs are best.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from ridgeplan.kernels.residency.slot_table import KeysAndValues, SlotLoads

ROWS = 16  # tokens
WARPS = 4


@dataclass(frozen=True)
class Launch:
    """programs: in all. at_once: batch rows that they work on together; fewer touch fewer pages of host memory."""

    programs: int
    at_once: int


ALONE, BESIDE = Launch(32, 1), Launch(16, 1)


@triton.jit
def _gather_kernel(
    keys,
    values,
    slot_keys,
    slot_values,
    units,
    into,
    count,
    width,
    rows,
    batch_stride,
    head_stride,
    token_stride,
    slot_batch_stride,
    slot_head_stride,
    slot_stride,
    KV_HEADS: tl.constexpr,
    SETS: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    TURNS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    channel = tl.arange(0, PADDED)[None, :]
    for turn in range(TURNS):
        item = tl.program_id(0) + turn * tl.num_programs(0)
        batch = (item // PARTS // KV_HEADS).to(tl.int64)
        if batch < rows:
            head = (item // PARTS % KV_HEADS).to(tl.int64)
            own = batch * SETS + head % SETS
            tokens = tl.load(count + own) * PAGE
            source = batch * batch_stride + head * head_stride + channel
            slots = batch * slot_batch_stride + head * slot_head_stride + channel
            for first in range(item % PARTS * ROWS, tokens, PARTS * ROWS):
                place = first + tl.arange(0, ROWS)
                inside = place < tokens
                unit = tl.load(units + own * width + place // PAGE, mask=inside, other=0).to(tl.int64)
                slot = tl.load(into + own * width + place // PAGE, mask=inside, other=0).to(tl.int64)
                at = source + ((unit * PAGE + place % PAGE) * token_stride)[:, None]
                to = slots + ((slot * PAGE + place % PAGE) * slot_stride)[:, None]
                mask = inside[:, None] & (channel < HEAD_DIM)
                key = tl.load(keys + at, mask=mask)
                value = tl.load(values + at, mask=mask)
                tl.store(slot_keys + to, key, mask=mask)
                tl.store(slot_values + to, value, mask=mask)


def gather_into_slots_triton(
    source: KeysAndValues, out: KeysAndValues, loads: SlotLoads, page: int, launch: Launch
) -> None:
    """See `ridgeplan.kernels.residency.gather.gather_into_slots`."""
    batch, kv_heads, _, head_dim = source[0].shape
    assert source[0].stride() == source[1].stride(), "keys and values lie alike"
    assert out[0].stride() == out[1].stride(), "slots of keys and values lie alike"
    parts = triton.cdiv(launch.programs, min(launch.at_once, batch) * kv_heads)
    items = batch * kv_heads * parts
    programs = min(launch.programs, items)
    _gather_kernel[(programs,)](
        *source,
        *out,
        loads.units,
        loads.into,
        loads.count,
        loads.units.shape[2],
        batch,
        *source[0].stride()[:3],
        *out[0].stride()[:3],
        KV_HEADS=kv_heads,
        SETS=loads.count.shape[1],
        PAGE=page,
        PARTS=parts,
        TURNS=triton.cdiv(items, programs),
        ROWS=ROWS,
        HEAD_DIM=head_dim,
        PADDED=triton.next_power_of_2(head_dim),
        num_warps=WARPS,
    )
