"""Triton kernels of a state layer's decode step: the gated delta rule with its convolution, and the gated norm.

A program holds some value channels of one head's state in registers, and goes token by token through what is to be
replayed and through the new tokens. The convolution's inputs of the last tokens are in registers, too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.cuda import pdl_options
from ridgeplan.kernels.device.triton_helpers import pdl_launch_dependents_and_wait
from ridgeplan.kernels.state import DeltaVectors
from ridgeplan.kernels.state.reference import NORM_EPS

BLOCK = 16  # value channels per program: 8 programs a head of 128 fill a GPU from 32 heads on
NORM_HEADS = 4  # heads per program of the gated norm


@triton.jit
def _tap(taps, channel, inside, LAG: tl.constexpr, TAPS: tl.constexpr):
    """The convolution's weights for inputs of LAG tokens ago."""
    if LAG < TAPS:
        weight = tl.load(taps + channel * TAPS + (TAPS - 1 - LAG), mask=inside, other=0.0).to(tl.float32)
    else:
        weight = tl.zeros(channel.shape, tl.float32)
    return weight


@triton.jit
def _taps(taps, channel, inside, TAPS: tl.constexpr):
    return (
        _tap(taps, channel, inside, 0, TAPS),
        _tap(taps, channel, inside, 1, TAPS),
        _tap(taps, channel, inside, 2, TAPS),
        _tap(taps, channel, inside, 3, TAPS),
    )


@triton.jit
def _stored(ring, position, channel, inside, RING: tl.constexpr, WIDTH: tl.constexpr):
    """A token's inputs in the ring; zeros ahead of the text."""
    at = (position + RING) % RING * WIDTH + channel
    return tl.load(ring + at, mask=tl.where(position >= 0, inside, False), other=0.0).to(tl.float32)


@triton.jit
def _last_stored(ring, begin, channel, inside, RING: tl.constexpr, WIDTH: tl.constexpr):
    """The inputs of the three tokens ahead of `begin`, the latest first."""
    return (
        _stored(ring, begin - 1, channel, inside, RING, WIDTH),
        _stored(ring, begin - 2, channel, inside, RING, WIDTH),
        _stored(ring, begin - 3, channel, inside, RING, WIDTH),
    )


@triton.jit
def _input(ring, new, position, first, stride, channel, inside, RING: tl.constexpr, WIDTH: tl.constexpr):
    """A token's inputs, of an earlier one from the ring."""
    old = _stored(ring, position, channel, tl.where(position < first, inside, False), RING, WIDTH)
    at = (position - first) * stride + channel
    return old + tl.load(new + at, mask=tl.where(position >= first, inside, False), other=0.0).to(tl.float32)


@triton.jit
def activated(total, element: tl.constexpr):
    """The SiLU of a convolution's sums, rounded before it and after it."""
    total = total.to(element).to(tl.float32)
    return (total * tl.sigmoid(total)).to(element)


@triton.jit
def decay_of(rate, inputs, bias):
    """Logarithms of decays."""
    biased = inputs + bias
    return -rate * tl.where(biased > 20, biased, tl.log(1 + tl.exp(tl.minimum(biased, 20.0))))


@triton.jit
def _convolved(taps, x0, x1, x2, x3, like):
    """The convolution's output after its SiLU, rounded where torch rounds it."""
    total = taps[0] * x0 + taps[1] * x1 + taps[2] * x2 + taps[3] * x3
    return activated(total, like.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "stride"])
