"""Triton kernels of decode attention and of the merge: one program per (batch row, KV head), split and row tile.

A tile of query rows carries `row_max` (largest score, base 2), `row_sum` (of probabilities) and `acc` [rows, head_dim].
Steps return these and the tokens' base-2 scores, of a group in halves.

Each program takes an equal range of its row's blocks (quantized groups, then blocks of full-precision slots), runs an
online softmax over them in base 2, and stores a normalized partial with its log-sum-exp. Lengths are read on the
device: the grid is sized by capacity and programs without work return early, so a captured CUDA graph stays valid as
the context grows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.attention import attention_cost, merge, merge_cost
from ridgeplan.kernels.attention.inputs import AttentionInputs
from ridgeplan.kernels.attention.scores import ScoreRequest
from ridgeplan.kernels.device.triton_helpers import centred_affine, centred_codes, dot, launch_metadata
from ridgeplan.roofline.execution import choose_splits

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def key_scores(first, second, q_first, q_second, bias):
    scores = tl.zeros([q_first.shape[0], first.shape[0]], tl.float32)
    scores = dot(q_first, tl.trans(first), scores)
    return dot(q_second, tl.trans(second), scores) + bias[:, None]


@triton.jit
def soft_capped(scores, SOFT_CAP: tl.constexpr):
    """Base-2 scores as SOFT_CAP * tanh(score / SOFT_CAP), of natural ones; 0 for no cap."""
    if SOFT_CAP > 0:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = (2 * tl.sigmoid(scores * (2 * LN_2 / SOFT_CAP)) - 1) * (SOFT_CAP / LN_2)
    return scores


@triton.jit
def quantized_block(
    row_max,
    row_sum,
    acc,
    q_first,
    q_second,
    at,
    first_token,
    scale,
    key_planes,
    value_planes,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    dtype: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Adds tokens of group `at` (flat over batch, head, group) to the online softmax, all of which are visible.

    They are PART tokens of each half of the group, from `first_token` of the half on.
    """
    key_upper, key_lower, key_scale, key_min = key_planes
    value_upper, value_lower, value_scale, value_min = value_planes
    HALF_GROUP: tl.constexpr = GROUP // 2
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    channels = tl.arange(0, HALF_DIM)
    tokens = first_token + tl.arange(0, PART)
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
    scores0 = soft_capped(key_scores(first, second, scaled0, scaled1, bias), SOFT_CAP)
    byte += HALF_GROUP * HALF_DIM
    first, second = centred_codes(key_upper, key_lower, byte, BITS, dtype)
    scores1 = soft_capped(key_scores(first, second, scaled0, scaled1, bias), SOFT_CAP)

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
    window,
    HEAD_DIM: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Adds the full-precision `slots` [BLOCK] below `last`; a row attends to those below its own `limit`, to the last
    `window` of them if that is not None."""
    channels = tl.arange(0, HEAD_DIM)
    inside = slots < last
    far = slots.to(tl.int64)[:, None]
    tile = tl.load(keys + far * key_stride + channels[None, :], mask=inside[:, None], other=0.0)
    scores = tl.zeros([q.shape[0], slots.shape[0]], tl.float32)
    scores = soft_capped(dot(q, tl.trans(tile.to(q.dtype)), scores) * scale, SOFT_CAP)
    seen = (slots[None, :] < limit[:, None]) & inside[None, :]
    if window is not None:
        seen &= slots[None, :] >= limit[:, None] - window
    scores = tl.where(seen, scores, float("-inf"))
    row_max, row_sum, rescale, p = softmax_step(row_max, row_sum, scores)
    tile = tl.load(values + far * value_stride + channels[None, :], mask=inside[:, None], other=0.0)
    acc = dot(p.to(q.dtype), tile.to(q.dtype), acc * rescale[:, None])
    return row_max, row_sum, acc, scores


@triton.jit
def load_earlier_lse(lse, at, valid, SUMMED: tl.constexpr):
    """Base-2 log-sum-exps to which the rows' probabilities refer (`ScoreRequest.lse`); else zeros, which none uses."""
    earlier = tl.zeros(at.shape, tl.float32)
    if SUMMED == "probabilities":
        earlier = tl.load(lse + at, mask=valid, other=0.0) / LN_2
    return earlier


