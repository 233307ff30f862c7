"""Triton kernel of decode attention: one program per (batch row, KV head), split and tile of query rows.

Each program takes an equal range of its row's blocks (quantized groups, then blocks of full-precision slots), runs an
online softmax over them in base 2, and stores a normalized partial with its log-sum-exp. Lengths are read on the
device: the grid is sized by capacity and programs without work return early, so a captured CUDA graph stays valid as
the context grows.
"""

from dataclasses import dataclass, fields
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.attention.cost import attention_metadata
from ridgeplan.kernels.attention.merge import merge
from ridgeplan.kernels.attention.scores import ScoreRequest
from ridgeplan.kernels.attention.triton_blocks import LN_2, full_block, load_earlier_lse, quantized_block, store_sums
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.roofline.execution import choose_splits

LOG2_E = 1.4426950408889634
MAX_ROWS = 128  # query rows per tile; with more (wide MQA with many queries) further tiles read KV again


@dataclass(frozen=True)
class TileConfig:
    """Launch parameters: full-precision slots per block, warps per 16-row tile, pipeline stages."""

    block: int
    warps: int
    stages: int


# By (head_dim, bits of the codes). Quantized groups are their own blocks; `block` is for the buffer.
CONFIGS = {
    (64, 0): TileConfig(128, 4, 3),
    (64, 4): TileConfig(64, 4, 3),
    (64, 8): TileConfig(64, 4, 3),
    (128, 0): TileConfig(64, 4, 3),
    (128, 4): TileConfig(64, 4, 3),
    (128, 8): TileConfig(64, 4, 3),
}
DEFAULT_CONFIG = TileConfig(32, 4, 1)  # also for float32, whose wide tiles leave no shared memory for a pipeline


@triton.jit
def _split_range(blocks, split, splits):
    """Half-open range of the blocks of one split; splits of a row differ by at most one block."""
    return blocks * split // splits, blocks * (split + 1) // splits


# Arguments that change within a generation (cache sizes, splits, the scores' width) must not trigger recompilation.
DO_NOT_SPECIALIZE = ["scale", "capacity", "group_capacity", "splits", "width"]


