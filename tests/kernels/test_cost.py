"""Declared costs against the FLOPs and the bytes of the tensors that an operation reads and writes, counted by hand."""

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.attention import attention_cost, merge_cost, scores_cost
from ridgeplan.kernels.attention import triton as attention_kernels
from ridgeplan.kernels.attention.scores import ScoreRequest
from ridgeplan.kernels.kv_cache import dequantize_cost, quantize_cost, shift_slots_cost
from ridgeplan.kernels.kv_cache import triton as kv_cache_kernels
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.layer import add_rms_norm_cost, rope_append_cost, swiglu_cost
from ridgeplan.kernels.linear import linear_cost
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight
from ridgeplan.kernels.offload import SlotTable, allocate_slots_cost, copy_prefix_cost, flush_to_host_cost, gather_cost
from ridgeplan.kernels.sampling import draw_cost, filter_cost
from ridgeplan.kernels.sampling import triton as sampling_kernels
from ridgeplan.kernels.selection import page_scores_cost, top_k_cost, two_bit_top_k_cost
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, TwoBitKeys
from ridgeplan.kernels.selection.head_scores import head_scores_cost
from ridgeplan.kernels.sparse_attention import progressive_cost, sparse_attention_cost
from ridgeplan.kernels.sparse_attention import triton as sparse_kernels
from ridgeplan.kernels.state import DeltaVectors, StateRows, delta_chunks_cost, delta_step_cost, gated_rms_norm_cost
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def fp32(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def int32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def int64(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


# 2 rows, 3 KV heads of 64 channels with 4 query heads each, 5 queries; 6 groups of 32 tokens, and 40 slots.
CODES, UPPER = (QuantizedKV.allocate(2, 3, 6, 32, 64, "cpu", lower) for lower in (True, False))
PLANES = DraftPlanes.allocate(CODES)
TWO_BIT = TwoBitKeys.of(CODES, PLANES)
KV = [bf16(2, 3, 40, 64)] * 2
Q, QUERY = bf16(2, 5, 12, 64), bf16(2, 1, 12, 64)
PARTIALS = [fp32(2, 5, 12, 7, 64), fp32(2, 5, 12, 7)]
GROUPS = [bf16(2, 3, 64, 64)] * 2
INT4 = Int4Weight.pack(torch.zeros(48, 256), torch.ones(48, 8), torch.ones(48, 8))
INT8 = Int8Weight(INT4, INT4)
X, DENSE = bf16(7, 256), bf16(48, 256)
TABLES = fp32(2, 5, 32), fp32(2, 5, 32)
SCORES = ScoreRequest(torch.zeros(2, 3, 192), "ends", "probabilities", torch.zeros(2, 12))
STREAM, WEIGHT = bf16(2, 5, 96), bf16(96)
# 2 rows of 4 value heads of 64 and 2 key heads of 32, so 384 channels; 3 replayed and 5 new tokens, 4 taps.
STATES = StateRows(fp32(2, 4, 32, 64), bf16(2, 13, 392), int32(2), int32(2))
VECTORS = DeltaVectors(bf16(384, 4), fp32(4), fp32(4), key_heads=2, key_dim=32)
STATE_FLOPS = 2 * 8 * (7 * 4 * 32 * 64 + 2 * 384 * 4)


def stored(codes: QuantizedKV) -> list[Tensor]:
    return [tensor for tensor in vars(codes).values() if tensor is not None]


@pytest.mark.parametrize(
    ("cost", "flops", "read", "written"),
    [
        pytest.param(*row[1:], id=row[0])
        for row in (
            ("attention int8", attention_cost(Q, 3, 192, 40, 8, 32, 7), 4 * Q.numel() * 232, [*stored(CODES), *KV, Q],
             PARTIALS),
            ("attention int4", attention_cost(Q, 3, 192, 40, 4, 32, 7), 4 * Q.numel() * 232, [*stored(UPPER), *KV, Q],
             PARTIALS),
            ("attention", attention_cost(Q, 3, 0, 40, 0, 32, 7), 4 * Q.numel() * 40, [*KV, Q], PARTIALS),
            ("merge", merge_cost(Q, 7), 2 * PARTIALS[0].numel(), PARTIALS, [Q]),
            ("scores", scores_cost(SCORES, Q, 192), 2 * 2 * 12 * 2 * 192, [SCORES.lse], [SCORES.lse, SCORES.out]),
            ("quantize", quantize_cost(bf16(2, 3, 192, 64), 32, 2), 6 * 2 * 2 * 3 * 192 * 64,
             [bf16(2, 3, 192, 64)] * 2, stored(CODES)),
            ("dequantize", dequantize_cost(fp32(2, 3, 192, 64), 32, 1), 2 * 2 * 2 * 3 * 192 * 64, stored(UPPER),
             [fp32(2, 3, 192, 64)] * 2),
            ("shift", shift_slots_cost(KV[0], 32), 0, [bf16(2, 3, 8, 64)] * 2, [bf16(2, 3, 8, 64)] * 2),
            ("norm", add_rms_norm_cost(STREAM, None, WEIGHT), 4 * 960, [STREAM, WEIGHT], [STREAM]),
            ("add norm", add_rms_norm_cost(STREAM, STREAM, WEIGHT), 8 * 960, [STREAM, STREAM, WEIGHT], [STREAM] * 2),
            ("rotary tables", ops.rotary_tables(10, 64), 4 * 320, [int64(2, 5), fp32(32)], TABLES),
            ("rope", rope_append_cost(bf16(2, 5, 18 * 64), TABLES, int64(2, 5), bf16(15, 64)), 4 * 10 * 18 * 64,
             [bf16(2, 5, 18 * 64), *TABLES, int64(2, 5), bf16(15, 64)], [bf16(2, 5, 18 * 64)]),
            ("swiglu", swiglu_cost(bf16(2, 5, 192)), 4 * 1920, [bf16(2, 5, 192)], [STREAM]),
            ("state", delta_step_cost(bf16(2, 5, 500), STATES, VECTORS, 3, 1), STATE_FLOPS,
             [STATES.state, bf16(2, 3 + 3 + 5, 392), VECTORS.taps, VECTORS.log_decay, VECTORS.step_bias],
             [STATES.state, bf16(2, 5, 392), bf16(2, 5, 256)]),
            ("state of drafts", delta_step_cost(bf16(2, 1, 500), STATES, VECTORS, 0, 0), STATE_FLOPS // 8,
             [STATES.state, bf16(2, 3 + 1, 392), VECTORS.taps, VECTORS.log_decay, VECTORS.step_bias],
             [bf16(2, 1, 392), bf16(2, 1, 256)]),
            # By head and token: three products with the state, those within a chunk, and the triangular system.
            ("chunks", delta_chunks_cost(bf16(128, 500), STATES.state[0], VECTORS),
             2 * 128 * 4 * (3 * 32 * 64 + 64 * (2 * 32 + 64) + 64 * (32 + 64 + 64 / 3)),
             [bf16(128, 392), *[STATES.state[0]] * 2], [bf16(128, 256), *[STATES.state[0]] * 2]),
            ("gated norm", gated_rms_norm_cost(bf16(2, 5, 4, 64)), 4 * 2 * 10 * 256, [*[bf16(2, 5, 256)] * 2, bf16(64)],
             [bf16(2, 5, 256)]),
            ("dense", linear_cost(X, 48, 2), 2 * 7 * 48 * 256, [X, DENSE], [bf16(7, 48)]),
            ("gated dense", linear_cost(X, 48, 2, gated=True), 2 * 7 * 48 * 256, [X, DENSE], [bf16(7, 24)]),
            ("int4", linear_cost(X, 48, INT4.bytes / DENSE.numel()), 2 * 7 * 48 * 256, [X, INT4.packed], [bf16(7, 48)]),
            ("gated int8", linear_cost(X, 48, INT8.bytes / DENSE.numel(), gated=True), 2 * 7 * 48 * 256,
             [X, INT4.packed, INT4.packed], [bf16(7, 24)]),
            ("filter", filter_cost(bf16(3, 5, 1000)), 5 * 15000, [bf16(3, 5, 1000)], []),
            ("draw", draw_cost(bf16(3, 1000)), 5 * 3000, [bf16(3, 1000)], []),
            ("draw of a residual", draw_cost(*[bf16(3, 1000)] * 2), 5 * 6000, [bf16(3, 1000)] * 2, []),
            ("pages", page_scores_cost(QUERY, bf16(2, 3, 4, 2, 64)), 4 * QUERY.numel() * 4, [bf16(2, 3, 4, 2, 64)],
             [fp32(2, 3, 4)]),
            ("head scores", head_scores_cost(QUERY[:, 0], KV[0], 3), 2 * QUERY.numel() * 40,
             [QUERY, KV[0], fp32(2, 12, 40)], [fp32(2, 12, 40), fp32(2, 3, 40)]),
            ("top-k", top_k_cost(fp32(6, 100), 9), 6 * 600, [fp32(6, 100)] * 6, [int32(6, 9)]),
            ("2-bit top-k", two_bit_top_k_cost(QUERY, TWO_BIT, 192, 9), 2 * QUERY.numel() * 192,
             [PLANES.key_two_bit, CODES.key_scale, CODES.key_min, bf16(2, 3, 192)], [bf16(2, 3, 192), int32(2, 3, 9)]),
            ("sparse attention", sparse_attention_cost(Q, 3, int32(2, 1, 4), 16, 40, 0, 32, 7),
             4 * Q.numel() * 104, [*GROUPS, *KV, Q, int32(2, 1, 4)], PARTIALS),
            ("sparse attention int4", sparse_attention_cost(Q, 3, int32(2, 3, 192), 1, 40, 4, 32, 7),
             4 * Q.numel() * 232, [*stored(UPPER), *KV, Q, int32(2, 3, 192)], PARTIALS),
            ("progressive", progressive_cost(QUERY, CODES, 192, 192, 40, 7), (2 * 192 + 4 * 232) * QUERY.numel(),
             [PLANES.key_two_bit, CODES.key_scale, CODES.key_min, *stored(UPPER), *KV, QUERY],
             [fp32(2, 1, 12, 7, 64), fp32(2, 1, 12, 7)]),
            ("gather", gather_cost((KV[0], KV[1]), 2, page=16), 0, [bf16(2, 3, 32, 64)] * 2, [bf16(2, 3, 32, 64)] * 2),
            ("copy", copy_prefix_cost(KV[0], 30), 0, [bf16(2, 3, 30, 64)], [bf16(2, 3, 30, 64)]),
            ("flush", flush_to_host_cost(KV[0], 32), 0, [bf16(2, 3, 32, 64)], [bf16(2, 3, 32, 64)]),
            ("slots", allocate_slots_cost(SlotTable.allocate(2, 3, 99, 20, torch.device("cpu")), int32(2, 3, 9)), 0,
             [int32(2, 3, 9)] * 2 + [int32(2, 3, 20)], [int32(2, 3, 9)] * 2),
        )
    ],
)  # fmt: skip
def test_cost_counts_flops_and_bytes(cost: Cost, flops: int, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    assert cost.flops == flops
    assert cost.read_bytes == sum(tensor.nbytes for tensor in read)
    assert cost.write_bytes == sum(tensor.nbytes for tensor in written)


def test_progressive_at_128k() -> None:
    """A token of 128 channels has 32 bytes of 2-bit keys and 4 of their scales; a chosen one 128 of codes and 8."""
    cost = ops.progressive_attention(1, 32, 8, 128, 131072, ops.KVRead(9175, 0, 4, 2, 128, 1))
    query = 32 * 128 * 2
    assert cost.read_bytes - query == 8 * (131072 * 36 + 9175 * 136)


def test_two_bit_top_k_at_128k() -> None:
    """A token of 128 channels has 36 bytes, and a bin of 2 that is written and read; a chosen one has a number of 4."""
    cost = ops.two_bit_top_k(4, 32, 8, 128, 131072, 128, 1920)
    assert cost.read_bytes == 32 * 131072 * (36 + 2)
    assert cost.write_bytes == 32 * (131072 * 2 + 1920 * 4)


SIZES = {"KV_HEADS": 3, "GROUP": 32, "HEAD_DIM": 64, "BITS": 8, "PAGE": 1, "group_capacity": 6, "capacity": 40,
         "splits": 7, "GAMMA": 4}  # fmt: skip
LOGITS = fp32(3, 5, 100), fp32(3, 100)
ATTENTION = {**SIZES, "q": Q, "keys": KV[0], "values": KV[1], "index": int32(2, 3, 9)}


@pytest.mark.parametrize(
    ("module", "kernel", "metadata", "known", "expected"),
    [
        (attention_kernels, "_attention_kernel", "_attention_metadata", ATTENTION,
         ("decode_attention_8bit", 16, ops.split_attention(2, 5, 12, 3, 64, ops.KVRead(192, 40, 8, 2, 32, 7)))),
        (attention_kernels, "_merge_kernel", "_merge_metadata", {**SIZES, "out": Q},
         ("merge", 32, ops.merge(2, 5, 12, 64, 7, 2))),
        (kv_cache_kernels, "_quantize_kernel", "_quantize_metadata",
         {**SIZES, "key_planes": CODES.key_planes, "value_planes": CODES.value_planes, "keys": bf16(2, 3, 64, 64)},
         ("quantize", 16, quantize_cost(bf16(2, 3, 64, 64), 32, 2))),
        (kv_cache_kernels, "_dequantize_kernel", "_dequantize_metadata", {**SIZES, "keys": bf16(2, 3, 192, 64)},
         ("dequantize", 32, dequantize_cost(bf16(2, 3, 192, 64), 32, 2))),
        (sparse_kernels, "_sparse_attention_kernel", "_sparse_attention_metadata", ATTENTION,
         ("sparse_decode_attention_8bit", 16, sparse_attention_cost(Q, 3, int32(2, 3, 9), 1, 40, 8, 32, 7))),
        (sampling_kernels, "_softmax_kernel", "_filter_metadata", {"logits": LOGITS[0]},
         ("filter_logits", 32, filter_cost(LOGITS[0]))),
        (sampling_kernels, "_best_kernel", "_filter_metadata", {"logits": LOGITS[0]},
         ("filter_logits", 32, filter_cost(LOGITS[0]))),
        (sampling_kernels, "_weigh_kernel", "_draw_metadata",
         {**SIZES, "target": LOGITS[:1], "draft": (LOGITS[1:] * 4,)},
         ("draw", 32, draw_cost(LOGITS[1], LOGITS[1]))),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith("kernel") else "",
)  # fmt: skip
def test_launch_metadata_holds_the_cost(
    module: Any, kernel: str, metadata: str, known: dict[str, Any], expected: tuple[str, int, Cost]
) -> None:
    """Arguments go by the kernel's own names, so that a renamed one fails here."""
    args = {name: known.get(name) for name in getattr(module, kernel).arg_names}
    grid = (prod(Q.shape[:3]), 1, 1)
    name, bits, cost = expected
    metadata_of = getattr(module, metadata)(grid, None, args)
    assert metadata_of == {"name": name, f"flops{bits}": cost.flops, "bytes": cost.bytes}