@triton.jit
def store_sums(to, tokens, mask, scores, counts, lse, query, width, SUMMED: tl.constexpr, EACH: tl.constexpr):
    """Stores what the rows that count give each token (`ScoreRequest`): sums of base-2 `scores` [rows, tokens] as
    logits, or of exp2 of these less `lse` [rows]. Nothing where SUMMED is None. EACH: queries whose rows, those with
    this number in `query` [rows], have a sum of their own, `width` after the last one's; 0 for one sum of all."""
    if SUMMED is not None:
        part = tl.exp2(scores - lse[:, None]) if SUMMED == "probabilities" else scores * LN_2
        if EACH == 0:
            tl.store(to + tokens, tl.sum(tl.where(counts[:, None], part, 0.0), 0), mask=mask)
        else:
            for number in tl.static_range(EACH):
                mine = counts & (query == number)
                tl.store(to + number * width + tokens, tl.sum(tl.where(mine[:, None], part, 0.0), 0), mask=mask)


# Attention of the splits

LOG2_E = 1.4426950408889634
MAX_ROWS = 128  # query rows per tile; with more (wide MQA with many queries) further tiles read KV again


@dataclass(frozen=True)
class TileConfig:
    """Launch parameters: full-precision slots per block, warps per 16-row tile, pipeline stages.

    rows: most query rows of a tile. part: most tokens of each half of a quantized group that are a block.
    """

    block: int
    warps: int
    stages: int
    rows: int = MAX_ROWS
    part: int = 128


# By (head_dim, bits of the codes). Quantized groups, or parts of them, are their own blocks; `block` is for the buffer.
CONFIGS = {
    (64, 0): TileConfig(128, 4, 3),
    (64, 4): TileConfig(64, 4, 3),
    (64, 8): TileConfig(64, 4, 3),
    (128, 0): TileConfig(64, 4, 3),
    (128, 4): TileConfig(64, 4, 3),
    (128, 8): TileConfig(64, 4, 3),
    (256, 0): TileConfig(32, 4, 2),
    (256, 4): TileConfig(32, 4, 2),
    (256, 8): TileConfig(32, 4, 2),
    (512, 0): TileConfig(16, 4, 2, rows=64),
}
DEFAULT_CONFIG = TileConfig(32, 4, 1)  # also for float32, whose wide tiles leave no shared memory for a pipeline
# Of heads of more than 256 channels. By the compiler for sm_90, 16 rows of 512 channels spill 0.4 KB a thread in INT8
# and take 49 KiB of shared memory; 64 rows spill 9 KB, and with whole groups take 260 KiB. Not tuned on a GPU yet.
WIDE_CONFIG = TileConfig(16, 4, 2, rows=16, part=16)


@triton.jit
def _split_range(blocks, split, splits):
    """Half-open range of the blocks of one split; splits of a row differ by at most one block."""
    return blocks * split // splits, blocks * (split + 1) // splits


# Arguments that change within a generation (cache sizes, splits, the scores' width) must not trigger recompilation.
DO_NOT_SPECIALIZE = ["scale", "capacity", "group_capacity", "splits", "score_rows", "width", "page_stride", "window"]


def _attention_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """The kernel's cost at full capacity, as reading lengths would synchronize."""
    q, bits, group = args["q"], args["BITS"], args["GROUP"]
    tokens = args["group_capacity"] * group, args["capacity"]
    cost = attention_cost(q, args["KV_HEADS"], *tokens, bits, group, args["splits"])
    return launch_metadata(f"decode_attention_{bits}bit", cost, q.element_size())


