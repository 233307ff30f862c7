"""The kernels compile for Hopper (sm_90) on a machine without a GPU, and fit its registers and shared memory.

Those that start early touch no memory before they wait, and no others let the next one start (device/launch.py). The
interpreter accepts programs that the compiler refuses, so CPU runs need this too. Kernels are decorated for either the
interpreter or the compiler when imported, hence the process of its own.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest

HOPPER_SHARED_BYTES = 227 * 1024
ADA_SHARED_BYTES = 99 * 1024

CODES = {f"{x}_{plane}": "*u8" for x in ("key", "value") for plane in ("upper", "lower")}
PAIRS = {f"{x}_{pair}": "*fp16" for x in ("key", "value") for pair in ("scale", "min")}
STRIDES = [f"{x}{axis}_stride" for x in ("key", "value") for axis in ("", "_batch", "_head")]


def attention(element: str, head_dim: int, bits: int, rows: int, summed: str | None = None) -> dict[str, Any]:
    from ridgeplan.kernels.attention.triton import CONFIGS, DEFAULT_CONFIG

    config = DEFAULT_CONFIG if element == "fp32" else CONFIGS[head_dim, bits]
    sizes = ("capacity", "group_capacity", "splits", "width")
    integers = [*STRIDES, "q_batch_stride", "q_query_stride", "q_head_stride", *sizes]
    types = dict.fromkeys(("q", "keys", "values"), "*" + element) | dict.fromkeys(integers, "i32")
    types |= dict.fromkeys(("begin", "end", "groups"), "*i32") | CODES | PAIRS
    types |= {"partial": "*fp32", "lse": "*fp32", "scale": "fp32"}
    absent = [] if bits == 8 else ["key_lower", "value_lower"] if bits == 4 else [*CODES, *PAIRS, "groups"]
    constants = {
        "QUERIES": rows // 4,
        "RATIO": 4,
        "KV_HEADS": 8,
        "GROUP": 128,
        "HEAD_DIM": head_dim,
        "BITS": bits,
        "ROWS": rows,
        "BLOCK": config.block,
        "SUMMED": summed,
        "STEP": rows // 4 - 1,
        **dict.fromkeys(absent),
    }
    types |= {"scores": "*fp32", "score_lse": "*fp32"} if summed else {}
    options = {"num_warps": config.warps * (2 if rows >= 64 else 1), "num_stages": config.stages}
    return job("attention.triton", "_attention_kernel", types, constants, options)


def quantization(element: str, masked: bool) -> dict[str, Any]:
    types = {"keys": "*" + element, "values": "*" + element, "group_index": "*i32", "group_capacity": "i32"}
    types |= {"mask": "*i1", "first_slot": "*i32"} | dict.fromkeys(STRIDES, "i32") | CODES | PAIRS
    absent = [] if masked else ["mask", "first_slot", "key_lower", "value_lower"]
    constants = {"KV_HEADS": 8, "GROUP": 128, "HEAD_DIM": 128, **dict.fromkeys(absent)}
    return job("kv_cache.triton", "_quantize_kernel", types, constants, {"num_warps": 4, "enable_fp_fusion": False})


def shift() -> dict[str, Any]:
    types = {"keys": "*bf16", "values": "*bf16", "mask": "*i1", "capacity": "i32"} | dict.fromkeys(STRIDES, "i32")
    constants = {"KV_HEADS": 8, "GROUP": 128, "BLOCK": 64, "HEAD_DIM": 128, "PADDED": 128}
    return job("kv_cache.triton", "_shift_kernel", types, constants, {"num_warps": 4})


def norm(updated: bool) -> dict[str, Any]:
    types = dict.fromkeys(("hidden", "update", "weight", "total", "normed"), "*bf16") | {"eps": "fp32"}
    constants: dict[str, Any] = {"HIDDEN": 5120, "BLOCK": 8192, "PARTS": 8 if updated else 0, "PDL": True}
    constants |= {} if updated else {"update": None}
    return job("layer.triton", "_add_rms_norm_kernel", types, constants, {"num_warps": 16})


def swiglu() -> dict[str, Any]:
    types = dict.fromkeys(("gate_up", "out"), "*bf16")
    return job("layer.triton", "_swiglu_kernel", types, {"WIDTH": 14336, "BLOCK": 1024, "PDL": True}, {"num_warps": 4})


def rope(head_dim: int, normed: bool) -> dict[str, Any]:
    types = dict.fromkeys(("qkv", "weight", "queries", "keys", "values"), "*bf16") | dict.fromkeys(STRIDES, "i64")
    types |= {"cos": "*fp32", "sin": "*fp32", "slots": "*i64", "eps": "fp32", "tokens": "i32", "capacity": "i32"}
    constants = {"Q_HEADS": 14, "KV_HEADS": 2, "HEAD_DIM": head_dim, "HEADS": 8, "HALF_PADDED": 64, "PDL": True}
    constants |= {} if normed else {"weight": None}
    return job("layer.triton", "_rope_append_kernel", types, constants, {"num_warps": 4})


def tables() -> dict[str, Any]:
    types = dict.fromkeys(("frequencies", "cos", "sin"), "*fp32")
    types |= {"positions": "*i64", "scale": "fp32", "angles": "i32"}
    return job("layer.triton", "_tables_kernel", types, {"HALF": 64, "BLOCK": 128, "PDL": True}, {"num_warps": 4})


def dequantization(bits: int) -> dict[str, Any]:
    types = {"keys": "*bf16", "values": "*bf16"} | CODES | PAIRS
    absent = [] if bits == 8 else ["key_lower", "value_lower"]
    constants = {"GROUP": 128, "HEAD_DIM": 128, "BITS": bits, **dict.fromkeys(absent)}
    return job("kv_cache.triton", "_dequantize_kernel", types, constants, {"num_warps": 8})


def merging() -> dict[str, Any]:
    types = {"partial": "*fp32", "lse": "*fp32", "out": "*bf16", "splits": "i32"}
    constants = {"HEAD_DIM": 128, "CHUNK": 16}
    return job("attention.triton", "_merge_kernel", types, constants, {"num_warps": 2})


def quantized_product(bits: int, element: str, config_name: str) -> dict[str, Any]:
    from ridgeplan.kernels.linear import triton as kernels

    config = getattr(kernels, config_name)
    types = dict.fromkeys(("x", "bias"), "*" + element) | {"packed": "*i32", "lower": "*i32", "out": "*fp32"}
    types |= dict.fromkeys(("rows", "inputs", "outputs", "output_tiles"), "i32")
    constants = {"GROUP": 128, "CHUNK": 64, "TILES": config.tiles, "ROWS": config.rows, "SPLITS": config.max_splits}
    constants |= {} if bits == 8 else {"lower": None}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return job("linear.triton", "_product_kernel", types, constants, options)


def split_sum() -> dict[str, Any]:
    types = {"partial": "*fp32", "bias": "*bf16", "out": "*bf16", "total": "i32", "outputs": "i32"}
    return job("linear.triton", "_sum_kernel", types, {"SPLITS": 16, "BLOCK": 512}, {"num_warps": 4})


def dense_copy(bits: int) -> dict[str, Any]:
    types = {"packed": "*i32", "lower": "*i32", "out": "*bf16"}
    types |= dict.fromkeys(("first_tile", "inputs", "outputs", "output_tiles"), "i32")
    constants = {"GROUP": 128, "CHUNK": 64, "TILES": 4} | ({} if bits == 8 else {"lower": None})
    return job("linear.triton", "_copy_kernel", types, constants, {"num_warps": 4})


def gptq_round(bounded: bool) -> dict[str, Any]:
    types = dict.fromkeys(("steps", "feedback", "near", "codes", "errors"), "*fp32") | {"outputs": "i32"}
    constants = {"TOP": 15, "GROUP": 128, "PADDED": 128, "OUTPUTS": 16} | ({} if bounded else {"near": None})
    return job("linear.triton", "_round_kernel", types, constants, {"num_warps": 4})


def job(
    module: str, kernel: str, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]
) -> dict[str, Any]:
    typed = {name: kind for name, kind in types.items() if name not in constants}
    return {"module": module, "kernel": kernel, "types": typed, "constants": constants, "options": options}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's wheels are for Linux")
def test_every_kernel_compiles_for_hopper(compiled_for_hopper: Callable[[dict[str, Any]], dict[str, int]]) -> None:
    jobs = {
        f"attention {e} d{d} {bits}bit {rows} rows": attention(e, d, bits, rows)
        for e, d, bits, rows in [
            ("bf16", 128, 0, 16),
            ("bf16", 128, 4, 16),
            ("bf16", 128, 8, 32),
            ("bf16", 64, 4, 64),
            ("bf16", 128, 0, 128),
            ("fp32", 64, 8, 16),
        ]
    }
    jobs |= {
        f"attention with {summed} {bits}bit": attention("bf16", 128, bits, 32, summed)
        for bits, summed in ((0, "logits"), (8, "probabilities"))
    }
    jobs |= {"quantize": quantization("bf16", True), "quantize upper": quantization("fp32", False)}
    jobs |= {"dequantize": dequantization(8), "merge": merging(), "shift": shift(), "swiglu": swiglu()}
    jobs |= {"norm": norm(False), "add norm": norm(True), "tables": tables()}
    jobs |= {"rope": rope(128, False), "rope with norms": rope(96, True)}
    jobs |= {
        f"int{bits} linear {name}": quantized_product(bits, element, name)
        for bits in (4, 8)
        for element, name in (("bf16", "FEW_ROWS"), ("fp16", "MANY_ROWS"), ("fp32", "FLOAT32"))
    }
    jobs |= {"split sum": split_sum()}
    jobs |= {f"int{bits} weight copy": dense_copy(bits) for bits in (4, 8)}
    jobs |= {"gptq round": gptq_round(False), "bounded gptq round": gptq_round(True)}
    shared = compiled_for_hopper(jobs)
    for name, used in shared.items():
        wide = "128 rows" in name or "64 rows" in name
        assert used <= (HOPPER_SHARED_BYTES if wide else ADA_SHARED_BYTES), name
