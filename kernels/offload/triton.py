"""Triton kernels that move KV between host memory and the device, and allocate the slots it is held in.

Over PCIe a load takes about 2 us, so some 100 KiB must be in flight: GATHER_BYTES or COPY_BLOCK words per program, of
few programs in all, whatever the size of a token. More only wait before the caches, where loads of the kernels beside
it then wait too (docs/benchmarks/offload.md).

Phases are separated by barriers, as threads read what others of the program have written. The time of use up to which
slots make room is found by bisection, so that no sort is needed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.offload import KeysAndValues, SlotLoads, SlotTable

GATHER_BYTES = 8192  # of keys and values that a program loads at once
GATHER_WARPS = 4

# Programs in all. They work on one batch row at a time: more would touch more pages of host memory.
EXCLUSIVE, CONCURRENT = 32, 16


@triton.jit
def _gather_kernel(
    keys,  # [rows, kv_heads, tokens, head_dim], on the host
    values,  # as keys
    slot_keys,  # out: [rows, kv_heads, slots, head_dim]
    slot_values,  # out, as slot_keys
    units,  # int32 [rows, SETS, width]
    into,  # int32 [rows, SETS, width]
    count,  # int32 [rows, SETS]
    width,
    rows,
    strides,  # of batch, head and token
    slot_strides,  # of batch, head and slot
    KV_HEADS: tl.constexpr,
    SETS: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    TURNS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    batch_stride, head_stride, token_stride = strides
    slot_batch_stride, slot_head_stride, slot_stride = slot_strides
    channel = tl.arange(0, PADDED)[None, :]
    for turn in range(TURNS):
        item = tl.program_id(0) + turn * tl.num_programs(0)
        batch = (item // PARTS // KV_HEADS).to(tl.int64)
        if batch < rows:
            head = (item // PARTS % KV_HEADS).to(tl.int64)
            unit_set = batch * SETS + head % SETS
            tokens = tl.load(count + unit_set) * PAGE
            source = batch * batch_stride + head * head_stride + channel
            slots = batch * slot_batch_stride + head * slot_head_stride + channel
            for first in range(item % PARTS * ROWS, tokens, PARTS * ROWS):
                place = first + tl.arange(0, ROWS)
                inside = place < tokens
                unit = tl.load(units + unit_set * width + place // PAGE, mask=inside, other=0).to(tl.int64)
                slot = tl.load(into + unit_set * width + place // PAGE, mask=inside, other=0).to(tl.int64)
                at = source + ((unit * PAGE + place % PAGE) * token_stride)[:, None]
                to = slots + ((slot * PAGE + place % PAGE) * slot_stride)[:, None]
                mask = inside[:, None] & (channel < HEAD_DIM)
                key = tl.load(keys + at, mask=mask)
                value = tl.load(values + at, mask=mask)
                tl.store(slot_keys + to, key, mask=mask)
                tl.store(slot_values + to, value, mask=mask)


def gather_into_slots_triton(
    source: KeysAndValues, out: KeysAndValues, loads: SlotLoads, page: int, programs: int
) -> None:
    """See `ridgeplan.kernels.offload.gather_into_slots`."""
    batch, kv_heads, _, head_dim = source[0].shape
    assert source[0].stride() == source[1].stride(), "keys and values lie alike"
    assert out[0].stride() == out[1].stride(), "slots of keys and values lie alike"
    parts = triton.cdiv(programs, kv_heads)
    items = batch * kv_heads * parts
    programs = min(programs, items)
    token_bytes = 2 * head_dim * source[0].element_size()
    _gather_kernel[(programs,)](
        *source,
        *out,
        loads.units,
        loads.into,
        loads.count,
        loads.units.shape[2],
        batch,
        source[0].stride()[:3],
        out[0].stride()[:3],
        KV_HEADS=kv_heads,
        SETS=loads.count.shape[1],
        PAGE=page,
        PARTS=parts,
        TURNS=triton.cdiv(items, programs),
        ROWS=triton.next_power_of_2(triton.cdiv(GATHER_BYTES, token_bytes)),
        HEAD_DIM=head_dim,
        PADDED=triton.next_power_of_2(head_dim),
        num_warps=GATHER_WARPS,
    )


STORE_BLOCK = 32  # tokens
STORE_WARPS = 4


@triton.jit
def _flush_to_host_kernel(
    recent,  # [batch, kv_heads, slots, head_dim]
    out,  # [batch, kv_heads, tokens, head_dim], on the host
    first,  # int32 [batch], tokens
    mask,  # bool [batch]
    strides,  # of batch, head and slot
    out_strides,  # of batch, head and token
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    batch_stride, head_stride, slot_stride = strides
    out_batch_stride, out_head_stride, out_stride = out_strides
    batch = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    if tl.load(mask + batch) != 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
        channel = tl.arange(0, PADDED)[None, :]
        inside = (token < GROUP) & (channel < HEAD_DIM)
        start = tl.load(first + batch).to(tl.int64)
        at = batch * batch_stride + head * head_stride + token * slot_stride + channel
        to = batch * out_batch_stride + head * out_head_stride + (start + token) * out_stride + channel
        tl.store(out + to, tl.load(recent + at, mask=inside), mask=inside)


def flush_to_host_triton(recent: Tensor, out: Tensor, first: Tensor, group: int, mask: Tensor) -> None:
    """See `ridgeplan.kernels.offload.flush_to_host`."""
    batch, kv_heads, _, head_dim = recent.shape
    _flush_to_host_kernel[(batch * kv_heads, triton.cdiv(group, STORE_BLOCK))](
        recent,
        out,
        first,
        mask.contiguous(),
        recent.stride()[:3],
        out.stride()[:3],
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK=STORE_BLOCK,
        HEAD_DIM=head_dim,
        PADDED=triton.next_power_of_2(head_dim),
        num_warps=STORE_WARPS,
    )


CODES_BLOCK = 32  # tokens


@triton.jit
def _token_nibbles(codes, channels, token, GROUP: tl.constexpr, inside):
    """4-bit codes of values that lie by channel: of some `channels` of some tokens."""
    byte = channels * (GROUP // 2) + token % (GROUP // 2)
    return (tl.load(codes + byte, mask=inside, other=0) >> ((token // (GROUP // 2)) * 4).to(tl.uint8)) & 15


@triton.jit
def _flush_codes_kernel(
    key_upper, key_lower,  # uint8 [rows, GROUP, HEAD_DIM / 2]
    value_upper, value_lower,  # uint8 [rows, HEAD_DIM, GROUP / 2]
    value_scale, value_min,  # float16 [rows, GROUP]
    out_keys, out_values,  # out: uint8 [batch, kv_heads, tokens, row bytes], on the host
    out_pairs,  # out_values as float16
    first,  # int32 [batch], tokens
    mask,  # bool [batch]
    strides,  # of batch, head and token, in bytes
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    batch_stride, head_stride, token_stride = strides
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // KV_HEADS, row % KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    if tl.load(mask + batch) != 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
        channel = tl.arange(0, HALF_PADDED)[None, :]
        inside = (token < GROUP) & (channel < HALF)
        start = batch * batch_stride + head * head_stride + (tl.load(first + batch) + token).to(tl.int64) * token_stride
        at = (row * GROUP + token) * HALF + channel
        tl.store(out_keys + start + channel, tl.load(key_upper + at, mask=inside), mask=inside)
        tl.store(out_keys + start + HALF + channel, tl.load(key_lower + at, mask=inside), mask=inside)
        values = row * HEAD_DIM * (GROUP // 2)
        low = _token_nibbles(value_upper + values, channel, token, GROUP, inside)
        high = _token_nibbles(value_upper + values, channel + HALF, token, GROUP, inside)
        tl.store(out_values + start + channel, low | (high << 4), mask=inside)
        low = _token_nibbles(value_lower + values, channel, token, GROUP, inside)
        high = _token_nibbles(value_lower + values, channel + HALF, token, GROUP, inside)
        tl.store(out_values + start + HALF + channel, low | (high << 4), mask=inside)
        pair, whole = (start + HEAD_DIM) // 2, token < GROUP
        tl.store(out_pairs + pair, tl.load(value_scale + row * GROUP + token, mask=whole), mask=whole)
        tl.store(out_pairs + pair + 1, tl.load(value_min + row * GROUP + token, mask=whole), mask=whole)


def flush_codes_to_host_triton(codes: QuantizedKV, out: KeysAndValues, first: Tensor, mask: Tensor) -> None:
    """See `ridgeplan.kernels.offload.flush_codes_to_host`."""
    keys, values = (rows.view(torch.uint8) for rows in out)
    assert keys.stride() == values.stride(), "keys and values lie alike"
    _flush_codes_kernel[(codes.batch * codes.kv_heads, triton.cdiv(codes.group, CODES_BLOCK))](
        codes.key_upper,
        codes.key_lower,
        codes.value_upper,
        codes.value_lower,
        codes.value_scale,
        codes.value_min,
        keys,
        values,
        out[1].view(torch.float16),
        first,
        mask.contiguous(),
        keys.stride()[:3],
        KV_HEADS=codes.kv_heads,
        GROUP=codes.group,
        HEAD_DIM=codes.head_dim,
        HALF_PADDED=triton.next_power_of_2(codes.head_dim // 2),
        BLOCK=CODES_BLOCK,
        num_warps=STORE_WARPS,
    )


PROGRAMS = 32  # in all, unless there are more rows and heads
COPY_BLOCK = 2048  # words
COPY_WARPS = 8


@triton.jit(do_not_specialize=["source_entries", "out_entries"])
def _copy_prefix_kernel(
    source,  # int32 [batch, heads, source_entries, ENTRY_WORDS]
    out,  # int32 [batch, heads, out_entries, ENTRY_WORDS]
    count,  # int32 [batch], entries
    source_entries,
    out_entries,
    ENTRY_WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    flat = tl.program_id(0).to(tl.int64)
    words = tl.load(count + flat // HEADS).to(tl.int64) * ENTRY_WORDS
    source += flat * source_entries * ENTRY_WORDS
    out += flat * out_entries * ENTRY_WORDS
    for first in range(tl.program_id(1) * BLOCK, words, PARTS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < words
        tl.store(out + at, tl.load(source + at, mask=inside), mask=inside)


def copy_prefix_triton(source: Tensor, out: Tensor, count: Tensor) -> None:
    """See `ridgeplan.kernels.offload.copy_prefix`."""
    batch, heads, entries = source.shape[:3]
    words = [tensor.view(batch, heads, tensor.shape[2], -1).view(torch.int32) for tensor in (source, out)]
    parts = triton.cdiv(PROGRAMS, batch * heads)
    _copy_prefix_kernel[(batch * heads, parts)](
        *words,
        count,
        entries,
        out.shape[2],
        ENTRY_WORDS=words[0].shape[3],
        HEADS=heads,
        PARTS=parts,
        BLOCK=COPY_BLOCK,
        num_warps=COPY_WARPS,
    )


SLOT_WARPS = 8


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
def _allocate_slots_kernel(
    slot_of,  # int32 [sets, units]
    unit_of,  # int32 [sets, slots]
    used,  # int32 [sets, slots]
    step,  # int32 [1]
    requested,  # int64 [sets]
    loaded,  # int64 [sets]
    index,  # int32 [sets, width]
    count,  # int32 [sets]
    out_slots,  # int32 [sets, width]
    out_units,  # as out_slots
    out_into,  # as out_slots
    out_count,  # int32 [sets]
    units,
    slots,
    width,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    unit_set = tl.program_id(0).to(tl.int64)
    slot_of += unit_set * units
    unit_of += unit_set * slots
    used += unit_set * slots
    out_units += unit_set * width
    out_into += unit_set * width
    now = tl.load(step)
    total = tl.load(count + unit_set)
    place = tl.arange(0, WIDTH)
    chosen = place < total
    unit = tl.load(index + unit_set * width + place, mask=chosen, other=0)
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
    tl.store(out_slots + unit_set * width + place, tl.where(hit, slot, into), mask=chosen)
    tl.store(out_count + unit_set, misses)
    tl.store(requested + unit_set, tl.load(requested + unit_set) + total)
    tl.store(loaded + unit_set, tl.load(loaded + unit_set) + misses)


def allocate_slots_triton(table: SlotTable, index: Tensor, count: Tensor, out: SlotLoads) -> None:
    """See `ridgeplan.kernels.offload.allocate_slots`."""
    batch, sets, width = index.shape
    slots = table.used.shape[2]
    _allocate_slots_kernel[(batch * sets,)](
        table.slot_of,
        table.unit_of,
        table.used,
        table.step,
        table.requested,
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
        num_warps=SLOT_WARPS,
    )
