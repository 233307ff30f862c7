"""Triton kernels of a step over latent rows: rotation with the append, and split-KV attention.

Attention reads a latent once for scores and for values.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.attention.triton import LN_2, LOG2_E, _num_sms, merge_triton
from ridgeplan.kernels.device.cuda import pdl_options
from ridgeplan.kernels.device.triton_helpers import (
    INTERPRETED,
    centred_affine,
    centred_codes,
    dot,
    pdl_launch_dependents_and_wait,
)
from ridgeplan.kernels.kv_cache.layout import NO_PLANES
from ridgeplan.kernels.latent import LatentInputs
from ridgeplan.kernels.layer import Tables
from ridgeplan.roofline.execution import choose_splits

APPEND_HEADS = 8  # query heads of a program that rotates them; not tuned on a GPU yet


class Tile(NamedTuple):
    """What a program of the attention takes, and programs that an SM is to have.

    rows: query heads x queries. tokens: of a step. stages: steps whose loads are in flight.
    """

    rows: int
    tokens: int
    stages: int
    per_sm: int


def tile_of(rows: int, token_bytes: int, quantized: bool, shared_bytes: int) -> Tile:
    """The fastest tile on an H200 whose programs fit an SM's `shared_bytes`, for so many query rows of a sequence.

    token_bytes: of a latent and a rotated key. Over codes, which each tile of rows decodes anew, tiles of more than 16
    rows are slower all the same.
    """
    tiles = (*([Tile(32, 64, 3, 1)] if rows > 16 and not quantized else []), Tile(16, 32, 3, 2))
    fitting = (each for each in tiles if each.tokens * each.stages * each.per_sm * token_bytes <= shared_bytes)
    return next(fitting, Tile(16, 32, 2, 2))


@triton.jit
def _rotated(pointer, at, inside, cos, sin, HALF: tl.constexpr):
    """Both halves of channels after RoPE, in float32."""
    first = tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(pointer + at + HALF, mask=inside, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["query_stride", "latent_stride", "tokens", "capacity", "rotated_capacity"])
def _rotate_append_kernel(
    queries,  # [batch x tokens, HEADS x (PLAIN + 2 HALF)]
    latents,  # [batch x tokens, LATENT + 2 HALF]
    cos,  # float32 [batch x tokens, HALF]
    sin,  # as cos
    norm,  # [LATENT]
    slots,  # int64 [batch x tokens], of latents
    positions,  # as slots, of rotated keys
    stored,  # out: [batch, capacity, LATENT]
    rotated,  # out: [batch, rotated_capacity, 2 HALF]
    absorbed,  # out: [batch x tokens, HEADS, LATENT + 2 HALF], of which this kernel writes the last 2 HALF channels
    query_stride,
    latent_stride,
    stored_stride,
    rotated_stride,
    tokens,
    capacity,
    rotated_capacity,
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
        slot, position = tl.load(slots + token), tl.load(positions + token)
        inverse = tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps)
        # Slots are only known on the device; one past the end must not be written into the next sequence's.
        if slot < capacity:
            to = stored + token // tokens * stored_stride + slot * LATENT
            tl.store(to + channel, (latent * inverse * weight).to(stored.dtype.element_ty), mask=known)
        if position < rotated_capacity:
            to = rotated + token // tokens * rotated_stride + position * 2 * HALF
            tl.store(to + turned, first.to(rotated.dtype.element_ty), mask=inside)
            tl.store(to + HALF + turned, second.to(rotated.dtype.element_ty), mask=inside)
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
    stores: tuple[Tensor, Tensor],
    slots: tuple[Tensor, Tensor],
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
        *(places.contiguous() for places in slots),
        *stores,
        absorbed,
        queries.stride(0),
        latents.stride(0),
        *(store.stride(0) for store in stores),
        slots[0].shape[1],
        *(store.shape[1] for store in stores),
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


@triton.jit
def _attend(row_max, row_sum, acc_first, acc_second, q_first, q_second, q_rope, first, second, keys, seen, scale):
    """Adds a block of tokens to the online softmax. Halves of the latents [tokens, LATENT / 2] are also the values."""
    scores = dot(q_first, tl.trans(first), tl.zeros(seen.shape, tl.float32))
    scores = dot(q_second, tl.trans(second), scores)
    scores = tl.where(seen, dot(q_rope, tl.trans(keys), scores) * scale, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights, rescale = tl.exp2(scores - new_max[:, None]), tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    if not INTERPRETED:  # whose products are in float32 anyway
        weights = weights.to(first.dtype)
    acc_first = dot(weights, first, acc_first * rescale[:, None])
    acc_second = dot(weights, second, acc_second * rescale[:, None])
    return new_max, row_sum, acc_first, acc_second


@triton.jit(do_not_specialize=["splits", "scale", "group_capacity"])
def _latent_attention_kernel(
    q,  # [batch, QUERIES, HEADS, LATENT + ROPE]
    latents,  # [batch, slots, LATENT]
    rotated,  # [batch, positions, ROPE]
    begin,  # int32 [batch]
    end,  # int32 [batch]
    groups,  # int32 [batch], or None without codes
    planes,  # `QuantizedKV.key_planes`, or four times None
    partial,  # out: float32 [batch, QUERIES, HEADS, splits, LATENT]
    lse,  # out: float32 [batch, QUERIES, HEADS, splits]
    splits,
    scale,
    latent_stride,
    rotated_stride,
    group_capacity,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROPES: tl.constexpr,  # a power of two that holds it
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,  # channels of a head of the codes, which packs its halves; all without codes
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One sequence's QUERIES x HEADS query rows, ROWS of them, over one split of its tokens."""
    batch, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    valid, query = row < QUERIES * HEADS, row // HEADS
    column, turned = tl.arange(0, LATENT // 2), tl.arange(0, ROPES)
    part = column // (WIDTH // 2)
    channel = part * WIDTH + column % (WIDTH // 2)  # of the first halves of all heads
    q_at = q + (batch * QUERIES * HEADS + row[:, None]) * (LATENT + ROPE)
    q_first = tl.load(q_at + channel[None, :], mask=valid[:, None], other=0.0)
    q_second = tl.load(q_at + channel[None, :] + WIDTH // 2, mask=valid[:, None], other=0.0)
    q_rope = tl.load(q_at + LATENT + turned[None, :], mask=valid[:, None] & (turned < ROPE)[None, :], other=0.0)
    first, seen = tl.load(begin + batch), tl.load(end + batch)
    last = seen + QUERIES - 1
    visible = tl.minimum(tl.load(groups + batch), group_capacity) if BITS > 0 else 0
    coded = visible * (GROUP // BLOCK)
    ahead = visible * GROUP - first if BITS > 0 else 0  # how much further rotated keys are than latents
    blocks = coded + tl.cdiv(tl.maximum(last - first, 0), BLOCK)
    start, stop = blocks * split // splits, blocks * (split + 1) // splits
    rotated += batch * rotated_stride
    acc_first, acc_second = tl.zeros((ROWS, LATENT // 2), tl.float32), tl.zeros((ROWS, LATENT // 2), tl.float32)
    row_max, row_sum = tl.full((ROWS,), -3.0e38, tl.float32), tl.zeros((ROWS,), tl.float32)
    if BITS > 0:
        upper, lower, step, minimum = planes
        for block in range(start, tl.minimum(stop, coded)):
            token = block * BLOCK + tl.arange(0, BLOCK)
            at = (batch * (LATENT // WIDTH) + part) * group_capacity + block * BLOCK // GROUP
            pair = at * WIDTH + column % (WIDTH // 2)
            byte = (at[None, :] * GROUP + token[:, None] % GROUP) * (WIDTH // 2) + column[None, :] % (WIDTH // 2)
            text0, text1 = centred_codes(upper, lower, byte, BITS, q.dtype.element_ty)
            scale0, zero0 = centred_affine(tl.load(step + pair), tl.load(minimum + pair), BITS)
            pair += WIDTH // 2
            scale1, zero1 = centred_affine(tl.load(step + pair), tl.load(minimum + pair), BITS)
            text0 = (text0.to(tl.float32) * scale0[None, :] + zero0[None, :]).to(q.dtype.element_ty)
            text1 = (text1.to(tl.float32) * scale1[None, :] + zero1[None, :]).to(q.dtype.element_ty)
            at = rotated + token[:, None].to(tl.int64) * ROPE + turned[None, :]
            keys = tl.load(at, mask=(turned < ROPE)[None, :], other=0.0)
            row_max, row_sum, acc_first, acc_second = _attend(
                row_max, row_sum, acc_first, acc_second, q_first, q_second, q_rope, text0, text1, keys,
                valid[:, None] & (token >= 0)[None, :], scale,
            )  # fmt: skip
    for block in range(tl.maximum(start, coded), stop):
        token = first + (block - coded) * BLOCK + tl.arange(0, BLOCK)
        known = (token < last)[:, None]
        at = latents + batch * latent_stride + token[:, None].to(tl.int64) * LATENT + channel[None, :]
        text0, text1 = tl.load(at, mask=known, other=0.0), tl.load(at + WIDTH // 2, mask=known, other=0.0)
        at = rotated + (token + ahead)[:, None].to(tl.int64) * ROPE + turned[None, :]
        keys = tl.load(at, mask=known & (turned < ROPE)[None, :], other=0.0)
        row_max, row_sum, acc_first, acc_second = _attend(
            row_max, row_sum, acc_first, acc_second, q_first, q_second, q_rope, text0, text1, keys,
            token[None, :] < (seen + query)[:, None], scale,
        )  # fmt: skip
    result = (batch * QUERIES * HEADS + row) * splits + split
    some = row_sum > 0
    divisor = tl.where(some, row_sum, 1.0)
    tl.store(lse + result, tl.where(some, (row_max + tl.log2(divisor)) * LN_2, float("-inf")), mask=valid)
    to = partial + result[:, None] * LATENT + channel[None, :]
    tl.store(to, acc_first / divisor[:, None], mask=valid[:, None])
    tl.store(to + WIDTH // 2, acc_second / divisor[:, None], mask=valid[:, None])


def latent_attention_triton(inputs: LatentInputs) -> Tensor:
    """See `ridgeplan.kernels.latent.latent_attention`.

    Raises ValueError unless latents are a power of two, groups one from 16, and a sequence's rows contiguous.
    """
    q, latents, rotated, begin, end, scale, codes, groups, lower = inputs
    batch, queries, heads, _ = q.shape
    latent, rope = latents.shape[2], rotated.shape[2]
    shared_bytes = _shared_bytes(q.device)
    tile = tile_of(queries * heads, (latent + rope) * q.element_size(), codes is not None, shared_bytes)
    group, capacity = (codes.group, codes.groups) if codes is not None else (tile.tokens, 0)
    for name, size, least in (("latents", latent, 32), ("groups", group, 16)):
        if size & (size - 1) or size < least:
            raise ValueError(f"{name} are of {size}; allowed on a GPU: powers of two from {least}")
    if (latents.stride(1), rotated.stride(1)) != (latent, rope):
        raise ValueError(f"latents {latents.stride()} and rotated {rotated.stride()} need contiguous rows")
    q, tiles = q.contiguous(), triton.cdiv(queries * heads, tile.rows)
    num_sms = max(1, _num_sms(q.device) * tile.per_sm // 2)  # choose_splits counts two programs an SM
    splits = int(choose_splits(batch, tiles, capacity * group + latents.shape[1], num_sms))
    partial = torch.empty(batch, queries, heads, splits, latent, dtype=torch.float32, device=q.device)
    lse = torch.empty(partial.shape[:-1], dtype=torch.float32, device=q.device)
    _latent_attention_kernel[batch, splits, tiles](
        q,
        latents,
        rotated,
        begin.contiguous(),
        end.contiguous(),
        None if groups is None else groups.contiguous(),
        NO_PLANES if codes is None else codes.key_planes,
        partial,
        lse,
        splits,
        scale * LOG2_E,
        latents.stride(0),
        rotated.stride(0),
        capacity,
        QUERIES=queries,
        HEADS=heads,
        LATENT=latent,
        ROPE=rope,
        ROPES=max(16, triton.next_power_of_2(rope)),
        GROUP=group,
        WIDTH=latent if codes is None else codes.head_dim,
        BITS=0 if codes is None else (8 if lower else 4),
        ROWS=tile.rows,
        BLOCK=min(tile.tokens, group),
        num_warps=4,
        num_stages=tile.stages,
    )
    return merge_triton(partial, lse, q.dtype)


def _shared_bytes(device: torch.device) -> int:
    """An SM's shared memory, less what the driver reserves; the interpreter has no limit."""
    if device.type == "cpu":
        return 1 << 31
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024
