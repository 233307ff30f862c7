"""What kernels declare equals what the roofline prices, and reaches Triton's launch hooks."""

import pytest
import torch

from ridgeplan.kernels.attention.cost import (
    attention_cost,
    attention_metadata,
    merge_cost,
    merge_metadata,
    split_attention_cost,
)
from ridgeplan.kernels.attention.triton import _attention_kernel, _merge_kernel
from ridgeplan.kernels.kv_cache.cost import dequantize_cost, dequantize_metadata, quantize_cost, quantize_metadata
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.triton import _dequantize_kernel, _quantize_kernel
from ridgeplan.roofline import ops

SHAPES = pytest.mark.parametrize(
    ("batch", "kv_heads", "q_heads", "head_dim", "group"),
    [(1, 8, 32, 128, 128), (3, 3, 9, 64, 128), (2, 2, 14, 64, 32)],
    ids=["llama", "smollm", "qwen"],
)


@SHAPES
@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention(
    batch: int, kv_heads: int, q_heads: int, head_dim: int, group: int, bits: int, dtype: torch.dtype
) -> None:
    queries, splits, full_tokens = 5, 7, 19
    quantized_tokens = 3 * group if bits else 0
    q = torch.zeros(batch, queries, q_heads, head_dim, dtype=dtype)
    keys = torch.zeros(batch, kv_heads, 40, head_dim, dtype=dtype)
    codes = QuantizedKV.allocate(batch, kv_heads, 4, group, head_dim, "cpu", bits == 8) if bits else None
    declared = attention_cost(q, keys, codes, bits == 8, quantized_tokens, full_tokens, splits)
    assert declared == ops.attention(
        batch,
        queries,
        q_heads,
        kv_heads,
        head_dim,
        quantized_tokens,
        full_tokens,
        bits,
        dtype.itemsize,
        group,
        splits,
    )


def test_upper_codes_of_a_two_plane_cache_cost_one_plane() -> None:
    q, keys = torch.zeros(1, 1, 4, 64), torch.zeros(1, 2, 8, 64)
    both, upper = (QuantizedKV.allocate(1, 2, 2, 64, 64, "cpu", lower) for lower in (True, False))
    assert attention_cost(q, keys, both, False, 128, 8, 1) == attention_cost(q, keys, upper, False, 128, 8, 1)


@SHAPES
def test_merge(batch: int, kv_heads: int, q_heads: int, head_dim: int, group: int) -> None:
    partial = torch.zeros(batch, 5, q_heads, 7, head_dim)
    lse = torch.zeros(batch, 5, q_heads, 7)
    assert merge_cost(partial, lse, 2) == ops.merge(batch, 5, q_heads, head_dim, 7, 2)


def test_attention_costs_what_its_two_kernels_do() -> None:
    """3 queries of 4 heads of 64 in 5 splits: 60 partials of 64 with a log-sum-exp, fp32, pass between the kernels."""
    q, keys = torch.zeros(1, 3, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    arguments = (q, keys, None, False, 0, 8, 5)
    partial = torch.zeros(1, 3, 4, 5, 64)
    merging = merge_cost(partial, partial[..., 0], 2)
    assert split_attention_cost(*arguments).write_bytes == merging.read_bytes == 60 * 65 * 4
    assert split_attention_cost(*arguments) + merging == attention_cost(*arguments)
    assert merging.write_bytes == q.nbytes


@SHAPES
@pytest.mark.parametrize("lower", [False, True], ids=["upper", "both"])
def test_quantize(batch: int, kv_heads: int, q_heads: int, head_dim: int, group: int, lower: bool) -> None:
    keys = torch.zeros(batch, kv_heads, 2 * group, head_dim, dtype=torch.bfloat16)
    out = QuantizedKV.allocate(batch, kv_heads, 9, group, head_dim, "cpu", lower)
    assert quantize_cost(keys, keys, out) == ops.quantize(
        batch, kv_heads, head_dim, 2 * group, 2, group, 2 if lower else 1
    )


@SHAPES
@pytest.mark.parametrize("lower", [False, True], ids=["upper", "both"])
def test_dequantize(batch: int, kv_heads: int, q_heads: int, head_dim: int, group: int, lower: bool) -> None:
    codes = QuantizedKV.allocate(batch, kv_heads, 2, group, head_dim, "cpu", lower=True)
    declared = dequantize_cost(codes, lower, 4)
    quantized = ops.quantize(batch, kv_heads, head_dim, 2 * group, 4, group, 2 if lower else 1)
    assert (declared.read_bytes, declared.write_bytes) == (quantized.write_bytes, quantized.read_bytes)


def test_launch_metadata_reads_the_kernels_own_arguments() -> None:
    """Built from the kernels' argument names, so a renamed argument fails here."""
    codes = QuantizedKV.allocate(1, 2, 3, 32, 64, "cpu", lower=True)
    q, keys = torch.zeros(1, 2, 4, 64), torch.zeros(1, 2, 10, 64)
    known = {**vars(codes), "q": q, "keys": keys, "values": keys, "BITS": 8, "capacity": 10, "splits": 3}
    args = {name: known.get(name) for name in _attention_kernel.arg_names}
    cost = split_attention_cost(q, keys, codes, True, 96, 10, 3)
    assert attention_metadata((1,), None, args) == {
        "name": "decode_attention_8bit",
        "flops32": cost.flops,
        "bytes": cost.bytes,
    }
    tokens = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    known = {**vars(codes), "keys": tokens, "values": tokens}
    args = {name: known.get(name) for name in _quantize_kernel.arg_names}
    cost = quantize_cost(tokens, tokens, codes)
    assert quantize_metadata((1,), None, args) == {
        "name": "quantize",
        "flops16": cost.flops,
        "bytes": cost.bytes,
    }
    known = {"partial": torch.zeros(1, 2, 4, 3, 64), "lse": torch.zeros(1, 2, 4, 3), "out": q}
    args = {name: known.get(name) for name in _merge_kernel.arg_names}
    cost = merge_cost(known["partial"], known["lse"], 4)
    assert merge_metadata((1,), None, args) == {"name": "merge", "flops32": cost.flops, "bytes": cost.bytes}
    known = {**vars(codes), "keys": q, "BITS": 4}
    args = {name: known.get(name) for name in _dequantize_kernel.arg_names}
    cost = dequantize_cost(codes, False, 4)
    assert dequantize_metadata((1,), None, args) == {
        "name": "dequantize",
        "flops32": cost.flops,
        "bytes": cost.bytes,
    }