@triton.jit(launch_metadata=_attention_metadata, do_not_specialize=DO_NOT_SPECIALIZE)
def _attention_kernel(
    q,  # [batch, QUERIES, q_heads, head_dim]
    keys,  # [batch, kv_heads, capacity, head_dim]
    values,  # as keys
    begin, end,  # int32 [batch]
    groups,  # int32 [batch], or None without codes
    partial,  # out: float32 [batch, QUERIES, q_heads, splits, head_dim]
    lse,  # out: float32 [batch, QUERIES, q_heads, splits]
    scale,  # of the softmax, times log2(e)
    capacity, group_capacity, splits,  # slots and groups of a row, and splits of either
    q_strides,  # of batch, query and head
    key_strides, value_strides,  # of batch, head and slot
    scores, score_lse,  # `ScoreRequest`: float32 [batch, kv_heads, score_rows, width] and [batch, q_heads], or None
    score_rows, width,
    pages,  # `PageTable`: int32 [batch, group_capacity] in rows of `page_stride`, and int32 [batch]; or None
    buffers, page_stride,
    window,  # slots that a query sees, or None
    key_planes, value_planes,  # `QuantizedKV.key_planes`, or four times None
    QUERIES: tl.constexpr, RATIO: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr,
    HEAD_DIM: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SUMMED: tl.constexpr,
    STEP: tl.constexpr, EACH: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    q_batch_stride, q_query_stride, q_head_stride = q_strides
    key_batch_stride, key_head_stride, key_stride = key_strides
    value_batch_stride, value_head_stride, value_stride = value_strides
    flat = tl.program_id(0).to(tl.int64)
    batch, kv_head, split = flat // KV_HEADS, flat % KV_HEADS, tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    query = rows % QUERIES
    head = kv_head * RATIO + rows // QUERIES
    valid = rows < RATIO * QUERIES
    result = ((batch * QUERIES + query) * (KV_HEADS * RATIO) + head) * splits + split

    first, first_end = tl.load(begin + batch), tl.load(end + batch)  # first_end: of the first query's tokens
    last = tl.minimum(first_end + QUERIES - 1, capacity)
    PARTS: tl.constexpr = GROUP // 2 // PART
    visible = tl.minimum(tl.load(groups + batch), group_capacity) * PARTS if BITS > 0 else 0
    start, stop = _split_range(visible + tl.cdiv(tl.maximum(last - first, 0), BLOCK), split, splits)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    if start >= stop:
        tl.store(lse + result, row_max, mask=valid)
        return

    counts = valid & ((QUERIES - 1 - query) % STEP == 0)
    earlier = load_earlier_lse(score_lse, batch * KV_HEADS * RATIO + head, valid, SUMMED)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    q += batch * q_batch_stride
    row = query * q_query_stride + head * q_head_stride
    if BITS > 0:
        half = row[:, None] + tl.arange(0, HEAD_DIM // 2)[None, :]
        q_first = tl.load(q + half, mask=valid[:, None], other=0.0).to(tl.float32)
        q_second = tl.load(q + half + HEAD_DIM // 2, mask=valid[:, None], other=0.0).to(tl.float32)
        for block in range(start, tl.minimum(stop, visible)):
            group, first_token = block // PARTS, block % PARTS * PART
            at = flat * group_capacity + group
            if pages is not None:
                at = tl.load(pages + batch * page_stride + group).to(tl.int64) * KV_HEADS + kv_head
            row_max, row_sum, acc, scores0, scores1 = quantized_block(
                row_max, row_sum, acc, q_first, q_second, at, first_token, scale,
                key_planes, value_planes, GROUP, PART, HEAD_DIM, BITS, q.dtype.element_ty, SOFT_CAP,
            )  # fmt: skip
            tokens = flat * score_rows * width + group * GROUP + first_token + tl.arange(0, PART)
            seen = tokens >= 0
            store_sums(scores, tokens, seen, scores0, counts, earlier, query, width, SUMMED, EACH)
            store_sums(scores, tokens + GROUP // 2, seen, scores1, counts, earlier, query, width, SUMMED, EACH)
    q_tile = tl.load(q + row[:, None] + tl.arange(0, HEAD_DIM)[None, :], mask=valid[:, None], other=0.0)
    buffer = batch
    if pages is not None:
        buffer = tl.load(buffers + batch).to(tl.int64)
    keys += buffer * key_batch_stride + kv_head * key_head_stride
    values += buffer * value_batch_stride + kv_head * value_head_stride
    for block in range(tl.maximum(start, visible), stop):
        slots = first + (block - visible) * BLOCK + tl.arange(0, BLOCK)
        row_max, row_sum, acc, logits = full_block(
            row_max, row_sum, acc, q_tile, first_end + query, slots, last, scale, keys, values,
            key_stride, value_stride, window, HEAD_DIM, SOFT_CAP,
        )  # fmt: skip
        if BITS == 0:
            seen = slots < tl.minimum(first_end, capacity)
            to = flat * score_rows * width + slots
            store_sums(scores, to, seen, logits, counts, earlier, query, width, SUMMED, EACH)

    divisor = tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(lse + result, (row_max + tl.log2(divisor)) * LN_2, mask=valid)
    to = result[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(partial + to, acc / divisor[:, None], mask=valid[:, None])


@cache
def _num_sms(device: torch.device) -> int:
    # Triton's interpreter has no SMs; pretending to have a few tests several splits.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def decode_attention_triton(inputs: AttentionInputs, splits: int | None, scores: ScoreRequest | None = None) -> Tensor:
    """See `ridgeplan.kernels.attention.decode_attention`.

    Raises ValueError for a head_dim or group that Triton's tiles cannot hold (powers of two from 32 on), or
    channels that are not contiguous.
    """
    q, keys, codes, groups, pages = inputs.q, inputs.keys, inputs.codes, inputs.groups, inputs.pages
    batch, queries, q_heads, head_dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    group = codes.group if codes is not None else head_dim
    _check_tiles(head_dim, group, q, keys, inputs.values)
    default = WIDE_CONFIG if head_dim > 256 else DEFAULT_CONFIG
    config = CONFIGS.get((head_dim, inputs.bits), default) if q.element_size() == 2 else default
    tokens = inputs.group_capacity * group + capacity
    splits = splits or int(choose_splits(batch, kv_heads, tokens, _num_sms(q.device)))
    rows = _tile_rows(queries * inputs.ratio, None if scores is not None else config.rows)
    partial = torch.empty(batch, queries, q_heads, splits, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(partial.shape[:-1], dtype=torch.float32, device=q.device)
    _attention_kernel[batch * kv_heads, splits, triton.cdiv(queries * inputs.ratio, rows)](
        q,
        keys,
        inputs.values,
        inputs.begin.contiguous(),
        inputs.end.contiguous(),
        groups.contiguous() if groups is not None else None,
        partial,
        lse,
        inputs.scale * LOG2_E,
        capacity,
        inputs.group_capacity,
        splits,
        *(tensor.stride()[:3] for tensor in (q, keys, inputs.values)),
        pages=None if pages is None else pages.pages,
        buffers=None if pages is None else pages.buffers,
        page_stride=0 if pages is None else pages.pages.stride(0),
        window=inputs.window,
        key_planes=inputs.key_planes,
        value_planes=inputs.value_planes,
        QUERIES=queries,
        RATIO=inputs.ratio,
        KV_HEADS=kv_heads,
        GROUP=group,
        PART=min(config.part, group // 2),
        HEAD_DIM=head_dim,
        BITS=inputs.bits,
        ROWS=rows,
        BLOCK=config.block,
        SOFT_CAP=inputs.soft_cap,
        **_score_arguments(scores, queries),
        num_warps=config.warps * (2 if rows >= 64 else 1),
        num_stages=config.stages,
    )
    if scores is not None:
        scores.keep_lse(lse[:, -1].logsumexp(-1))
    return merge(partial, lse, q.dtype, sinks=inputs.sinks, backend="triton")


def _tile_rows(rows: int, limit: int | None) -> int:
    """Query rows per tile, of `rows` in all; one tile, without a limit, where a program sums over them for scores."""
    padded = max(16, triton.next_power_of_2(rows))
    return padded if limit is None else min(limit, padded)


def _score_arguments(request: ScoreRequest | None, queries: int) -> dict[str, object]:
    """The kernel's arguments for the scores that it leaves."""
    if request is None:
        return {"scores": None, "score_lse": None, "score_rows": 1, "width": 0, "SUMMED": None, "STEP": 1, "EACH": 0}
    _, _, score_rows, width = request.by_query.shape
    tensors = {"scores": request.out, "score_lse": request.lse, "score_rows": score_rows, "width": width}
    each = queries if request.rows == "each" else 0
    return {**tensors, "SUMMED": request.what, "STEP": request.step(queries), "EACH": each}


def _check_tiles(head_dim: int, group: int, *tensors: Tensor) -> None:
    for name, size in (("head_dim", head_dim), ("group", group)):
        if size < 32 or size & (size - 1):
            raise ValueError(f"{name} {size} does not fit the Triton kernel: powers of two from 32 on")
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        raise ValueError("q, keys and values need contiguous channels (stride 1 in the last dimension)")


# Merge of the splits

MERGE_CHUNK = 16  # splits whose partials are in flight together


def _merge_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    return launch_metadata("merge", merge_cost(args["out"], args["splits"]))


@triton.jit(launch_metadata=_merge_metadata, do_not_specialize=["splits"])
def _merge_kernel(
    partial,  # float32 [rows, splits, head_dim]
    lse,  # float32 [rows, splits]
    out,  # [rows, head_dim]
    sinks,  # [HEADS], or None
    splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, HEAD_DIM)
    row_max = -3.0e38  # finite, so that the difference of two is no NaN if all splits are empty
    row_sum = 0.0
    if sinks is not None:  # a split whose partial is 0
        row_max = tl.load(sinks + row % HEADS).to(tl.float32)
        row_sum += 1.0
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for start in range(0, splits, CHUNK):
        at = start + tl.arange(0, CHUNK)
        split_lse = tl.load(lse + row * splits + at, mask=at < splits, other=float("-inf"))
        new_max = tl.maximum(row_max, tl.max(split_lse, 0))
        rescale = tl.exp(row_max - new_max)
        weights = tl.exp(split_lse - new_max)
        # An empty split has not written its partial, which must not be read.
        part = (row * splits + at)[:, None] * HEAD_DIM + channels[None, :]
        part = tl.load(partial + part, mask=(split_lse > float("-inf"))[:, None], other=0.0)
        acc = acc * rescale + tl.sum(weights[:, None] * part, 0)
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        row_max = new_max
    acc /= tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(out + row * HEAD_DIM + channels, acc.to(out.dtype.element_ty))


def merge_triton(partial: Tensor, lse: Tensor, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    """See `ridgeplan.kernels.attention.merge`; head_dim must be a power of two."""
    partial, lse = partial.contiguous(), lse.contiguous()
    *rows, splits, head_dim = partial.shape
    out = torch.empty(*rows, head_dim, dtype=dtype, device=partial.device)
    _merge_kernel[(lse.numel() // splits,)](
        partial,
        lse,
        out,
        None if sinks is None else sinks.contiguous(),
        splits,
        HEADS=lse.shape[-2],
        HEAD_DIM=head_dim,
        CHUNK=MERGE_CHUNK,
        num_warps=2,
    )
    return out
