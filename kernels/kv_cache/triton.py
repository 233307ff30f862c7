"""Triton kernels of the KV cache: quantization, dequantization and the shift of the buffer.

The shift works in place: a program moves the same offsets of every group from front to back, so a single thread reads
and writes a slot, and reads it before overwriting it.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.triton_helpers import centred_affine, centred_codes, launch_metadata
from ridgeplan.kernels.kv_cache import dequantize_cost, quantize_cost
from ridgeplan.kernels.kv_cache.layout import GroupWrite, QuantizedKV

QUANTIZE_CHANNELS = 32  # of a warp, whose registers hold them of all tokens of a group; at least 4 warps
# Adding 1.5 * 2 ** 23 leaves the nearest integer (ties to even) in the low bits of a float32. Two additions replace
# conversions between floats and integers, which have an eighth of their throughput.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def _scale_min(x, AXIS: tl.constexpr):
    """float16 (scale, minimum) of x along AXIS, kept as a broadcastable axis."""
    low = tl.min(x, AXIS, keep_dims=True)
    high = tl.max(x, AXIS, keep_dims=True)
    return ((high - low) * (1 / 15)).to(tl.float16), low.to(tl.float16)


@triton.jit
def _encode(x, scale, minimum):
    """(upper, lower) codes of x in the low four bits, by the same float32 operations as `reference.encode`."""
    scale = scale.to(tl.float32)
    step = tl.where(scale == 0, 1.0, scale)
    position = (x - minimum.to(tl.float32)) * tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    upper = tl.minimum(tl.maximum(position, 0.0), 15.0) + ROUNDER
    residual = 16 * (position - (upper - ROUNDER))
    lower = tl.minimum(tl.maximum(residual, -8.0), 7.0) + (ROUNDER + 8)
    return upper.to(tl.int32, bitcast=True), lower.to(tl.int32, bitcast=True)


@triton.jit
def _pack(first, second):
    return ((first & 15) | (second << 4)).to(tl.uint8)


@triton.jit
def _quantize_keys(x, stride, at, planes, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """One group of keys [GROUP, HEAD_DIM]: one pair per channel, both halves of the channels in a byte."""
    upper, lower, scale, minimum = planes
    HALF: tl.constexpr = HEAD_DIM // 2
    tokens = tl.arange(0, GROUP)[:, None]
    channels = tl.arange(0, HALF)[None, :]
    first = tl.load(x + tokens * stride + channels).to(tl.float32)
    second = tl.load(x + tokens * stride + channels + HALF).to(tl.float32)
    scale0, min0 = _scale_min(first, 0)
    scale1, min1 = _scale_min(second, 0)
    pair = at * HEAD_DIM + channels
    tl.store(scale + pair, scale0)
    tl.store(scale + pair + HALF, scale1)
    tl.store(minimum + pair, min0)
    tl.store(minimum + pair + HALF, min1)
    upper0, lower0 = _encode(first, scale0, min0)
    upper1, lower1 = _encode(second, scale1, min1)
    byte = at * GROUP * HALF + tokens * HALF + channels
    tl.store(upper + byte, _pack(upper0, upper1))
    if lower is not None:
        tl.store(lower + byte, _pack(lower0, lower1))


@triton.jit
def _quantize_values(x, stride, at, planes, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """One group of values [GROUP, HEAD_DIM]: one pair per token, transposed, both halves of the tokens in a byte."""
    upper, lower, scale, minimum = planes
    HALF: tl.constexpr = GROUP // 2
    tokens = tl.arange(0, HALF)[:, None]
    channels = tl.arange(0, HEAD_DIM)
    first = tl.load(x + tokens * stride + channels[None, :]).to(tl.float32)
    second = tl.load(x + (tokens + HALF) * stride + channels[None, :]).to(tl.float32)
    scale0, min0 = _scale_min(first, 1)
    scale1, min1 = _scale_min(second, 1)
    pair = at * GROUP + tokens
    tl.store(scale + pair, scale0)
    tl.store(scale + pair + HALF, scale1)
    tl.store(minimum + pair, min0)
    tl.store(minimum + pair + HALF, min1)
    upper0, lower0 = _encode(first, scale0, min0)
    upper1, lower1 = _encode(second, scale1, min1)
    byte = at * HEAD_DIM * HALF + channels[:, None] * HALF + tl.arange(0, HALF)[None, :]
    tl.store(upper + byte, tl.trans(_pack(upper0, upper1)))
    if lower is not None:
        tl.store(lower + byte, tl.trans(_pack(lower0, lower1)))


def _quantize_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """The kernel's cost as if no row were masked."""
    keys, planes = args["keys"], 1 if args["key_planes"][1] is None else 2
    cost = quantize_cost(keys, args["GROUP"], planes, int(args["value_planes"][2].numel() > 0))
    return launch_metadata("quantize", cost, keys.element_size())


