"""Triton's kernels of selections, sparse attention and scores compile for Hopper without a GPU, within its limits."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

ADA_SHARED_BYTES = 99 * 1024

STRIDES = [f"{x}{axis}_stride" for x in ("key", "value") for axis in ("", "_batch", "_head")]
Q_STRIDES = ["q_batch_stride", "q_query_stride", "q_head_stride"]
SIZES = ["capacity", "group_capacity", "splits", "index_capacity", "sets", "width", "max_k", "parts"]
TYPES = {
    **dict.fromkeys((*STRIDES, *Q_STRIDES, *SIZES), "i32"),
    **dict.fromkeys(("begin", "end", "groups", "index", "count", "pages", "lengths", "k"), "*i32"),
    **dict.fromkeys(("histograms", "counts", "group_index"), "*i32"),
    **dict.fromkeys(("partial", "lse", "scores", "out"), "*fp32"),
    **dict.fromkeys(("key_upper", "value_upper", "key_two_bit", "value_rows"), "*u8"),
    **dict.fromkeys(("key_scale", "key_min", "value_scale", "value_min"), "*fp16"),
    **dict.fromkeys(("q", "keys", "values", "bounds"), "*bf16"),
    "scale": "fp32",
    "mask": "*i1",
}
LOWER = {"key_lower": "*u8", "value_lower": "*u8"}
HEADS = {"KV_HEADS": 8, "RATIO": 4, "GROUP": 128, "HEAD_DIM": 128}


def job(module: str, kernel: str, warps: int, types: dict[str, str], **constants: Any) -> dict[str, Any]:
    return {"module": module, "kernel": kernel, "types": types, "constants": constants, "options": {"num_warps": warps}}


def sparse(bits: int, queries: int, rows: int, value_rows: bool = False, page: int = 1) -> dict[str, Any]:
    constants = {**HEADS, "QUERIES": queries, "BITS": bits, "VALUE_ROWS": value_rows, "PAGE": page, "ROWS": rows}
    types = TYPES | (LOWER if bits == 8 else {})
    return job("sparse_attention.triton", "_sparse_attention_kernel", 4, types, **constants, BLOCK=32)


def selecting(kernel: str, **constants: int) -> dict[str, Any]:
    return job("selection.triton", kernel, 8, TYPES, PASSES=4, BLOCK=2048, CHUNK=8192, **constants)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's wheels are for Linux")
def test_every_sparse_kernel_compiles_for_hopper(
    compiled_for_hopper: Callable[[dict[str, Any]], dict[str, int]],
) -> None:
    jobs = {
        "sparse bf16": sparse(0, 1, 16),
        "sparse int4 rows": sparse(4, 1, 16, value_rows=True),
        "sparse int4 page 16": sparse(4, 1, 16, page=16),
        "sparse int8 8 queries": sparse(8, 8, 32),
        "pages": job("selection.triton", "_page_scores_kernel", 4, TYPES, **HEADS, PADDED=128, BLOCK=32),
        "pack": job("selection.triton", "_pack_kernel", 4, TYPES, **HEADS),
        "two-bit": job("selection.triton", "_two_bit_kernel", 4, TYPES, **HEADS, ROWS=16, GROUPS=2),
        **{f"histogram {i}": selecting("_histogram_kernel", DIGIT=i) for i in range(4)},
        "count": selecting("_count_kernel"),
        "write": selecting("_write_kernel", PROGRAMS=16),
    }
    shared = compiled_for_hopper(jobs)
    assert all(used <= ADA_SHARED_BYTES for used in shared.values()), shared
