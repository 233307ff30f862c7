"""Triton kernels of RMSNorm, rotary embedding and SwiGLU.

Few rows are split into parts. Each program then sums the whole row but writes only its part, as a single SM would take
long to move the row. docs/kernels/layer.md has the measurements.

The append treats a sequence's queries, keys and values as one matrix with a row per token and head. A program takes a
few rows of any kind, and masks select the stores that apply to a row, so there is no branch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.cuda import pdl_options
from ridgeplan.kernels.device.triton_helpers import pdl_launch_dependents_and_wait

# RMSNorm

FEW_ROWS = 16  # most rows that are split into parts
PART = 1024  # channels per part


@triton.jit
def _stream(hidden, update, at, inside, ORDERED: tl.constexpr):
    """hidden + update (or hidden), rounded to the model's dtype."""
    x = tl.load(hidden + at, mask=inside, other=0.0, volatile=ORDERED)
    if update is not None:
        x = (x.to(tl.float32) + tl.load(update + at, mask=inside, other=0.0, volatile=ORDERED).to(tl.float32)).to(
            x.dtype
        )
    return x


@triton.jit
def _add_rms_norm_kernel(
    hidden,  # [rows, HIDDEN]
    update,  # as hidden, or None
    weight,  # [HIDDEN]
    total,  # out, as hidden
    normed,  # out, as hidden
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Volatile loads keep their order. With few rows latency matters, and the compiler would otherwise load the weight
    # only after the row has arrived. Many rows share the weight in the L1 cache, which volatile loads bypass.
    ORDERED: tl.constexpr = PARTS > 0
    WIDTH: tl.constexpr = BLOCK // PARTS if ORDERED else BLOCK
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    channel = tl.arange(0, WIDTH)
    if ORDERED:
        channel += tl.program_id(1) * WIDTH
    written = channel < HIDDEN
    scale = tl.load(weight + channel, mask=written, other=0.0, volatile=ORDERED).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = _stream(hidden, update, row + channel, written, ORDERED)
    all_x = x
    if WIDTH < BLOCK:
        all_channels = tl.arange(0, BLOCK)
        all_x = _stream(hidden, update, row + all_channels, all_channels < HIDDEN, ORDERED)
    all_x = all_x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(all_x * all_x, 0) / HIDDEN + eps)
    if update is not None:
        tl.store(total + row + channel, x, mask=written)
    tl.store(normed + row + channel, (x.to(tl.float32) * inverse * scale).to(normed.dtype.element_ty), mask=written)