@triton.jit(launch_metadata=_quantize_metadata)
def _quantize_kernel(
    keys,  # [batch, kv_heads, tokens, head_dim]
    values,  # as keys
    group_index,  # int32 [batch], or [batch, groups] if PAGED
    mask,  # bool [batch] or None
    first_slot,  # int32 [batch] or None
    group_capacity,  # groups of a row, or pages
    key_strides,  # of batch, head and token
    value_strides,
    key_planes,  # `QuantizedKV.key_planes`
    value_planes,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGED: tl.constexpr,
):
    key_batch_stride, key_head_stride, key_stride = key_strides
    value_batch_stride, value_head_stride, value_stride = value_strides
    flat = tl.program_id(0).to(tl.int64)
    batch = flat // KV_HEADS
    kv_head = flat % KV_HEADS
    block = tl.program_id(1).to(tl.int64)
    if PAGED:
        group = tl.load(group_index + batch * tl.num_programs(1) + block).to(tl.int64)
    else:
        group = tl.load(group_index + batch) + block
    # The group is only known on the device; one past the end must not write into the next row.
    active = (group >= 0) & (group < group_capacity)
    if mask is not None:
        active = active & (tl.load(mask + batch) != 0)
    if active:
        at = group * KV_HEADS + kv_head if PAGED else flat * group_capacity + group
        slot = block * GROUP
        if first_slot is not None:
            slot = tl.load(first_slot + batch).to(tl.int64)
        if tl.program_id(2) == 0:
            keys += batch * key_batch_stride + kv_head * key_head_stride + slot * key_stride
            _quantize_keys(keys, key_stride, at, key_planes, GROUP, HEAD_DIM)
        else:
            values += batch * value_batch_stride + kv_head * value_head_stride + slot * value_stride
            _quantize_values(values, value_stride, at, value_planes, GROUP, HEAD_DIM)


