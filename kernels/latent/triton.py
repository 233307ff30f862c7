"""Triton kernels of a step over latent rows: rotation with the append, and split-KV attention.

Attention reads a latent once for scores and for values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.attention.triton import LN_2, LOG2_E, _num_sms, merge_triton
from ridgeplan.kernels.device.cuda import pdl_options
from ridgeplan.kernels.device.triton_helpers import INTERPRETED, dot, pdl_launch_dependents_and_wait
from ridgeplan.kernels.layer import Tables
from ridgeplan.roofline.execution import choose_splits

APPEND_HEADS = 8  # query heads of a program that rotates them; not tuned on a GPU yet
QUERY_ROWS = 16  # query heads x queries of a program
BLOCK = 32  # tokens of a step; not tuned on a GPU yet


@triton.jit
def _rotated(pointer, at, inside, cos, sin, HALF: tl.constexpr):
    """Both halves of channels after RoPE, in float32."""
    first = tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(pointer + at + HALF, mask=inside, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["query_stride", "latent_stride", "tokens", "capacity"])
def _rotate_append_kernel(
    queries,  # [batch x tokens, HEADS x (PLAIN + 2 HALF)]
    latents,  # [batch x tokens, LATENT + 2 HALF]
    cos,  # float32 [batch x tokens, HALF]
    sin,  # as cos
    norm,  # [LATENT]
    slots,  # int64 [batch x tokens]
    rows,  # out: [batch, capacity, LATENT + 2 HALF]
    absorbed,  # out: [batch x tokens, HEADS, LATENT + 2 HALF], of which this kernel writes the last 2 HALF channels
    query_stride,
    latent_stride,
    row_stride,
    tokens,
    capacity,
    eps,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    LATENT: tl.constexpr,
    LATENTS: tl.constexpr,  # powers of two that hold them
    HALF: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token's latent row (the first program), or the channels with RoPE of BLOCK of its query heads."""
    pdl_launch_dependents_and_wait(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    turned = tl.arange(0, HALVES)
    inside = turned < HALF
    c = tl.load(cos + token * HALF + turned, mask=inside, other=0.0)
    s = tl.load(sin + token * HALF + turned, mask=inside, other=0.0)
    if part == 0:
        channel = tl.arange(0, LATENTS)
        known = channel < LATENT
        latent = tl.load(latents + token * latent_stride + channel, mask=known, other=0.0).to(tl.float32)
        weight = tl.load(norm + channel, mask=known, other=0.0).to(tl.float32)
        first, second = _rotated(latents, token * latent_stride + LATENT + turned, inside, c, s, HALF)
        slot = tl.load(slots + token)
        inverse = tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps)
        to = rows + token // tokens * row_stride + slot * (LATENT + 2 * HALF)
        # Slots are only known on the device; one past the end must not be written into the next sequence's.
        if slot < capacity:
            tl.store(to + channel, (latent * inverse * weight).to(rows.dtype.element_ty), mask=known)
            tl.store(to + LATENT + turned, first.to(rows.dtype.element_ty), mask=inside)
            tl.store(to + LATENT + HALF + turned, second.to(rows.dtype.element_ty), mask=inside)
    else:
        head = (part - 1) * BLOCK + tl.arange(0, BLOCK)[:, None]
        valid = (head < HEADS) & inside[None, :]
        at = token * query_stride + head * (PLAIN + 2 * HALF) + PLAIN + turned[None, :]
        x, y = _rotated(queries, at, valid, c[None, :], s[None, :], HALF)
        q_to = absorbed + (token * HEADS + head) * (LATENT + 2 * HALF) + LATENT + turned[None, :]
        tl.store(q_to, x.to(absorbed.dtype.element_ty), mask=valid)
        tl.store(q_to + HALF, y.to(absorbed.dtype.element_ty), mask=valid)


def rotate_append_triton(
    queries: Tensor,
    latents: Tensor,
    tables: Tables,
    norm: Tensor,
    eps: float,
    rows: Tensor,
    slots: Tensor,
    absorbed: Tensor,
) -> None:
    """What `ridgeplan.kernels.latent.absorb_append` does beside its product."""
    heads, width = absorbed.shape[2:]
    queries, latents, half = queries.flatten(0, 1), latents.flatten(0, 1), tables[0].shape[-1]
    latent = width - 2 * half
    _rotate_append_kernel[(len(queries), 1 + triton.cdiv(heads, APPEND_HEADS))](
        queries,
        latents,
        *(table.contiguous() for table in tables),
        norm.contiguous(),
        slots.contiguous(),
        rows,
        absorbed,
        queries.stride(0),
        latents.stride(0),
        rows.stride(0),
        slots.shape[1],
        rows.shape[1],
        eps,
        HEADS=heads,
        PLAIN=queries.shape[1] // heads - 2 * half,
        LATENT=latent,
        LATENTS=triton.next_power_of_2(latent),
        HALF=half,
        HALVES=triton.next_power_of_2(half),
        BLOCK=APPEND_HEADS,
        num_warps=4,
        **pdl_options(queries),
    )