def add_rms_norm_triton(hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `ridgeplan.kernels.layer.add_rms_norm`."""
    hidden = hidden.contiguous()
    normed = torch.empty_like(hidden)
    total = hidden if update is None else torch.empty_like(hidden)
    width = len(weight)
    rows, block = hidden.numel() // width, triton.next_power_of_2(width)
    parts = max(1, block // PART) if rows <= FEW_ROWS else 0
    early = pdl_options(hidden)
    if not weight.is_contiguous():  # a copy just made is not yet visible before the wait
        early = dict.fromkeys(early, False)
    _add_rms_norm_kernel[(rows, max(1, parts))](
        hidden,
        None if update is None else update.contiguous(),
        weight.contiguous(),
        total,
        normed,
        eps,
        HIDDEN=width,
        BLOCK=block,
        PARTS=parts,
        **early,
        num_warps=max(4 if parts else 1, min(16, block // 512)),
    )
    return total, normed


# Rotary embedding

TABLE_BLOCK = 128  # angles per program
FEW_ELEMENTS = 300_000  # elements of queries, keys and values up to which many small programs are faster


@triton.jit(do_not_specialize=["angles"])
def _tables_kernel(
    positions, frequencies, cos, sin, scale, angles, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    pdl_launch_dependents_and_wait(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < angles
    position = tl.load(positions + at // HALF, mask=inside, other=0).to(tl.float32)
    angle = position * tl.load(frequencies + at % HALF, mask=inside, other=0.0)
    tl.store(cos + at, tl.cos(angle) * scale, mask=inside)
    tl.store(sin + at, tl.sin(angle) * scale, mask=inside)


@triton.jit
def _halves(pointer, at, inside, HEAD_DIM: tl.constexpr):
    """Both halves of the channels of heads, in float32."""
    first = tl.load(pointer + at, mask=inside, other=0.0)
    second = tl.load(pointer + at + HEAD_DIM // 2, mask=inside, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store_halves(pointer, at, inside, first, second, HEAD_DIM: tl.constexpr):
    tl.store(pointer + at, first.to(pointer.dtype.element_ty), mask=inside)
    tl.store(pointer + at + HEAD_DIM // 2, second.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _rounded(x, like):
    """`x` rounded to the type that `like` points to."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _normalized(first, second, first_weight, second_weight, like, eps, HEAD_DIM: tl.constexpr):
    """RMSNorm over each head, rounded at the same points as the reference."""
    squares = tl.sum(first * first + second * second, 1, keep_dims=True)
    inverse = tl.rsqrt(squares / HEAD_DIM + eps)
    first = _rounded(_rounded(first * inverse, like) * first_weight, like)
    second = _rounded(_rounded(second * inverse, like) * second_weight, like)
    return first, second


@triton.jit(do_not_specialize=["tokens", "capacity"])
def _rope_append_kernel(
    qkv,  # [batch, tokens, (Q_HEADS + 2 KV_HEADS) * HEAD_DIM]
    cos,  # float32 [batch, tokens, HEAD_DIM / 2]
    sin,  # as cos
    weight,  # [Q_HEADS + KV_HEADS, HEAD_DIM], or None without QK-norm
    slots,  # int64 [batch, tokens]
    queries,  # out: [batch, tokens, Q_HEADS, HEAD_DIM]
    keys,  # out: [batch, KV_HEADS, capacity, HEAD_DIM]
    values,  # out, as keys
    eps,
    tokens,
    capacity,
    key_strides,  # of batch, head and slot
    value_strides,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_launch_dependents_and_wait(PDL)
    key_batch_stride, key_head_stride, key_stride = key_strides
    value_batch_stride, value_head_stride, value_stride = value_strides
    ROTATED: tl.constexpr = Q_HEADS + KV_HEADS
    ALL: tl.constexpr = ROTATED + KV_HEADS
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * HEADS + tl.arange(0, HEADS)[:, None]
    head = (row % ALL).to(tl.int64)
    local = row // ALL
    token = batch * tokens + local
    channels = tl.arange(0, HALF_PADDED)[None, :]
    inside = (local < tokens) & (channels < HEAD_DIM // 2)
    rotated = inside & (head < ROTATED)

    first, second = _halves(qkv, (token * ALL + head) * HEAD_DIM + channels, inside, HEAD_DIM)
    c = tl.load(cos + token * (HEAD_DIM // 2) + channels, mask=rotated, other=0.0)
    s = tl.load(sin + token * (HEAD_DIM // 2) + channels, mask=rotated, other=0.0)
    slot = tl.load(slots + token, mask=local < tokens, other=0)
    if weight is not None:  # loaded before any store, as loads do not overtake stores
        first_weight, second_weight = _halves(weight, head * HEAD_DIM + channels, rotated, HEAD_DIM)
    # Slots are only known on the device; one past the end must not be written into the next head's.
    appended = inside & (slot < capacity)
    at = batch * value_batch_stride + (head - ROTATED) * value_head_stride + slot * value_stride + channels
    _store_halves(values, at, appended & (head >= ROTATED), first, second, HEAD_DIM)
    if weight is not None:
        first, second = _normalized(first, second, first_weight, second_weight, weight, eps, HEAD_DIM)
    x = first * c - second * s
    y = second * c + first * s
    at = (token * Q_HEADS + head) * HEAD_DIM + channels
    _store_halves(queries, at, inside & (head < Q_HEADS), x, y, HEAD_DIM)
    at = batch * key_batch_stride + (head - Q_HEADS) * key_head_stride + slot * key_stride + channels
    _store_halves(keys, at, appended & (head >= Q_HEADS) & (head < ROTATED), x, y, HEAD_DIM)


def rotary_tables_triton(positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See `ridgeplan.kernels.layer.rotary_tables`."""
    half = len(frequencies)
    cos, sin = (torch.empty(*positions.shape, half, dtype=torch.float32, device=positions.device) for _ in range(2))
    grid = (triton.cdiv(cos.numel(), TABLE_BLOCK),)
    _tables_kernel[grid](
        positions.contiguous(),
        frequencies,
        cos,
        sin,
        float(scale),
        cos.numel(),
        HALF=half,
        BLOCK=TABLE_BLOCK,
        **pdl_options(cos),
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
    """See `ridgeplan.kernels.layer.rope_append`."""
    batch, tokens, _ = qkv.shape
    _, kv_heads, capacity, head_dim = keys.shape
    padded = triton.next_power_of_2(head_dim)
    elements, warps = (256, 1) if qkv.numel() <= FEW_ELEMENTS else (2048, 4)
    heads = max(1, elements // padded)
    queries = torch.empty(batch, tokens, q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    _rope_append_kernel[(triton.cdiv(tokens * (q_heads + 2 * kv_heads), heads), batch)](
        qkv.contiguous(),
        *(table.contiguous() for table in tables),
        None if qk_norm is None else qk_norm.contiguous(),
        slots.contiguous(),
        queries,
        keys,
        values,
        eps,
        tokens,
        capacity,
        keys.stride()[:3],
        values.stride()[:3],
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEADS=heads,
        HALF_PADDED=padded // 2,
        num_warps=warps,
        **pdl_options(qkv),
    )
    return queries


# SwiGLU

SWIGLU_BLOCK = 1024  # channels per program
SWIGLU_WARPS = 4


@triton.jit
def _swiglu_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr):
    pdl_launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate_up += row * (2 * WIDTH)
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + WIDTH + at, mask=inside, other=0.0)
    if ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh(x)) = sigmoid(2 x)
        slope = 2 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = (gate * tl.sigmoid(slope)).to(up.dtype)
    else:
        activated = (gate * tl.sigmoid(gate)).to(up.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * WIDTH + at, product.to(out.dtype.element_ty), mask=inside)


def swiglu_triton(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """See `ridgeplan.kernels.layer.swiglu`."""
    gate_up = gate_up.contiguous()
    *rows, both = gate_up.shape
    width = both // 2
    out = torch.empty(*rows, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (gate_up.numel() // both, triton.cdiv(width, SWIGLU_BLOCK))
    options = {"ACTIVATION": activation, "num_warps": SWIGLU_WARPS, **pdl_options(gate_up)}
    _swiglu_kernel[grid](gate_up, out, WIDTH=width, BLOCK=SWIGLU_BLOCK, **options)
    return out
