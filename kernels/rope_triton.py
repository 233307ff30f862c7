"""Triton kernels of rotary embedding: the tables of a pass in one launch, and rotation with the cache append.

A program of the append takes a few heads of one token. Queries, keys and values are blocks of their own, so a
program follows one straight branch whatever the head ratio is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TABLE_BLOCK = 128  # angles of a program
BLOCK_ELEMENTS = 512  # of a program's heads: 16 elements a lane
WARPS = 1


@triton.jit(do_not_specialize=["angles"])
def _tables_kernel(positions, frequencies, cos, sin, scale, angles, HALF: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < angles
    position = tl.load(positions + at // HALF, mask=inside, other=0).to(tl.float32)
    angle = position * tl.load(frequencies + at % HALF, mask=inside, other=0.0)
    tl.store(cos + at, tl.cos(angle) * scale, mask=inside)
    tl.store(sin + at, tl.sin(angle) * scale, mask=inside)


@triton.jit
def _load_heads(heads, head, inside, HEAD_DIM: tl.constexpr, channels):
    """Both halves of the channels of heads, in float32."""
    at = head * HEAD_DIM + channels
    first = tl.load(heads + at, mask=inside, other=0.0)
    second = tl.load(heads + at + HEAD_DIM // 2, mask=inside, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store_heads(out, head, stride, inside, first, second, HEAD_DIM: tl.constexpr, channels):
    at = head * stride + channels
    tl.store(out + at, first.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + HEAD_DIM // 2, second.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rounded(x, like):
    """`x` with the precision of the elements that `like` points to."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _turned(qkv, cos, sin, weight, head, inside, eps, HEAD_DIM: tl.constexpr, channels):
    """Rotated halves of heads, in float32; where there is a weight, normalized before with the twin's roundings."""
    first, second = _load_heads(qkv, head, inside, HEAD_DIM, channels)
    cos = tl.load(cos + channels, mask=channels < HEAD_DIM // 2, other=0.0)
    sin = tl.load(sin + channels, mask=channels < HEAD_DIM // 2, other=0.0)
    if weight is not None:
        weight0, weight1 = _load_heads(weight, head, inside, HEAD_DIM, channels)
        squares = tl.sum(first * first + second * second, 1, keep_dims=True)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)
        first = _rounded(_rounded(first * inverse, qkv) * weight0, qkv)
        second = _rounded(_rounded(second * inverse, qkv) * weight1, qkv)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["capacity"])
def _rope_append_kernel(
    qkv,
    cos,
    sin,
    weight,
    slots,
    queries,
    keys,
    values,
    eps,
    capacity,
    key_batch_stride,
    key_head_stride,
    key_stride,
    value_batch_stride,
    value_head_stride,
    value_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    Q_BLOCKS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    block = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    token = batch * tl.num_programs(0) + tl.program_id(0)
    channels = tl.arange(0, HALF_PADDED)[None, :]
    heads = tl.arange(0, HEADS)[:, None]
    qkv += token * ((Q_HEADS + 2 * KV_HEADS) * HEAD_DIM)
    cos += token * (HEAD_DIM // 2)
    sin += token * (HEAD_DIM // 2)
    if block < Q_BLOCKS:
        head = block * HEADS + heads
        inside = (head < Q_HEADS) & (channels < HEAD_DIM // 2)
        first, second = _turned(qkv, cos, sin, weight, head, inside, eps, HEAD_DIM, channels)
        queries += token * (Q_HEADS * HEAD_DIM)
        _store_heads(queries, head, HEAD_DIM, inside, first, second, HEAD_DIM, channels)
    else:
        slot = tl.load(slots + token)
        head = (block - Q_BLOCKS) % KV_BLOCKS * HEADS + heads
        # A slot is only known on the device: one past the end must not reach the next head's.
        inside = (head < tl.where(slot < capacity, KV_HEADS, 0)) & (channels < HEAD_DIM // 2)
        if block < Q_BLOCKS + KV_BLOCKS:
            first, second = _turned(qkv, cos, sin, weight, Q_HEADS + head, inside, eps, HEAD_DIM, channels)
            keys += batch * key_batch_stride + slot * key_stride
            _store_heads(keys, head, key_head_stride, inside, first, second, HEAD_DIM, channels)
        else:
            first, second = _load_heads(qkv, Q_HEADS + KV_HEADS + head, inside, HEAD_DIM, channels)
            values += batch * value_batch_stride + slot * value_stride
            _store_heads(values, head, value_head_stride, inside, first, second, HEAD_DIM, channels)


def rotary_tables_triton(positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See `ridgeplan.kernels.rope.rotary_tables`."""
    half = len(frequencies)
    cos, sin = (torch.empty(*positions.shape, half, dtype=torch.float32, device=positions.device) for _ in range(2))
    grid = (triton.cdiv(cos.numel(), TABLE_BLOCK),)
    _tables_kernel[grid](
        positions.contiguous(), frequencies, cos, sin, float(scale), cos.numel(), HALF=half, BLOCK=TABLE_BLOCK
    )
    return cos, sin


def rope_append_triton(
    qkv: Tensor,
    tables: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    q_heads: int,
    qk_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """See `ridgeplan.kernels.rope.rope_append`."""
    batch, tokens, _ = qkv.shape
    _, kv_heads, capacity, head_dim = keys.shape
    padded = triton.next_power_of_2(head_dim)
    heads = max(1, BLOCK_ELEMENTS // padded)
    queries = torch.empty(batch, tokens, q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    blocks = triton.cdiv(q_heads, heads) + 2 * triton.cdiv(kv_heads, heads)
    _rope_append_kernel[(tokens, blocks, batch)](
        qkv.contiguous(),
        *(table.contiguous() for table in tables),
        None if qk_norm is None else qk_norm.contiguous(),
        slots.contiguous(),
        queries,
        keys,
        values,
        eps,
        capacity,
        *keys.stride()[:3],
        *values.stride()[:3],
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEADS=heads,
        HALF_PADDED=padded // 2,
        num_warps=WARPS,
    )
    return queries
