"""One step of sparse attention's online softmax in Triton: a block of chosen tokens that are held as codes."""

import triton
import triton.language as tl

from ridgeplan.kernels.attention.triton_blocks import _dot


@triton.jit
def _codes(upper, lower, byte, shift, inside, BITS: tl.constexpr):
    """The codes that are nibble `shift` of the bytes at `byte`, in float32: U, or 16 U + L for 8 bits."""
    code = (tl.load(upper + byte, mask=inside, other=0).to(tl.int32) >> shift) & 15
    if BITS == 8:
        code = code * 16 + ((tl.load(lower + byte, mask=inside, other=0).to(tl.int32) >> shift) & 15)
    return code.to(tl.float32)


@triton.jit
def _affine(scale, minimum, at, inside, BITS: tl.constexpr):
    """(step, zero) in float32 so that x = step * code + zero (`kv_cache.reference.affine`)."""
    step = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(minimum + at, mask=inside, other=0.0).to(tl.float32)
    if BITS == 8:
        zero -= step / 2
        step /= 16
    return step, zero


@triton.jit
def gathered_block(
    row_max,
    row_sum,
    acc,
    q,
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

    VALUE_ROWS: value_upper holds values by token, as `DraftPlanes.value_rows`; else transposed, as `QuantizedKV`.
    """
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    HALF_GROUP: tl.constexpr = GROUP // 2
    group = first_group + token // GROUP
    place = token % GROUP
    channels = tl.arange(0, HEAD_DIM)[None, :]
    seen = inside[:, None]
    by_token = (group * GROUP + place)[:, None] * HALF_DIM + channels % HALF_DIM
    by_half = (channels // HALF_DIM) * 4
    step, zero = _affine(key_scale, key_min, group[:, None] * HEAD_DIM + channels, seen, BITS)
    tile = _codes(key_upper, key_lower, by_token, by_half, seen, BITS) * step + zero
    scores = tl.zeros([q.shape[0], token.shape[0]], tl.float32)
    scores = _dot(q, tl.trans(tile.to(q.dtype)), scores) * scale
    scores = tl.where(inside[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row without any token so far has row_max = -inf; using 0 instead makes p 0, not NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - shift)
    p = tl.exp2(scores - shift[:, None])
    row_sum = row_sum * rescale + tl.sum(p, 1)
    step, zero = _affine(value_scale, value_min, group * GROUP + place, inside, BITS)
    if VALUE_ROWS:
        tile = _codes(value_upper, value_lower, by_token, by_half, seen, BITS)
    else:
        byte = (group[:, None] * HEAD_DIM + channels) * HALF_GROUP + (place % HALF_GROUP)[:, None]
        tile = _codes(value_upper, value_lower, byte, (place // HALF_GROUP)[:, None] * 4, seen, BITS)
    tile = tile * step[:, None] + zero[:, None]
    return new_max, row_sum, _dot(p.to(q.dtype), tile.to(q.dtype), acc * rescale[:, None])
