"""Triton kernel of sparse decode attention: one program per (batch row, KV head), split and tile of query rows.

A tile of query rows carries `row_max` (largest score, base 2), `row_sum` (of probabilities) and the output as two
halves of the channels, acc0 and acc1 [rows, head_dim / 2], as a byte of codes holds one channel of each.

A program takes an equal range of its row's blocks: of chosen tokens, then of recent full-precision slots. Counts and
lengths are read on the device and the grid is sized by capacity, so a captured CUDA graph stays valid.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.attention import merge
from ridgeplan.kernels.attention.inputs import AttentionInputs
from ridgeplan.kernels.attention.triton import (
    LN_2,
    LOG2_E,
    MAX_ROWS,
    _check_tiles,
    _num_sms,
    _split_range,
    softmax_step,
)
from ridgeplan.kernels.device.triton_helpers import centred_affine, centred_codes, dot, launch_metadata
from ridgeplan.kernels.kv_cache.token_rows import TokenRows
from ridgeplan.kernels.sparse_attention import sparse_attention_cost
from ridgeplan.roofline.execution import choose_splits


@triton.jit
def _key_half(codes, scale, minimum, at, seen, BITS: tl.constexpr, dtype: tl.constexpr):
    """Half of the channels of some keys, of groups of their own."""
    low = tl.load(minimum + at, mask=seen, other=0.0)
    step, zero = centred_affine(tl.load(scale + at, mask=seen, other=0.0), low, BITS)
    return (codes.to(tl.float32) * step + zero).to(dtype)


@triton.jit
def _transposed_half(upper, lower, byte, shift, seen, BITS: tl.constexpr, dtype: tl.constexpr):
    """Centred codes of values that lie by channel: nibble `shift` of single bytes."""
    code = (tl.load(upper + byte, mask=seen, other=0).to(tl.int32) >> shift) & 15
    if BITS == 8:
        code = code * 16 + ((tl.load(lower + byte, mask=seen, other=0).to(tl.int32) >> shift) & 15) - 8
    return (code.to(tl.float32) - (128 if BITS == 8 else 8)).to(dtype)


@triton.jit
def gathered_block(
    row_max,
    row_sum,
    acc0,
    acc1,
    q0,
    q1,
    token,
    slot,
    inside,
    first_group,
    scale,
    key_planes,
    value_planes,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    VALUE_ROWS: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
):
    """Adds the tokens `token` [BLOCK] of a row's codes that are `inside`; all query rows see them.

    Tokens outside are read but do not count, so they must exist. VALUE_ROWS: value_upper holds values by token, as
    `DraftPlanes.value_rows`; else by channel, as `QuantizedKV`. SLOT_BYTES: of the `TokenRows` at `slot` [BLOCK],
    which counts over all rows and heads, that hold the tokens; or 0.
    """
    key_upper, key_lower, key_scale, key_min = key_planes
    value_upper, value_lower, value_scale, value_min = value_planes
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    HALF_GROUP: tl.constexpr = GROUP // 2
    dtype: tl.constexpr = q0.dtype
    group = first_group + token // GROUP
    place = token % GROUP
    channels = tl.arange(0, HALF_DIM)[None, :]
    seen = inside[:, None]
    if SLOT_BYTES:
        row = slot[:, None] * SLOT_BYTES + channels
        pair = slot * (SLOT_BYTES // 2)
    else:
        row = (group * GROUP + place)[:, None] * HALF_DIM + channels
        pair = group * GROUP + place
    low = tl.load(value_min + pair, mask=inside, other=0.0)
    value_step, value_zero = centred_affine(tl.load(value_scale + pair, mask=inside, other=0.0), low, BITS)
    first, second = centred_codes(key_upper, key_lower, row, BITS, dtype)
    at = group[:, None] * HEAD_DIM + channels
    scores = tl.zeros([q0.shape[0], token.shape[0]], tl.float32)
    scores = dot(q0, tl.trans(_key_half(first, key_scale, key_min, at, seen, BITS, dtype)), scores)
    scores = dot(q1, tl.trans(_key_half(second, key_scale, key_min, at + HALF_DIM, seen, BITS, dtype)), scores)
    scores = tl.where(inside[None, :], scores * scale, float("-inf"))
    row_max, row_sum, rescale, p = softmax_step(row_max, row_sum, scores)
    if VALUE_ROWS:
        first, second = centred_codes(value_upper, value_lower, row, BITS, dtype)
    else:
        byte = (group[:, None] * HEAD_DIM + channels) * HALF_GROUP + (place % HALF_GROUP)[:, None]
        shift = (place // HALF_GROUP)[:, None] * 4
        first = _transposed_half(value_upper, value_lower, byte, shift, seen, BITS, dtype)
        second = _transposed_half(value_upper, value_lower, byte + HALF_DIM * HALF_GROUP, shift, seen, BITS, dtype)
    bias = tl.sum(p * value_zero[None, :], 1)[:, None]
    weights = (p * value_step[None, :]).to(dtype)
    acc0 = dot(weights, first, acc0 * rescale[:, None] + bias)
    acc1 = dot(weights, second, acc1 * rescale[:, None] + bias)
    return row_max, row_sum, acc0, acc1


@triton.jit
def slots_block(
    row_max,
    row_sum,
    acc0,
    acc1,
    q0,
    q1,
    limit,
    slots,
    inside,
    scale,
    keys,
    values,
    key_stride,
    value_stride,
    HEAD_DIM: tl.constexpr,
):
    """Adds the full-precision `slots` [BLOCK] that are `inside`; a row attends to those below its own `limit`."""
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    channels = tl.arange(0, HALF_DIM)[None, :]
    seen = inside[:, None]
    key = keys + slots.to(tl.int64)[:, None] * key_stride + channels
    value = values + slots.to(tl.int64)[:, None] * value_stride + channels
    scores = tl.zeros([q0.shape[0], slots.shape[0]], tl.float32)
    scores = dot(q0, tl.trans(tl.load(key, mask=seen, other=0.0).to(q0.dtype)), scores)
    scores = dot(q1, tl.trans(tl.load(key + HALF_DIM, mask=seen, other=0.0).to(q0.dtype)), scores)
    scores = tl.where((slots[None, :] < limit[:, None]) & inside[None, :], scores * scale, float("-inf"))
    row_max, row_sum, rescale, p = softmax_step(row_max, row_sum, scores)
    weights = p.to(q0.dtype)
    acc0 = dot(weights, tl.load(value, mask=seen, other=0.0).to(q0.dtype), acc0 * rescale[:, None])
    acc1 = dot(weights, tl.load(value + HALF_DIM, mask=seen, other=0.0).to(q0.dtype), acc1 * rescale[:, None])
    return row_max, row_sum, acc0, acc1


BLOCK = 32  # tokens in flight of a program
WARPS = 4
STAGES = 2
SPLITS = 4  # times those of contiguous attention: gathers hide their latency by more programs, not by longer pipelines


@triton.jit
def _load_tokens(index, place, entries, limit, PAGE: tl.constexpr):
    """The chosen tokens at `place` of a list of pages, and which of them exist; the others become token 0."""
    inside = place < entries * PAGE
    token = tl.load(index + place // PAGE, mask=inside, other=0) * PAGE + place % PAGE
    inside = inside & (token < limit)
    return tl.where(inside, token, 0), inside


@triton.jit
def _store_result(partial, lse, result, valid, row_max, row_sum, acc0, acc1, HEAD_DIM: tl.constexpr):
    """A split's normalized partial and its log-sum-exp."""
    divisor = tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(lse + result, (row_max + tl.log2(divisor)) * LN_2, mask=valid)
    at = partial + result[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM // 2)[None, :]
    tl.store(at, acc0 / divisor[:, None], mask=valid[:, None])
    tl.store(at + HEAD_DIM // 2, acc1 / divisor[:, None], mask=valid[:, None])


def _sparse_attention_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """The kernel's cost at full index lists."""
    q, bits = args["q"], args["BITS"]
    choice = args["index"], args["PAGE"]
    cost = sparse_attention_cost(q, args["KV_HEADS"], *choice, args["capacity"], bits, args["GROUP"], args["splits"])
    return launch_metadata(f"sparse_decode_attention_{bits}bit", cost, q.element_size())


@triton.jit(
    launch_metadata=_sparse_attention_metadata,
    do_not_specialize=["scale", "capacity", "group_capacity", "slot_capacity", "splits", "index_capacity"],
)
def _sparse_attention_kernel(
    q,  # [batch, QUERIES, q_heads, head_dim]
    keys,  # [batch, kv_heads, capacity, head_dim]
    values,  # as keys
    begin, end,  # int32 [batch]
    index,  # int32 [batch, sets, index_capacity], pages
    slots_of,  # as index, the slots that hold the pages, or None for codes in the order of the text
    count,  # int32 [batch, sets]
    groups,  # int32 [batch], or None without codes
    partial,  # out: float32 [batch, QUERIES, q_heads, splits, head_dim]
    lse,  # out: float32 [batch, QUERIES, q_heads, splits]
    scale,  # of the softmax, times log2(e)
    capacity, group_capacity, slot_capacity, splits, index_capacity, sets,
    q_strides,  # of batch, query and head
    key_strides, value_strides,  # of batch, head and slot
    key_planes, value_planes,  # `QuantizedKV.key_planes` or `TokenRows`', or four times None
    QUERIES: tl.constexpr, RATIO: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr, VALUE_ROWS: tl.constexpr, SLOT_BYTES: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    q_batch_stride, q_query_stride, q_head_stride = q_strides
    key_batch_stride, key_head_stride, key_stride = key_strides
    value_batch_stride, value_head_stride, value_stride = value_strides
    flat, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, kv_head = flat // KV_HEADS, flat % KV_HEADS
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    query = rows % QUERIES
    head = kv_head * RATIO + rows // QUERIES
    valid = rows < RATIO * QUERIES
    result = ((batch * QUERIES + query) * (KV_HEADS * RATIO) + head) * splits + split

    first, first_end = tl.load(begin + batch), tl.load(end + batch)  # first_end: of the first query's tokens
    last = tl.minimum(first_end + QUERIES - 1, capacity)
    chosen_set = batch * sets + kv_head % sets
    entries = tl.minimum(tl.load(count + chosen_set), index_capacity)
    chosen = tl.cdiv(entries * PAGE, BLOCK)  # blocks
    start, stop = _split_range(chosen + tl.cdiv(tl.maximum(last - first, 0), BLOCK), split, splits)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    if start >= stop:
        tl.store(lse + result, row_max, mask=valid)
        return

    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    row_sum = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([ROWS, HALF_DIM], tl.float32)
    acc1 = tl.zeros([ROWS, HALF_DIM], tl.float32)
    row = q + batch * q_batch_stride + (query * q_query_stride + head * q_head_stride)[:, None]
    row += tl.arange(0, HALF_DIM)[None, :]
    q0 = tl.load(row, mask=valid[:, None], other=0.0)
    q1 = tl.load(row + HALF_DIM, mask=valid[:, None], other=0.0)
    keys += batch * key_batch_stride + kv_head * key_head_stride
    values += batch * value_batch_stride + kv_head * value_head_stride
    limit = tl.minimum(tl.load(groups + batch), group_capacity) * GROUP if BITS > 0 else first
    index += chosen_set * index_capacity
    for block in range(start, tl.minimum(stop, chosen)):
        place = block * BLOCK + tl.arange(0, BLOCK)
        token, inside = _load_tokens(index, place, entries, limit, PAGE)
        if BITS > 0:
            slot = token
            if SLOT_BYTES:
                slot, _ = _load_tokens(slots_of + chosen_set * index_capacity, place, entries, slot_capacity, PAGE)
                slot = flat * slot_capacity + slot
            row_max, row_sum, acc0, acc1 = gathered_block(
                row_max, row_sum, acc0, acc1, q0, q1, token, slot, inside, flat * group_capacity, scale,
                key_planes, value_planes, GROUP, HEAD_DIM, BITS, VALUE_ROWS, SLOT_BYTES,
            )  # fmt: skip
        else:
            row_max, row_sum, acc0, acc1 = slots_block(
                row_max, row_sum, acc0, acc1, q0, q1, rows * 0 + first, token, inside, scale, keys, values, key_stride,
                value_stride, HEAD_DIM,
            )  # fmt: skip
    for block in range(tl.maximum(start, chosen), stop):
        slots = first + (block - chosen) * BLOCK + tl.arange(0, BLOCK)
        row_max, row_sum, acc0, acc1 = slots_block(
            row_max, row_sum, acc0, acc1, q0, q1, first_end + query, slots, slots < last, scale, keys, values,
            key_stride, value_stride, HEAD_DIM,
        )  # fmt: skip

    _store_result(partial, lse, result, valid, row_max, row_sum, acc0, acc1, HEAD_DIM)


def sparse_decode_attention_triton(
    inputs: AttentionInputs,
    index: Tensor,
    count: Tensor,
    value_rows: Tensor | None,
    page: int,
    splits: int | None,
    slots: Tensor | None,
) -> Tensor:
    """See `ridgeplan.kernels.sparse_attention.sparse_decode_attention`.

    Raises ValueError for a head_dim or group that Triton's tiles cannot hold (powers of two from 32 on), or channels
    that are not contiguous.
    """
    q, keys, values, ratio = inputs.q, inputs.keys, inputs.values, inputs.ratio
    batch, queries, q_heads, head_dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    group = inputs.codes.group if inputs.codes is not None else head_dim
    _check_tiles(head_dim, group, q, keys, values)
    entries = index.shape[2]
    tokens = entries * page + capacity
    splits = splits or int(choose_splits(batch, kv_heads, SPLITS * tokens, SPLITS * _num_sms(q.device)))
    rows = min(MAX_ROWS, max(16, triton.next_power_of_2(queries * ratio)))
    partial = torch.empty(batch, queries, q_heads, splits, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, queries, q_heads, splits, dtype=torch.float32, device=q.device)
    value_planes = inputs.value_planes
    if value_rows is not None:
        value_planes = (value_rows.contiguous(), *value_planes[1:])
    lists = (x if x is None else x.contiguous() for x in (inputs.begin, inputs.end, index, slots, count, inputs.groups))
    rows_of = inputs.codes if isinstance(inputs.codes, TokenRows) else None
    strides = (q.stride()[:3], keys.stride()[:3], values.stride()[:3])
    _sparse_attention_kernel[(batch * kv_heads, splits, triton.cdiv(queries * ratio, rows))](
        q, keys, values, *lists, partial, lse, inputs.scale * LOG2_E, capacity, inputs.group_capacity,
        rows_of.slots if rows_of else 0, splits, entries, index.shape[1], *strides, inputs.key_planes, value_planes,
        QUERIES=queries,
        RATIO=ratio,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BITS=inputs.bits,
        VALUE_ROWS=rows_of is not None or value_rows is not None,
        SLOT_BYTES=rows_of.row_bytes if rows_of else 0,
        PAGE=page,
        ROWS=rows,
        BLOCK=BLOCK,
        num_warps=WARPS,
        num_stages=STAGES,
    )  # fmt: skip
    return merge(partial, lse, q.dtype, backend="triton")