def quantize_triton(keys: Tensor, values: Tensor | None, target: GroupWrite) -> None:
    """See `ridgeplan.kernels.kv_cache.quantize`; group and head_dim must be powers of two."""
    out, group_index, mask, first_slot, paged = target
    batch, kv_heads, tokens, head_dim = keys.shape
    groups, parts = tokens // out.group if first_slot is None else 1, 1 if values is None else 2
    values = keys if values is None else values  # which no program then reads
    _quantize_kernel[(batch * kv_heads, groups, parts)](
        keys,
        values,
        group_index.contiguous(),
        mask.contiguous() if mask is not None else None,
        first_slot.contiguous() if first_slot is not None else None,
        out.batch if paged else out.groups,
        keys.stride()[:3],
        values.stride()[:3],
        out.key_planes,
        out.value_planes,
        KV_HEADS=kv_heads,
        GROUP=out.group,
        HEAD_DIM=head_dim,
        PAGED=paged,
        num_warps=max(4, head_dim // QUANTIZE_CHANNELS),
        enable_fp_fusion=False,  # a fused multiply-add would round differently from the reference
    )


@triton.jit(do_not_specialize=["num_pages"])
def _append_kernel(
    keys,  # [tokens, kv_heads, head_dim]
    values,  # as keys
    key_store,  # [buffers, kv_heads, CAPACITY, head_dim]
    value_store,
    slots,  # int32 [tokens]
    pages,  # int32 [tokens]
    num_pages,
    key_strides,  # of token and head
    value_strides,
    key_planes,  # `QuantizedKV.key_planes`
    value_planes,
    KV_HEADS: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    channels = tl.arange(0, HEAD_DIM)
    slot = tl.load(slots + token)
    page = tl.load(pages + token)
    if slot >= 0:
        buffer = ((slot // CAPACITY).to(tl.int64) * KV_HEADS + kv_head) * CAPACITY * HEAD_DIM
        at = page.to(tl.int64) * KV_HEADS + kv_head
        closes = (page >= 0) & (page < num_pages)
        to = buffer + (slot % CAPACITY) * HEAD_DIM + channels
        if tl.program_id(2) == 0:
            x = tl.load(keys + token * key_strides[0] + kv_head * key_strides[1] + channels)
            tl.store(key_store + to, x.to(key_store.dtype.element_ty))
            if closes:
                tl.debug_barrier()  # the whole buffer is read again, by other threads than those that wrote the token
                _quantize_keys(key_store + buffer, HEAD_DIM, at, key_planes, GROUP, HEAD_DIM)
        else:
            x = tl.load(values + token * value_strides[0] + kv_head * value_strides[1] + channels)
            tl.store(value_store + to, x.to(value_store.dtype.element_ty))
            if closes:
                tl.debug_barrier()
                _quantize_values(value_store + buffer, HEAD_DIM, at, value_planes, GROUP, HEAD_DIM)


def append_triton(
    keys: Tensor, values: Tensor, key_store: Tensor, value_store: Tensor, out: QuantizedKV, slots: Tensor, pages: Tensor
) -> None:
    """See `ridgeplan.kernels.kv_cache.append_to_pages`; group and head_dim must be powers of two."""
    count, kv_heads, head_dim = keys.shape
    _append_kernel[(count, kv_heads, 2)](
        keys,
        values,
        key_store,
        value_store,
        slots.contiguous(),
        pages.contiguous(),
        out.batch,
        keys.stride()[:2],
        values.stride()[:2],
        out.key_planes,
        out.value_planes,
        KV_HEADS=kv_heads,
        CAPACITY=key_store.shape[2],
        GROUP=out.group,
        HEAD_DIM=head_dim,
        num_warps=max(4, head_dim // QUANTIZE_CHANNELS),
        enable_fp_fusion=False,  # as in `quantize_triton`
    )


@triton.jit
def _decode_keys(at, planes, out, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BITS: tl.constexpr):
    upper, lower, scale, minimum = planes
    HALF: tl.constexpr = HEAD_DIM // 2
    tokens = tl.arange(0, GROUP)[:, None]
    channels = tl.arange(0, HALF)[None, :]
    byte = at * GROUP * HALF + tokens * HALF + channels
    first, second = centred_codes(upper, lower, byte, BITS, tl.float32)
    pair = at * HEAD_DIM + channels
    to = out + (at * GROUP + tokens) * HEAD_DIM + channels
    step, zero = centred_affine(tl.load(scale + pair), tl.load(minimum + pair), BITS)
    tl.store(to, (first * step + zero).to(out.dtype.element_ty))
    pair += HALF
    step, zero = centred_affine(tl.load(scale + pair), tl.load(minimum + pair), BITS)
    tl.store(to + HALF, (second * step + zero).to(out.dtype.element_ty))


@triton.jit
def _decode_values(at, planes, out, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BITS: tl.constexpr):
    upper, lower, scale, minimum = planes
    HALF: tl.constexpr = GROUP // 2
    channels = tl.arange(0, HEAD_DIM)[:, None]
    tokens = tl.arange(0, HALF)[None, :]
    byte = at * HEAD_DIM * HALF + channels * HALF + tokens
    first, second = centred_codes(upper, lower, byte, BITS, tl.float32)
    pair = at * GROUP + tokens
    to = out + pair * HEAD_DIM + channels
    step, zero = centred_affine(tl.load(scale + pair), tl.load(minimum + pair), BITS)
    tl.store(to, (first * step + zero).to(out.dtype.element_ty))
    pair += HALF
    step, zero = centred_affine(tl.load(scale + pair), tl.load(minimum + pair), BITS)
    tl.store(to + HALF * HEAD_DIM, (second * step + zero).to(out.dtype.element_ty))


def _dequantize_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    return launch_metadata("dequantize", dequantize_cost(args["keys"], args["GROUP"], args["BITS"] // 4))


@triton.jit(launch_metadata=_dequantize_metadata)
def _dequantize_kernel(
    keys,  # out: [batch, kv_heads, groups * GROUP, head_dim]
    values,  # out, as keys
    key_planes,  # `QuantizedKV.key_planes`
    value_planes,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    _decode_keys(at, key_planes, keys, GROUP, HEAD_DIM, BITS)
    _decode_values(at, value_planes, values, GROUP, HEAD_DIM, BITS)


def dequantize_triton(codes: QuantizedKV, lower: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `ridgeplan.kernels.kv_cache.dequantize`; group and head_dim must be powers of two."""
    shape = (codes.batch, codes.kv_heads, codes.groups * codes.group, codes.head_dim)
    keys, values = (torch.empty(shape, dtype=dtype, device=codes.key_upper.device) for _ in range(2))
    _dequantize_kernel[(codes.batch * codes.kv_heads * codes.groups,)](
        keys,
        values,
        codes.key_planes,
        codes.value_planes,
        GROUP=codes.group,
        HEAD_DIM=codes.head_dim,
        BITS=8 if lower else 4,
        num_warps=8,
    )
    return keys, values


SHIFT_BLOCK = 64  # offsets within a group per program
SHIFT_WARPS = 4


@triton.jit
def _shift(x, stride, capacity, GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    channels = tl.arange(0, PADDED)[None, :]
    inside = (offset < GROUP) & (channels < HEAD_DIM)
    x += offset.to(tl.int64) * stride + channels
    for slot in range(0, capacity - GROUP, GROUP):
        moves = inside & (slot + offset < capacity - GROUP)
        later = tl.load(x + GROUP * stride, mask=moves)
        tl.store(x, later, mask=moves)
        x += GROUP * stride


@triton.jit(do_not_specialize=["capacity"])
def _shift_kernel(
    keys,  # [batch, kv_heads, capacity, head_dim], in place
    values,  # as keys
    mask,  # bool [batch]
    capacity,  # slots
    key_strides,  # of batch, head and slot
    value_strides,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    key_batch_stride, key_head_stride, key_stride = key_strides
    value_batch_stride, value_head_stride, value_stride = value_strides
    flat = tl.program_id(0).to(tl.int64)
    batch = flat // KV_HEADS
    kv_head = flat % KV_HEADS
    if tl.load(mask + batch) != 0:
        if tl.program_id(2) == 0:
            keys += batch * key_batch_stride + kv_head * key_head_stride
            _shift(keys, key_stride, capacity, GROUP, BLOCK, HEAD_DIM, PADDED)
        else:
            values += batch * value_batch_stride + kv_head * value_head_stride
            _shift(values, value_stride, capacity, GROUP, BLOCK, HEAD_DIM, PADDED)


def shift_slots_triton(keys: Tensor, values: Tensor | None, group: int, mask: Tensor) -> None:
    """See `ridgeplan.kernels.kv_cache.shift_slots`."""
    batch, kv_heads, capacity, head_dim = keys.shape
    parts = 1 if values is None else 2
    values = keys if values is None else values  # which no program then moves
    _shift_kernel[(batch * kv_heads, triton.cdiv(group, SHIFT_BLOCK), parts)](
        keys,
        values,
        mask.contiguous(),
        capacity,
        keys.stride()[:3],
        values.stride()[:3],
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK=SHIFT_BLOCK,
        HEAD_DIM=head_dim,
        PADDED=triton.next_power_of_2(head_dim),
        num_warps=SHIFT_WARPS,
    )