@triton.jit(do_not_specialize=["splits", "scale"])
def _latent_attention_kernel(
    q,  # [batch, QUERIES, HEADS, LATENT + ROPE]
    rows,  # [batch, slots, LATENT + ROPE]
    begin,  # int32 [batch]
    end,  # int32 [batch]
    partial,  # out: float32 [batch, QUERIES, HEADS, splits, LATENT]
    lse,  # out: float32 [batch, QUERIES, HEADS, splits]
    splits,
    scale,
    row_stride,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LATENTS: tl.constexpr,  # powers of two that hold them
    ROPES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One sequence's QUERIES x HEADS query rows, ROWS of them, over one split of its tokens."""
    batch, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    valid, query = row < QUERIES * HEADS, row // HEADS
    channel, turned = tl.arange(0, LATENTS), tl.arange(0, ROPES)
    q_at = q + (batch * QUERIES * HEADS + row[:, None]) * (LATENT + ROPE)
    q_latent = tl.load(q_at + channel[None, :], mask=valid[:, None] & (channel < LATENT)[None, :], other=0.0)
    q_rope = tl.load(q_at + LATENT + turned[None, :], mask=valid[:, None] & (turned < ROPE)[None, :], other=0.0)
    first, seen = tl.load(begin + batch), tl.load(end + batch)
    last = seen + QUERIES - 1
    blocks = tl.cdiv(tl.maximum(last - first, 0), BLOCK)
    acc = tl.zeros((ROWS, LATENTS), tl.float32)
    row_max, row_sum = tl.full((ROWS,), -3.0e38, tl.float32), tl.zeros((ROWS,), tl.float32)
    for block in range(blocks * split // splits, blocks * (split + 1) // splits):
        token = first + block * BLOCK + tl.arange(0, BLOCK)
        at = rows + batch * row_stride + token[:, None].to(tl.int64) * (LATENT + ROPE)
        known = (token < last)[:, None]
        text = tl.load(at + channel[None, :], mask=known & (channel < LATENT)[None, :], other=0.0)
        keys = tl.load(at + LATENT + turned[None, :], mask=known & (turned < ROPE)[None, :], other=0.0)
        scores = dot(q_latent, tl.trans(text), tl.zeros((ROWS, BLOCK), tl.float32))
        scores = dot(q_rope, tl.trans(keys), scores) * scale
        scores = tl.where(token[None, :] < (seen + query)[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights, rescale = tl.exp2(scores - new_max[:, None]), tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        if not INTERPRETED:  # whose products are in float32 anyway
            weights = weights.to(text.dtype)
        acc = dot(weights, text, acc * rescale[:, None])
        row_max = new_max
    result = (batch * QUERIES * HEADS + row) * splits + split
    some = row_sum > 0
    divisor = tl.where(some, row_sum, 1.0)
    tl.store(lse + result, tl.where(some, (row_max + tl.log2(divisor)) * LN_2, float("-inf")), mask=valid)
    acc = acc / divisor[:, None]
    to = partial + result[:, None] * LATENT + channel[None, :]
    tl.store(to, acc, mask=valid[:, None] & (channel < LATENT)[None, :])


def latent_attention_triton(q: Tensor, rows: Tensor, begin: Tensor, end: Tensor, latent: int, scale: float) -> Tensor:
    """See `ridgeplan.kernels.latent.latent_attention`. Raises ValueError unless latents are a power of two."""
    batch, queries, heads, width = q.shape
    if latent & (latent - 1) or latent < 16:
        raise ValueError(f"latents are {latent} wide; allowed on a GPU: powers of two from 16")
    q = q.contiguous()
    splits = int(choose_splits(batch, triton.cdiv(queries * heads, QUERY_ROWS), rows.shape[1], _num_sms(q.device)))
    partial = torch.empty(batch, queries, heads, splits, latent, dtype=torch.float32, device=q.device)
    lse = torch.empty(partial.shape[:-1], dtype=torch.float32, device=q.device)
    _latent_attention_kernel[batch, splits, triton.cdiv(queries * heads, QUERY_ROWS)](
        q,
        rows,
        begin.contiguous(),
        end.contiguous(),
        partial,
        lse,
        splits,
        scale * LOG2_E,
        rows.stride(0),
        QUERIES=queries,
        HEADS=heads,
        LATENT=latent,
        ROPE=width - latent,
        LATENTS=latent,
        ROPES=max(16, triton.next_power_of_2(width - latent)),
        ROWS=QUERY_ROWS,
        BLOCK=BLOCK,
        num_warps=4,
        num_stages=2,
    )
    return merge_triton(partial, lse, q.dtype)
