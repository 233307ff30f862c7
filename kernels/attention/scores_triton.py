"""Triton kernel of verification scores: reads the keys once more, for the summed query rows alone."""

from dataclasses import fields

import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.attention.scores import ScoreRequest
from ridgeplan.kernels.attention.triton_blocks import key_scores
from ridgeplan.kernels.device.dot_triton import dot
from ridgeplan.kernels.device.nibbles_triton import centred_affine, centred_codes
from ridgeplan.kernels.kv_cache.layout import QuantizedKV

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
BLOCK = 64  # full-precision slots per program
MAX_ROWS = 128  # query rows of a tile; with more, a program goes over its keys again
WARPS = 4


@triton.jit
def _group_logits(q, row, valid, at, scale, key_upper, key_lower, key_scale, key_min, GROUP: tl.constexpr,
                  HEAD_DIM: tl.constexpr, BITS: tl.constexpr):  # fmt: skip
    """Base-2 logits of query rows and the tokens of group `at`."""
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    channels = tl.arange(0, HALF_DIM)
    q_at = row[:, None] + channels[None, :]
    first_q = tl.load(q + q_at, mask=valid[:, None], other=0.0).to(tl.float32)
    second_q = tl.load(q + q_at + HALF_DIM, mask=valid[:, None], other=0.0).to(tl.float32)
    pair = at * HEAD_DIM + channels
    step0, zero0 = centred_affine(tl.load(key_scale + pair), tl.load(key_min + pair), BITS)
    pair += HALF_DIM
    step1, zero1 = centred_affine(tl.load(key_scale + pair), tl.load(key_min + pair), BITS)
    bias = tl.sum(first_q * (zero0 * scale)[None, :] + second_q * (zero1 * scale)[None, :], 1)
    dtype: tl.constexpr = q.dtype.element_ty
    scaled0, scaled1 = (first_q * (step0 * scale)[None, :]).to(dtype), (second_q * (step1 * scale)[None, :]).to(dtype)
    byte = (at * GROUP + tl.arange(0, GROUP))[:, None] * HALF_DIM + channels[None, :]
    first, second = centred_codes(key_upper, key_lower, byte, BITS, dtype)
    return key_scores(first, second, scaled0, scaled1, bias)


# Arguments that change within a generation (cache sizes, the scores' width) must not trigger recompilation.
@triton.jit(do_not_specialize=["scale", "capacity", "group_capacity", "width"])
def _scores_kernel(
    q, keys, begin, end, groups, lse, out, scale, capacity, group_capacity, width,
    q_batch_stride, q_query_stride, q_head_stride, key_batch_stride, key_head_stride, key_stride,
    key_upper, key_lower, key_scale, key_min,
    QUERIES: tl.constexpr, SUMMED: tl.constexpr, STEP: tl.constexpr, RATIO: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PROBABILITIES: tl.constexpr,
):  # fmt: skip
    flat = tl.program_id(0).to(tl.int64)
    batch, kv_head = flat // KV_HEADS, flat % KV_HEADS
    if BITS > 0:
        first, stop = 0, tl.minimum(tl.load(groups + batch), group_capacity) * GROUP
    else:
        first, stop = tl.load(begin + batch), tl.minimum(tl.load(end + batch), capacity)
    token = first + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if first + tl.program_id(1) * BLOCK >= stop:
        return
    total = tl.zeros([BLOCK], tl.float32)
    for tile in tl.static_range((SUMMED * RATIO + ROWS - 1) // ROWS):
        rows = tile * ROWS + tl.arange(0, ROWS)
        valid = rows < SUMMED * RATIO
        query = QUERIES - 1 - rows % SUMMED * STEP
        head = kv_head * RATIO + rows // SUMMED
        row = batch * q_batch_stride + query * q_query_stride + head * q_head_stride
        if BITS > 0:
            logits = _group_logits(
                q, row, valid, flat * group_capacity + tl.program_id(1), scale, key_upper, key_lower, key_scale,
                key_min, GROUP, HEAD_DIM, BITS,
            )  # fmt: skip
        else:
            channels = tl.arange(0, HEAD_DIM)[None, :]
            q_tile = tl.load(q + row[:, None] + channels, mask=valid[:, None], other=0.0)
            slot = (
                keys + batch * key_batch_stride + kv_head * key_head_stride + token.to(tl.int64)[:, None] * key_stride
            )
            k_tile = tl.load(slot + channels, mask=(token < stop)[:, None], other=0.0)
            logits = tl.zeros([ROWS, BLOCK], tl.float32)
            logits = dot(q_tile, tl.trans(k_tile.to(q_tile.dtype)), logits) * scale
        if PROBABILITIES:
            at = (batch * QUERIES + query) * (KV_HEADS * RATIO) + head
            norm = tl.load(lse + at, mask=valid, other=0.0) / LN_2
            part = tl.exp2(logits - norm[:, None])
        else:
            part = logits * LN_2
        total += tl.sum(tl.where(valid[:, None], part, 0.0), 0)
    tl.store(out + flat * width + token, total, mask=token < stop)


def collect_scores_triton(
    request: ScoreRequest,
    q: Tensor,
    keys: Tensor,
    begin: Tensor,
    end: Tensor,
    codes: QuantizedKV | None,
    groups: Tensor | None,
    lower: bool,
    scale: float,
    lse: Tensor | None,
) -> None:
    """Writes what `ScoreRequest` describes. lse: float32 [B, T, Hq, splits], which probabilities need."""
    batch, queries, q_heads, head_dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    summed, ratio = len(request.summed(queries)), q_heads // kv_heads
    names = ("key_upper", "key_lower", "key_scale", "key_min")
    planes = {field.name: getattr(codes, field.name, None) for field in fields(QuantizedKV) if field.name in names}
    block = BLOCK if codes is None else codes.group
    tokens = capacity if codes is None else codes.groups * codes.group
    _scores_kernel[(batch * kv_heads, triton.cdiv(tokens, block))](
        q,
        keys,
        begin.contiguous(),
        end.contiguous(),
        groups.contiguous() if groups is not None else None,
        lse.logsumexp(-1) if lse is not None and request.what == "probabilities" else None,
        request.out,
        scale * LOG2_E,
        capacity,
        codes.groups if codes is not None else 0,
        request.out.shape[2],
        *q.stride()[:3],
        *keys.stride()[:3],
        **planes,
        QUERIES=queries,
        SUMMED=summed,
        STEP=request.step(queries),
        RATIO=ratio,
        KV_HEADS=kv_heads,
        GROUP=block,
        HEAD_DIM=head_dim,
        BITS=0 if codes is None else 8 if lower else 4,
        ROWS=min(MAX_ROWS, max(16, triton.next_power_of_2(summed * ratio))),
        BLOCK=block,
        PROBABILITIES=request.what == "probabilities",
        num_warps=WARPS,
    )