@triton.jit(launch_metadata=attention_metadata, do_not_specialize=DO_NOT_SPECIALIZE)
def _attention_kernel(
    q, keys, values, begin, end, groups, partial, lse, scale, capacity, group_capacity, splits,
    q_batch_stride, q_query_stride, q_head_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride, scores, score_lse, width,
    key_upper, key_lower, key_scale, key_min, value_upper, value_lower, value_scale, value_min,
    QUERIES: tl.constexpr, RATIO: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SUMMED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    flat = tl.program_id(0).to(tl.int64)
    batch, kv_head, split = flat // KV_HEADS, flat % KV_HEADS, tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    query = rows % QUERIES
    head = kv_head * RATIO + rows // QUERIES
    valid = rows < RATIO * QUERIES
    result = ((batch * QUERIES + query) * (KV_HEADS * RATIO) + head) * splits + split

    first, own = tl.load(begin + batch), tl.load(end + batch)
    last = tl.minimum(own + QUERIES - 1, capacity)
    visible = tl.minimum(tl.load(groups + batch), group_capacity) if BITS > 0 else 0
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
        at = row[:, None] + tl.arange(0, HEAD_DIM // 2)[None, :]
        q_first = tl.load(q + at, mask=valid[:, None], other=0.0).to(tl.float32)
        q_second = tl.load(q + at + HEAD_DIM // 2, mask=valid[:, None], other=0.0).to(tl.float32)
        for group in range(start, tl.minimum(stop, visible)):
            row_max, row_sum, acc, scores0, scores1 = quantized_block(
                row_max, row_sum, acc, q_first, q_second, flat * group_capacity + group, scale,
                key_upper, key_lower, key_scale, key_min, value_upper, value_lower, value_scale, value_min,
                GROUP, HEAD_DIM, BITS, q.dtype.element_ty,
            )  # fmt: skip
            tokens = flat * width + group * GROUP + tl.arange(0, GROUP // 2)
            store_sums(scores, tokens, tokens >= 0, scores0, counts, earlier, SUMMED)
            store_sums(scores, tokens + GROUP // 2, tokens >= 0, scores1, counts, earlier, SUMMED)
    q_tile = tl.load(q + row[:, None] + tl.arange(0, HEAD_DIM)[None, :], mask=valid[:, None], other=0.0)
    keys += batch * key_batch_stride + kv_head * key_head_stride
    values += batch * value_batch_stride + kv_head * value_head_stride
    for block in range(tl.maximum(start, visible), stop):
        slots = first + (block - visible) * BLOCK + tl.arange(0, BLOCK)
        row_max, row_sum, acc, logits = full_block(
            row_max, row_sum, acc, q_tile, own + query, slots, last, scale, keys, values, key_stride, value_stride,
            HEAD_DIM,
        )  # fmt: skip
        if BITS == 0:
            store_sums(scores, flat * width + slots, slots < tl.minimum(own, capacity), logits, counts, earlier, SUMMED)

    divisor = tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(lse + result, (row_max + tl.log2(divisor)) * LN_2, mask=valid)
    at = result[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(partial + at, acc / divisor[:, None], mask=valid[:, None])


@cache
def _num_sms(device: torch.device) -> int:
    # Triton's interpreter has no SMs; pretending to have a few tests several splits.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def decode_attention_triton(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    begin: Tensor,
    end: Tensor,
    codes: QuantizedKV | None,
    groups: Tensor | None,
    lower: bool,
    scale: float,
    splits: int | None,
    scores: ScoreRequest | None = None,
) -> Tensor:
    """See `ridgeplan.kernels.attention.decode_attention`.

    Raises ValueError for a head_dim or group that Triton's tiles cannot hold (powers of two from 32 on), or
    channels that are not contiguous.
    """
    batch, queries, q_heads, head_dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    group = codes.group if codes is not None else head_dim
    _check_tiles(head_dim, group, q, keys, values)
    bits = 0 if codes is None else 8 if lower else 4
    config = CONFIGS.get((head_dim, bits), DEFAULT_CONFIG) if q.element_size() == 2 else DEFAULT_CONFIG
    group_capacity = codes.groups if codes is not None else 0
    splits = splits or int(choose_splits(batch, kv_heads, group_capacity * group + capacity, _num_sms(q.device)))
    rows = _tile_rows(queries * (q_heads // kv_heads), scores is not None)
    partial = torch.empty(batch, queries, q_heads, splits, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(partial.shape[:-1], dtype=torch.float32, device=q.device)
    planes = vars(codes) if codes is not None else {field.name: None for field in fields(QuantizedKV)}
    _attention_kernel[batch * kv_heads, splits, triton.cdiv(queries * (q_heads // kv_heads), rows)](
        q,
        keys,
        values,
        begin.contiguous(),
        end.contiguous(),
        groups.contiguous() if groups is not None else None,
        partial,
        lse,
        scale * LOG2_E,
        capacity,
        group_capacity,
        splits,
        *(stride for tensor in (q, keys, values) for stride in tensor.stride()[:3]),
        **planes,
        QUERIES=queries,
        RATIO=q_heads // kv_heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BITS=bits,
        ROWS=rows,
        BLOCK=config.block,
        **_score_arguments(scores, queries),
        num_warps=config.warps * (2 if rows >= 64 else 1),
        num_stages=config.stages,
    )
    if scores is not None:
        scores.keep_lse(lse[:, -1].logsumexp(-1))
    return merge(partial, lse, q.dtype, backend="triton")


def _tile_rows(rows: int, scored: bool) -> int:
    """Query rows per tile, of `rows` in all; one tile where a program sums over them for scores."""
    padded = max(16, triton.next_power_of_2(rows))
    return padded if scored else min(MAX_ROWS, padded)


def _score_arguments(request: ScoreRequest | None, queries: int) -> dict[str, object]:
    """What the kernel is told of the scores that it leaves, by the names of its arguments."""
    if request is None:
        return {"scores": None, "score_lse": None, "width": 0, "SUMMED": None, "STEP": 1}
    told = {"scores": request.out, "score_lse": request.lse, "width": request.out.shape[2]}
    return {**told, "SUMMED": request.what, "STEP": request.step(queries)}


def _check_tiles(head_dim: int, group: int, *tensors: Tensor) -> None:
    for name, size in (("head_dim", head_dim), ("group", group)):
        if size < 32 or size & (size - 1):
            raise ValueError(f"{name} {size} does not fit the Triton kernel: powers of two from 32 on")
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        raise ValueError("q, keys and values need contiguous channels (stride 1 in the last dimension)")
