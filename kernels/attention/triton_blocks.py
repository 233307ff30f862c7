"""The two steps of the attention kernel's online softmax: a quantized group and a block of full-precision tokens.

A tile of query rows carries `row_max` (largest score, base 2), `row_sum` (of probabilities) and `acc` [rows, head_dim].
Steps return these and the tokens' base-2 scores, of a group in halves.
"""

import triton
import triton.language as tl

from ridgeplan.kernels.device.dot_triton import dot
from ridgeplan.kernels.device.nibbles_triton import centred_affine, centred_codes

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def key_scores(first, second, q_first, q_second, bias):
    scores = tl.zeros([q_first.shape[0], first.shape[0]], tl.float32)
    scores = dot(q_first, tl.trans(first), scores)
    return dot(q_second, tl.trans(second), scores) + bias[:, None]


@triton.jit
def quantized_block(
    row_max,
    row_sum,
    acc,
    q_first,
    q_second,
    at,
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
    dtype: tl.constexpr,
):
    """Adds group `at` (flat over batch, head, group) to the online softmax; all its tokens are visible."""
    HALF_GROUP: tl.constexpr = GROUP // 2
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    channels = tl.arange(0, HALF_DIM)
    tokens = tl.arange(0, HALF_GROUP)
    pair = at * HEAD_DIM + channels
    step0, zero0 = centred_affine(tl.load(key_scale + pair), tl.load(key_min + pair), BITS)
    pair += HALF_DIM
    step1, zero1 = centred_affine(tl.load(key_scale + pair), tl.load(key_min + pair), BITS)
    # Only one reduction each for bias, maximum and sum: rows span warps, so every reduction needs barriers.
    bias = tl.sum(q_first * (zero0 * scale)[None, :] + q_second * (zero1 * scale)[None, :], 1)
    scaled0 = (q_first * (step0 * scale)[None, :]).to(dtype)
    scaled1 = (q_second * (step1 * scale)[None, :]).to(dtype)
    byte = at * GROUP * HALF_DIM + tokens[:, None] * HALF_DIM + channels[None, :]
    first, second = centred_codes(key_upper, key_lower, byte, BITS, dtype)
    scores0 = key_scores(first, second, scaled0, scaled1, bias)
    byte += HALF_GROUP * HALF_DIM
    first, second = centred_codes(key_upper, key_lower, byte, BITS, dtype)
    scores1 = key_scores(first, second, scaled0, scaled1, bias)

    new_max = tl.maximum(row_max, tl.max(tl.maximum(scores0, scores1), 1))
    rescale = tl.exp2(row_max - new_max)
    p0 = tl.exp2(scores0 - new_max[:, None])
    p1 = tl.exp2(scores1 - new_max[:, None])
    row_sum = row_sum * rescale + tl.sum(p0 + p1, 1)

    pair = at * GROUP + tokens
    step0, zero0 = centred_affine(tl.load(value_scale + pair), tl.load(value_min + pair), BITS)
    pair += HALF_GROUP
    step1, zero1 = centred_affine(tl.load(value_scale + pair), tl.load(value_min + pair), BITS)
    bias = tl.sum(p0 * zero0[None, :] + p1 * zero1[None, :], 1)
    byte = at * HEAD_DIM * HALF_GROUP + tl.arange(0, HEAD_DIM)[:, None] * HALF_GROUP + tokens[None, :]
    first, second = centred_codes(value_upper, value_lower, byte, BITS, dtype)
    acc = acc * rescale[:, None] + bias[:, None]
    acc = dot((p0 * step0[None, :]).to(dtype), tl.trans(first), acc)
    acc = dot((p1 * step1[None, :]).to(dtype), tl.trans(second), acc)
    return new_max, row_sum, acc, scores0, scores1


@triton.jit
def softmax_step(row_max, row_sum, scores):
    """(new row_max, new row_sum, factor of what was summed before, probabilities) of a block's base-2 scores."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row without any token so far has row_max = -inf; using 0 instead makes p 0, not NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - shift)
    p = tl.exp2(scores - shift[:, None])
    return new_max, row_sum * rescale + tl.sum(p, 1), rescale, p


@triton.jit
def full_block(
    row_max,
    row_sum,
    acc,
    q,
    limit,
    slots,
    last,
    scale,
    keys,
    values,
    key_stride,
    value_stride,
    HEAD_DIM: tl.constexpr,
):
    """Adds the full-precision `slots` [BLOCK] below `last`; a row attends to those below its own `limit`."""
    channels = tl.arange(0, HEAD_DIM)
    inside = slots < last
    far = slots.to(tl.int64)[:, None]
    tile = tl.load(keys + far * key_stride + channels[None, :], mask=inside[:, None], other=0.0)
    scores = tl.zeros([q.shape[0], slots.shape[0]], tl.float32)
    scores = dot(q, tl.trans(tile.to(q.dtype)), scores) * scale
    scores = tl.where((slots[None, :] < limit[:, None]) & inside[None, :], scores, float("-inf"))
    row_max, row_sum, rescale, p = softmax_step(row_max, row_sum, scores)
    tile = tl.load(values + far * value_stride + channels[None, :], mask=inside[:, None], other=0.0)
    acc = dot(p.to(q.dtype), tile.to(q.dtype), acc * rescale[:, None])
    return row_max, row_sum, acc, scores


@triton.jit
def load_earlier_lse(lse, at, valid, SUMMED: tl.constexpr):
    """Base-2 log-sum-exps to which the rows' probabilities refer (`ScoreRequest.lse`); else zeros, which none uses."""
    found = tl.zeros(at.shape, tl.float32)
    if SUMMED == "probabilities":
        found = tl.load(lse + at, mask=valid, other=0.0) / LN_2
    return found


@triton.jit
def store_sums(to, tokens, mask, scores, counts, lse, SUMMED: tl.constexpr):
    """Stores what the rows that count give each token (`ScoreRequest`): sums of base-2 `scores` [rows, tokens] as
    logits, or of exp2 of these less `lse` [rows]. Nothing where SUMMED is None."""
    if SUMMED is not None:
        part = tl.exp2(scores - lse[:, None]) if SUMMED == "probabilities" else scores * LN_2
        tl.store(to + tokens, tl.sum(tl.where(counts[:, None], part, 0.0), 0), mask=mask)
