"""The steps of sparse attention's online softmax in Triton: a block of chosen tokens, from codes or from slots.

A tile of query rows carries `row_max` (largest score, base 2), `row_sum` (of probabilities) and the output as two
halves of the channels, acc0 and acc1 [rows, head_dim / 2], as a byte of codes holds one channel of each.
"""

import triton
import triton.language as tl

from ridgeplan.kernels.attention.triton_blocks import softmax_step
from ridgeplan.kernels.device.dot_triton import dot
from ridgeplan.kernels.device.nibbles_triton import centred_affine, centred_codes


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
    inside,
    first_group,
    scale,
    key_upper,
    key_lower,
    key_scale,
    key_min,
    value_upper,
    value_lower,
    value_scale,
    value_min,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    VALUE_ROWS: tl.constexpr,
):
    """Adds the tokens `token` [BLOCK] of a row's codes that are `inside`; all query rows see them.

    Tokens outside are read but do not count, so they must exist. VALUE_ROWS: value_upper holds values by token, as
    `DraftPlanes.value_rows`; else by channel, as `QuantizedKV`.
    """
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    HALF_GROUP: tl.constexpr = GROUP // 2
    dtype: tl.constexpr = q0.dtype
    group = first_group + token // GROUP
    place = token % GROUP
    channels = tl.arange(0, HALF_DIM)[None, :]
    seen = inside[:, None]
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