def _delta_step_kernel(
    projected,  # [batch, tokens, stride]
    state,  # float32 [batch, VALUE_HEADS, KEY_DIM, VALUE_DIM], updated in place
    ring,  # [batch, RING, WIDTH], written at the new tokens' places
    committed,  # int32 [batch]
    accepted,  # int32 [batch]
    positions,  # int64 [batch, tokens]
    taps,  # [channels, TAPS]
    log_decay,  # float32 [VALUE_HEADS]
    step_bias,  # as log_decay
    out,  # [batch, tokens, VALUE_HEADS, VALUE_DIM]
    eps,
    tokens,
    stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_DIM, rounded up to a power of two
    BLOCK: tl.constexpr,
    STEP_LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_launch_dependents_and_wait(PDL)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    RATIO: tl.constexpr = VALUE_HEADS // KEY_HEADS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + 2 * VALUE_HEADS
    keys, channels = tl.arange(0, KEYS), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_key, is_value = keys < KEY_DIM, channels < VALUE_DIM
    q_at = head // RATIO * KEY_DIM + keys
    k_at = KEY_HEADS * KEY_DIM + q_at
    v_at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + channels
    q_taps = _taps(taps, q_at, is_key, TAPS)
    k_taps = _taps(taps, k_at, is_key, TAPS)
    v_taps = _taps(taps, v_at, is_value, TAPS)
    decay_rate = tl.exp(tl.load(log_decay + head))
    bias = tl.load(step_bias + head)
    ring += row * (RING * WIDTH)
    projected += row * tokens * stride
    out += (row * tokens * VALUE_HEADS + head) * VALUE_DIM
    begin, kept = tl.load(committed + row), tl.load(accepted + row)
    first = tl.load(positions + row * tokens).to(tl.int32)
    state += (row * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    at = keys[:, None] * VALUE_DIM + channels[None, :]
    inside = is_key[:, None] & is_value[None, :]
    current = tl.load(state + at, mask=inside, other=0.0)
    q1, q2, q3 = _last_stored(ring, begin, q_at, is_key, RING, WIDTH)
    k1, k2, k3 = _last_stored(ring, begin, k_at, is_key, RING, WIDTH)
    v1, v2, v3 = _last_stored(ring, begin, v_at, is_value, RING, WIDTH)
    in_range = head < VALUE_HEADS
    writes_keys = tl.where((tl.program_id(0) == 0) & (head % RATIO == 0), is_key, False)
    for position in range(begin, first + tokens):
        tl.store(state + at, current, mask=tl.where((position == kept) & (kept > begin), inside, False))
        new = position >= first
        new_values = tl.where(new, is_value, False)
        q0 = _input(ring, projected, position, first, stride, q_at, is_key, RING, WIDTH)
        k0 = _input(ring, projected, position, first, stride, k_at, is_key, RING, WIDTH)
        v0 = _input(ring, projected, position, first, stride, v_at, is_value, RING, WIDTH)
        step = _input(ring, projected, position, first, stride, CHANNELS + head, in_range, RING, WIDTH)
        decay = _input(ring, projected, position, first, stride, CHANNELS + VALUE_HEADS + head, in_range, RING, WIDTH)
        kept_at = ring + position % RING * WIDTH
        element = ring.dtype.element_ty
        tl.store(kept_at + q_at, q0.to(element), mask=tl.where(new, writes_keys, False))
        tl.store(kept_at + k_at, k0.to(element), mask=tl.where(new, writes_keys, False))
        tl.store(kept_at + v_at, v0.to(element), mask=new_values)
        steers = new & (tl.program_id(0) == 0)
        tl.store(kept_at + CHANNELS + head, step.to(element), mask=steers)
        tl.store(kept_at + CHANNELS + VALUE_HEADS + head, decay.to(element), mask=steers)
        q = _convolved(q_taps, q0, q1, q2, q3, ring)
        k = _convolved(k_taps, k0, k1, k2, k3, ring)
        v = _convolved(v_taps, v0, v1, v2, v3, ring)
        q = q * (tl.rsqrt(tl.sum(q * q, 0) + eps) * (1 / tl.sqrt(KEY_DIM + 0.0)))
        k = k * tl.rsqrt(tl.sum(k * k, 0) + eps)
        current *= tl.exp(decay_of(decay_rate, decay, bias))
        strength = tl.sigmoid(step).to(element).to(tl.float32) * STEP_LIMIT
        update = (v - tl.sum(current * k[:, None], 0)) * strength
        current += k[:, None] * update[None, :]
        read = tl.sum(current * q[:, None], 0)
        place = out + (position - first) * (VALUE_HEADS * VALUE_DIM) + channels
        tl.store(place, read.to(out.dtype.element_ty), mask=new_values)
        q3, q2, q1, k3, k2, k1, v3, v2, v1 = q2, q1, q0, k2, k1, k0, v2, v1, v0


def delta_step_triton(
    projected: Tensor,
    state: Tensor,
    ring: Tensor,
    committed: Tensor,
    accepted: Tensor,
    positions: Tensor,
    vectors: DeltaVectors,
) -> Tensor:
    """See `ridgeplan.kernels.state.delta_step`."""
    projected = projected.contiguous()
    batch, tokens, width = projected.shape
    _, value_heads, key_dim, value_dim = state.shape
    out = torch.empty(batch, tokens, value_heads, value_dim, dtype=projected.dtype, device=projected.device)
    block = min(BLOCK, triton.next_power_of_2(value_dim))
    _delta_step_kernel[(triton.cdiv(value_dim, block), value_heads, batch)](
        projected,
        state,
        ring,
        committed,
        accepted,
        positions.contiguous(),
        vectors.taps.contiguous(),
        vectors.log_decay,
        vectors.step_bias,
        out,
        NORM_EPS,
        tokens,
        width,
        KEY_HEADS=vectors.key_heads,
        VALUE_HEADS=value_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        TAPS=vectors.taps.shape[1],
        RING=ring.shape[1],
        KEYS=triton.next_power_of_2(key_dim),
        BLOCK=block,
        STEP_LIMIT=vectors.step_limit,
        num_warps=1,  # whose sums over keys need no barriers
        **pdl_options(projected),
    )
    return out


@triton.jit(do_not_specialize=["heads", "stride"])
def _gated_norm_kernel(
    x,  # [rows, HEADS, DIM]
    gate,  # [rows, HEADS * DIM], rows `stride` apart
    weight,  # [DIM]
    out,  # [rows, HEADS * DIM]
    eps,
    heads,
    stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_launch_dependents_and_wait(PDL)
    head = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
    channel = tl.arange(0, PADDED)[None, :]
    inside = (head < heads) & (channel < DIM)
    values = tl.load(x + head * DIM + channel, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + head // HEADS * stride + head % HEADS * DIM + channel, mask=inside, other=0.0)
    opened = opened.to(tl.float32)
    scale = tl.load(weight + channel, mask=channel < DIM, other=0.0)
    element = out.dtype.element_ty
    normed = values * tl.rsqrt(tl.sum(values * values, 1, keep_dims=True) / DIM + eps)
    scaled = (normed.to(element).to(tl.float32) * scale.to(tl.float32)).to(element).to(tl.float32)
    tl.store(out + head * DIM + channel, (scaled * opened * tl.sigmoid(opened)).to(element), mask=inside)


def gated_rms_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ridgeplan.kernels.state.gated_rms_norm`."""
    x = x.contiguous()
    *_, heads, dim = x.shape
    gate = gate.flatten(0, -2)
    out = torch.empty(*x.shape[:-2], heads * dim, dtype=x.dtype, device=x.device)
    count = x.numel() // dim
    _gated_norm_kernel[(triton.cdiv(count, NORM_HEADS),)](
        x,
        gate,
        weight.contiguous(),
        out,
        eps,
        count,
        gate.stride(0),
        HEADS=heads,
        DIM=dim,
        PADDED=triton.next_power_of_2(dim),
        TOGETHER=NORM_HEADS,
        num_warps=2,
        **pdl_options(x),
    )
    return out
