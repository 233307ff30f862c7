"""The kernels compile for Hopper (sm_90) on a machine without a GPU, and fit its registers and shared memory.

Those that start early touch no memory before they wait, and no others let the next one start (device/cuda.py). The
interpreter accepts programs that the compiler refuses, so CPU runs need this too. Kernels are decorated for either the
interpreter or the compiler when imported, hence the process of its own.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest

HOPPER_SHARED_BYTES = 227 * 1024
ADA_SHARED_BYTES = 99 * 1024

WARPS2 = {"num_warps": 2}
STRIDES = {"key_strides": ["i32"] * 3, "value_strides": ["i32"] * 3}


def planes(bits: int) -> dict[str, list[str]]:
    """Types of quantized keys and values: 4-bit codes lack the lower plane; 0 bits are no codes at all."""
    types = ["*u8", "*u8" if bits == 8 else "constexpr", "*fp16", "*fp16"] if bits else ["constexpr"] * 4
    return {"key_planes": types, "value_planes": types}


def attention(
    element: str, head_dim: int, bits: int, rows: int, summed: str | None = None, each: bool = False
) -> dict[str, Any]:
    from ridgeplan.kernels.attention.triton import CONFIGS, DEFAULT_CONFIG, WIDE_CONFIG

    config = DEFAULT_CONFIG if element == "fp32" else CONFIGS.get((head_dim, bits), WIDE_CONFIG)
    sizes = ("capacity", "group_capacity", "splits", "score_rows", "width", "page_stride")
    types = {**dict.fromkeys(("q", "keys", "values"), "*" + element), **dict.fromkeys(sizes, "i32")}
    types |= {"q_strides": ["i32"] * 3, **STRIDES, **planes(bits), **dict.fromkeys(("begin", "end", "groups"), "*i32")}
    types |= {"partial": "*fp32", "lse": "*fp32", "scale": "fp32"}
    constants = {
        "QUERIES": rows // 4,
        "RATIO": 4,
        "KV_HEADS": 8,
        "GROUP": 128,
        "PART": min(64, config.part),
        "HEAD_DIM": head_dim,
        "BITS": bits,
        "ROWS": min(rows, config.rows),
        "BLOCK": config.block,
        "SUMMED": summed,
        "STEP": 1 if each else rows // 4 - 1,
        "EACH": rows // 4 if each else 0,
        "SOFT_CAP": 0.0,
        **({} if bits else {"groups": None}),
    }
    types |= {"scores": "*fp32", "score_lse": "*fp32"} if summed else {}
    options = {"num_warps": config.warps * (2 if min(rows, config.rows) >= 64 else 1), "num_stages": config.stages}
    return job("attention.triton", "_attention_kernel", types, constants, options)


def capped_attention() -> dict[str, Any]:
    """As of Gemma: heads of 256 channels, a soft cap, and a window of several queries."""
    plain = attention("bf16", 256, 0, 16)
    types, constants = {**plain["types"], "window": "i32"}, {**plain["constants"], "SOFT_CAP": 50.0}
    return {**plain, "types": types, "constants": constants}


def paged_attention() -> dict[str, Any]:
    paged = attention("bf16", 128, 8, 16)
    return {**paged, "types": {**paged["types"], "pages": "*i32", "buffers": "*i32"}}


def quantization(element: str, masked: bool, head_dim: int = 128) -> dict[str, Any]:
    types = {"keys": "*" + element, "values": "*" + element, "group_index": "*i32", "group_capacity": "i32"}
    types |= {"mask": "*i1", "first_slot": "*i32", **STRIDES, **planes(8 if masked else 4)}
    absent = [] if masked else ["mask", "first_slot"]
    constants = {"KV_HEADS": 8, "GROUP": 128, "HEAD_DIM": head_dim, "PAGED": not masked, **dict.fromkeys(absent)}
    options = {"num_warps": head_dim // 32, "enable_fp_fusion": False}
    return job("kv_cache.triton", "_quantize_kernel", types, constants, options)


def append() -> dict[str, Any]:
    types = {**dict.fromkeys(("keys", "values", "key_store", "value_store"), "*bf16"), **planes(8), "num_pages": "i32"}
    types |= {"slots": "*i32", "pages": "*i32", "key_strides": ["i32"] * 2, "value_strides": ["i32"] * 2}
    constants = {"KV_HEADS": 8, "CAPACITY": 160, "GROUP": 128, "HEAD_DIM": 128}
    return job("kv_cache.triton", "_append_kernel", types, constants, {"num_warps": 4, "enable_fp_fusion": False})


def shift() -> dict[str, Any]:
    types = {"keys": "*bf16", "values": "*bf16", "mask": "*i1", "capacity": "i32", **STRIDES}
    constants = {"KV_HEADS": 8, "GROUP": 128, "BLOCK": 64, "HEAD_DIM": 128, "PADDED": 128}
    return job("kv_cache.triton", "_shift_kernel", types, constants, {"num_warps": 4})


def norm(updated: bool) -> dict[str, Any]:
    types = dict.fromkeys(("hidden", "update", "weight", "total", "normed"), "*bf16") | {"eps": "fp32"}
    constants: dict[str, Any] = {"HIDDEN": 5120, "BLOCK": 8192, "PARTS": 8 if updated else 0, "PDL": True}
    constants |= {} if updated else {"update": None}
    return job("layer.triton", "_add_rms_norm_kernel", types, constants, {"num_warps": 16})


def swiglu() -> dict[str, Any]:
    types = dict.fromkeys(("gate_up", "out"), "*bf16")
    constants = {"WIDTH": 14336, "BLOCK": 1024, "ACTIVATION": "gelu_tanh", "PDL": True}
    return job("layer.triton", "_swiglu_kernel", types, constants, {"num_warps": 4})


def rope(head_dim: int, normed: bool) -> dict[str, Any]:
    types = dict.fromkeys(("qkv", "weight", "queries", "keys", "values"), "*bf16") | {
        key: ["i64"] * 3 for key in STRIDES
    }
    types |= {"cos": "*fp32", "sin": "*fp32", "slots": "*i64", "eps": "fp32", "tokens": "i32", "capacity": "i32"}
    constants = {"Q_HEADS": 14, "KV_HEADS": 2, "HEAD_DIM": head_dim, "HEADS": 8, "HALF_PADDED": 64, "PDL": True}
    constants |= {} if normed else {"weight": None}
    return job("layer.triton", "_rope_append_kernel", types, constants, {"num_warps": 4})


def tables() -> dict[str, Any]:
    types = dict.fromkeys(("frequencies", "cos", "sin"), "*fp32")
    types |= {"positions": "*i64", "scale": "fp32", "angles": "i32"}
    return job("layer.triton", "_tables_kernel", types, {"HALF": 64, "BLOCK": 128, "PDL": True}, {"num_warps": 4})


def delta_step() -> dict[str, Any]:
    types = dict.fromkeys(("projected", "ring", "taps", "out"), "*bf16") | {"positions": "*i64", "eps": "fp32"}
    types |= dict.fromkeys(("state", "log_decay", "step_bias"), "*fp32")
    types |= dict.fromkeys(("committed", "accepted"), "*i32") | {"tokens": "i32", "stride": "i32"}
    constants = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128, "TAPS": 4, "RING": 13}
    constants |= {"KEYS": 128, "BLOCK": 16, "STEP_LIMIT": 1, "PDL": True}
    return job("state.triton", "_delta_step_kernel", types, constants, WARPS2)


def delta_chunks(kernel: str, stages: int = 1) -> dict[str, Any]:
    types = dict.fromkeys(("projected", "earlier", "taps", "mixed", "steering", "out"), "*bf16")
    types |= dict.fromkeys(("log_decay", "step_bias", "memory", "state"), "*fp32") | {"eps": "fp32"}
    types |= dict.fromkeys(("tokens", "stride", "chunks"), "i32") | {"parts": ["*bf16"] * 3 + ["*fp32"] * 3}
    constants = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128, "PADDED": 128, "STEP_LIMIT": 1}
    constants |= {"CHANNELS": 8192, "WIDTH": 8256, "TAPS": 4, "ROWS": 16, "STAGES": stages}
    constants |= {"BLOCK": 128 if kernel == "_convolution_kernel" else 32}
    return job("state.chunks_triton", kernel, types, constants, {"num_warps": 4})


def gated_norm() -> dict[str, Any]:
    types = dict.fromkeys(("x", "gate", "weight", "out"), "*bf16") | {"eps": "fp32", "heads": "i32", "stride": "i32"}
    constants = {"HEADS": 32, "DIM": 128, "PADDED": 128, "TOGETHER": 4, "PDL": True}
    return job("state.triton", "_gated_norm_kernel", types, constants, WARPS2)


def dequantization(bits: int) -> dict[str, Any]:
    types = {"keys": "*bf16", "values": "*bf16", **planes(bits)}
    constants = {"GROUP": 128, "HEAD_DIM": 128, "BITS": bits}
    return job("kv_cache.triton", "_dequantize_kernel", types, constants, {"num_warps": 8})


def merging() -> dict[str, Any]:
    types = {"partial": "*fp32", "lse": "*fp32", "out": "*bf16", "sinks": "*fp32", "splits": "i32"}
    constants = {"HEADS": 32, "HEAD_DIM": 128, "CHUNK": 16}
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


def integer_product(bits: int, rows: int) -> dict[str, Any]:
    from ridgeplan.kernels.linear.triton import INTEGERS as config

    types = {"planes": "*i8", "sums": "*i32", **dict.fromkeys(("scales", "out"), "*fp32"), "bias": "*bf16"}
    types |= dict.fromkeys(("packed", "lower"), "*i32")
    types |= dict.fromkeys(("rows", "inputs", "outputs", "output_tiles"), "i32")
    constants = {"GROUP": 128, "CHUNK": 64, "TILES": config.tiles, "ROWS": rows, "SPLITS": config.max_splits}
    constants |= {} if bits == 8 else {"lower": None}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return job("linear.triton", "_integer_kernel", types, constants, options)


def quantized_rows() -> dict[str, Any]:
    types = {"x": "*bf16", "planes": "*i8", "scales": "*fp32", "sums": "*i32", "rows": "i32", "inputs": "i32"}
    return job("linear.triton", "_planes_kernel", types, {"GROUP": 128, "CHUNK": 64}, {"num_warps": 1})


def split_sum() -> dict[str, Any]:
    types = {"partial": "*fp32", "bias": "*bf16", "out": "*bf16", "total": "i32", "outputs": "i32"}
    return job("linear.triton", "_sum_kernel", types, {"SPLITS": 16, "BLOCK": 512}, {"num_warps": 4})


def dense_copy(bits: int) -> dict[str, Any]:
    types = {"packed": "*i32", "lower": "*i32", "out": "*bf16"}
    types |= dict.fromkeys(("first_tile", "inputs", "outputs", "output_tiles"), "i32")
    constants = {"GROUP": 128, "CHUNK": 64, "TILES": 4} | ({} if bits == 8 else {"lower": None})
    return job("linear.triton", "_copy_kernel", types, constants, {"num_warps": 4})


def stored(kind: int, element: str, rows: int = 16) -> dict[str, Any]:
    """A product with a weight in one of GGUF's types, or with 0 rows a copy of rows of it."""
    from ridgeplan.kernels.linear import gguf_triton as kernels
    from ridgeplan.roofline.catalog.gguf_types import BLOCK_FORMATS

    described = BLOCK_FORMATS[kind]
    factors = "*i8" if described.nested else "*fp16"
    parts = {"codes": "*i8" if described.bits == 8 else "*i32", "scales": factors}
    parts |= {"high": {5: "*u8", 6: "*i16"}[described.bits]} if described.bits in (5, 6) else {}
    parts |= {"minima": factors} if described.has_minima else {}
    supers = ("super_scales", "super_minima")[: 1 + described.has_minima] if described.nested else ()
    parts |= dict.fromkeys(supers, "*fp16")
    names = ("high", "minima", "super_scales", "super_minima")
    constants: dict[str, Any] = {"BITS": described.bits, "GROUP": described.group, "OFFSET": described.offset}
    constants |= {"CHUNK": kernels.CHUNK, **{name: None for name in names if name not in parts}}
    if not rows:
        types = {**parts, "ids": "*i64", "out": "*" + element, **dict.fromkeys(("first", "count", "inputs"), "i32")}
        options = {"num_warps": 4}
        return job("linear.gguf_triton", "_copy_kernel", types, constants | {"OUTPUTS": kernels.COPY_OUTPUTS}, options)
    config = kernels.FEW_ROWS if rows <= 16 else kernels.MANY_ROWS
    types = {**parts, **dict.fromkeys(("x", "bias"), "*" + element), "out": "*fp32"}
    types |= dict.fromkeys(("rows", "inputs", "outputs"), "i32")
    constants |= {"OUTPUTS": 16 * config.tiles, "ROWS": config.rows, "SPLITS": config.max_splits}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return job("linear.gguf_triton", "_product_kernel", types, constants, options)


def gptq_round(bounded: bool) -> dict[str, Any]:
    types = dict.fromkeys(("steps", "feedback", "near", "codes", "errors"), "*fp32") | {"outputs": "i32"}
    constants = {"TOP": 15, "GROUP": 128, "PADDED": 128, "OUTPUTS": 16} | ({} if bounded else {"near": None})
    return job("linear.triton", "_round_kernel", types, constants, {"num_warps": 4})


def routed_experts(bits: int, gated: bool, config_name: str, mxfp4: bool = False) -> dict[str, Any]:
    from ridgeplan.kernels.experts import triton as kernels

    config, split = getattr(kernels, config_name), config_name.endswith("SPLIT")
    types = dict.fromkeys(("x", "bias", "out"), "*bf16") | ({"out": "*fp32"} if split else {})
    types |= dict.fromkeys(("weight", "lower"), "*i32")
    types |= {"weight": "*bf16"} if bits == 16 else {}
    types |= dict.fromkeys(("block_experts", "block_pairs"), "*i32")
    types |= dict.fromkeys(("pairs", "inputs", "tiles_per_expert"), "i32")
    types |= dict.fromkeys(("alpha", "limit", "offset"), "fp32")
    constants = {"PER_ROW": 8 if gated else 1, "GATED": gated, "GROUP": 0 if bits == 16 else 128, "CHUNK": 64}
    constants |= {"TILES": config.tiles, "ROWS": 64 if config_name == "MANY_ROWS" else 16, "SPLITS": 8 if split else 1}
    constants |= {"MXFP4": mxfp4} | ({} if bits == 8 or mxfp4 else {"lower": None})
    if mxfp4:
        types, constants = types | {"weight": "*i32", "lower": "*u8"}, constants | {"GROUP": 32, "CHUNK": 128}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return job("experts.triton", "_experts_kernel", types, constants, options)


def routing_jobs(every: bool) -> dict[str, dict[str, Any]]:
    """The choice of experts, blocks of pairs by expert, the weighted sum of experts, and products."""
    route = {"logits": "*fp32", "bias": "*fp32", "chosen": "*i64", "weights": "*fp32", "experts": "i32"}
    route |= {"scale": "fp32", "min_sum": "fp32"}
    chosen = {"PER_TOKEN": 8, "SLOTS": 8, "EXPERTS": 256, "SIGMOID": True, "NORMALIZED": True, "PDL": True}
    blocks = {"ids": "*i64", "block_experts": "*i32", "block_pairs": "*i32", "pairs": "i32", "experts": "i32"}
    summed = {**dict.fromkeys(("parts", "addend", "out"), "*bf16"), "weights": "*fp32"}
    summed |= dict.fromkeys(("pairs", "width"), "i32")
    counted = {"EXPERTS": 128, "ROWS": 8, "STEP": 64, "PDL": True}
    added = {"PER_ROW": 8, "SPLITS": 1, "PARTS": 8, "BLOCK": 512, "PDL": True}
    split = {"parts": "*fp32", "out": "*bf16", "pairs": "i32"} | dict.fromkeys(("alpha", "limit", "offset"), "fp32")
    activated = {"WIDTH": 768, "SPLITS": 16, "BLOCK": 64}
    biased = split | {"parts": "*bf16", "bias": "*bf16", "ids": "*i16"}
    copied = {"codes": "*u8", "scales": "*u8", "out": "*bf16"} | dict.fromkeys(("first", "rows", "inputs"), "i32")
    jobs = {
        "route": job("experts.triton", "_route_kernel", route, chosen, {"num_warps": 1}),
        "blocks": job("experts.triton", "_blocks_kernel", blocks, counted, {"num_warps": 4}),
        "expert sum": job("experts.triton", "_sum_kernel", summed, added, {"num_warps": 4}),
        "sorted expert sum": job("experts.triton", "_sum_kernel", summed | {"places": "*i64"}, added, {"num_warps": 4}),
        "expert sum of splits": job(
            "experts.triton",
            "_sum_kernel",
            summed | {"parts": "*fp32"},
            {"PER_ROW": 10, "SPLITS": 16, "PARTS": 256, "BLOCK": 64},
            {"num_warps": 4},
        ),
        "expert activation": job("experts.triton", "_activation_kernel", split, activated, {"num_warps": 4}),
        "expert activation with biases": job(
            "experts.triton",
            "_activation_kernel",
            biased,
            {"WIDTH": 2880, "SPLITS": 1, "BLOCK": 1024},
            {"num_warps": 4},
        ),
        "MXFP4 weight copy": job(
            "experts.triton", "_mxfp4_copy_kernel", copied, {"CHUNK": 256, "OUTPUTS": 16}, {"num_warps": 4}
        ),
    }
    variants = [(16, True, "FEW_ROWS"), (4, False, "INT4_SPLIT"), (8, False, "MANY_ROWS")]
    variants += [(4, True, "FEW_ROWS"), (8, False, "FEW_ROWS_SPLIT")] if every else []
    mxfp4 = (True, False) if every else (True,)
    jobs |= {f"MXFP4 experts {gated}": routed_experts(4, gated, "FEW_ROWS", True) for gated in mxfp4}
    return jobs | {f"int{bits} experts {name}": routed_experts(bits, gated, name) for bits, gated, name in variants}


def latent_attention(bits: int, heads: int) -> dict[str, Any]:
    """DeepSeek's rows, of V2-Lite's 16 heads or of V3's 128, with one query; `bits` of the latents' codes."""
    types = dict.fromkeys(("q", "latents", "rotated"), "*bf16") | dict.fromkeys(("begin", "end", "groups"), "*i32")
    types |= {**dict.fromkeys(("partial", "lse"), "*fp32"), "scale": "fp32", "planes": planes(bits)["key_planes"]}
    types |= dict.fromkeys(("splits", "latent_stride", "rotated_stride", "group_capacity"), "i32")
    constants = {"QUERIES": 1, "HEADS": heads, "LATENT": 512, "ROPE": 64, "ROPES": 64, "ROWS": 16, "BLOCK": 32}
    constants |= {"GROUP": 128, "WIDTH": 128, "BITS": bits} if bits else {"GROUP": 32, "WIDTH": 512, "BITS": 0}
    constants |= {} if bits else {"groups": None}
    return job("latent.triton", "_latent_attention_kernel", types, constants, {"num_warps": 4, "num_stages": 2})


def rotate_append() -> dict[str, Any]:
    """DeepSeek's rows with 16 heads, of which 3 tokens are appended."""
    types = dict.fromkeys(("queries", "latents", "norm", "stored", "rotated", "absorbed"), "*bf16")
    types |= {"cos": "*fp32", "sin": "*fp32", "eps": "fp32", "slots": "*i64", "positions": "*i64"}
    sizes = ("query_stride", "latent_stride", "stored_stride", "rotated_stride", "tokens", "capacity")
    types |= dict.fromkeys((*sizes, "rotated_capacity"), "i32")
    constants = {"HEADS": 16, "PLAIN": 128, "LATENT": 512, "LATENTS": 512, "HALF": 32, "HALVES": 32, "BLOCK": 8}
    return job("latent.triton", "_rotate_append_kernel", types, constants | {"PDL": True}, {"num_warps": 4})


def job(
    module: str, kernel: str, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]
) -> dict[str, Any]:
    typed = {name: kind for name, kind in types.items() if name not in constants}
    return {"module": module, "kernel": kernel, "types": typed, "constants": constants, "options": options}


def dense_jobs(every: bool) -> dict[str, dict[str, Any]]:
    """Attention, the KV cache, layers and products; with `every`, each configuration of each of them."""
    variants = [("bf16", 128, 4, 16), ("bf16", 128, 0, 128)]
    more_variants = [("fp32", 64, 8, 16), ("bf16", 128, 0, 16), ("bf16", 128, 8, 32), ("bf16", 64, 4, 64)]
    summed = [(8, "probabilities"), (0, "logits")] if every else [(0, "logits")]
    products = [(4, "bf16", "FEW_ROWS"), (8, "fp16", "MANY_ROWS"), (4, "fp32", "FLOAT32")]
    more_products = [(8, "bf16", "FEW_ROWS"), (4, "fp16", "MANY_ROWS"), (8, "fp32", "FLOAT32")]
    jobs = {
        f"attention {e} d{d} {bits}bit {rows} rows": attention(e, d, bits, rows)
        for e, d, bits, rows in variants + (more_variants if every else [])
    }
    jobs |= {f"attention with {scores} {bits}bit": attention("bf16", 128, bits, 32, scores) for bits, scores in summed}
    jobs |= {"capped attention": capped_attention(), "paged attention": paged_attention(), "append": append()}
    jobs["attention with probabilities of each query"] = attention("bf16", 128, 0, 16, "probabilities", each=True)
    jobs |= {"quantize": quantization("bf16", True), "quantize upper": quantization("fp32", False)}
    # Heads of 512 channels (Gemma 4). Codes take tiles of 16 rows at most.
    wide = {
        f"attention d512 {bits}bit 64 rows": attention("bf16", 512, bits, 64) for bits in ((0, 4, 8) if every else (0,))
    }
    jobs |= {**wide, **({"quantize d512": quantization("bf16", True, 512)} if every else {})}
    jobs |= {"dequantize": dequantization(8), "merge": merging(), "shift": shift(), "swiglu": swiglu()}
    jobs |= {"norm": norm(False), "add norm": norm(True), "tables": tables()}
    jobs |= {f"{name} chunks": delta_chunks(f"_{name}_chunks_kernel") for name in ("within", "across")}
    jobs["convolution of chunks"] = delta_chunks("_convolution_kernel")
    jobs["across staged chunks of 64 rows"] = delta_chunks("_across_chunks_kernel", stages=3)
    jobs |= {"delta step": delta_step(), "gated norm": gated_norm()}
    jobs |= {"rope": rope(128, False), "rope with norms": rope(96, True)}
    jobs |= {
        f"int{bits} linear {name}": quantized_product(bits, element, name)
        for bits, element, name in products + (more_products if every else [])
    }
    jobs |= {"split sum": split_sum(), "quantized rows": quantized_rows(), **routing_jobs(every)}
    integers = [(4, 8), (8, 16)] if every else [(4, 8)]
    jobs |= {f"int{bits} linear of bytes, {rows} rows": integer_product(bits, rows) for bits, rows in integers}
    latent = (0, 4, 8) if every else (0, 8)
    jobs |= {f"latent attention {bits}bit": latent_attention(bits, 128 if bits == 8 else 16) for bits in latent}
    jobs["latent append"] = rotate_append()
    jobs |= {f"int{bits} weight copy": dense_copy(bits) for bits in (4, 8)}
    kinds: tuple[tuple[int, str, int], ...] = (
        (12, "bf16", 1),
        (14, "bf16", 64),
        (6, "fp32", 1),
        (8, "bf16", 0),
    )  # Q4_K, Q6_K, Q5_0, Q8_0
    if every:
        kinds = tuple((kind, "bf16", rows) for kind in (2, 3, 6, 7, 8, 12, 13, 14) for rows in (0, 1, 64))
    jobs |= {f"gguf {kind} {rows} rows {element}": stored(kind, element, rows) for kind, element, rows in kinds}
    return jobs | {"gptq round": gptq_round(False), "bounded gptq round": gptq_round(True)}


# Selections, sparse attention and scores.

SIZES = ["capacity", "group_capacity", "slot_capacity", "splits", "index_capacity", "sets", "width", "max_k", "parts"]
TYPES = {
    **dict.fromkeys((*SIZES, "q_batch_stride", "q_head_stride"), "i32"),
    **dict.fromkeys(("begin", "end", "groups", "index", "slots_of", "count", "pages", "lengths", "k"), "*i32"),
    **dict.fromkeys(("histograms", "counts", "group_index"), "*i32"),
    **dict.fromkeys(("partial", "lse", "scores", "out"), "*fp32"),
    **dict.fromkeys(("key_upper", "value_upper", "key_two_bit", "value_rows"), "*u8"),
    **dict.fromkeys(("key_scale", "key_min", "value_scale", "value_min"), "*fp16"),
    **dict.fromkeys(("q", "keys", "values", "bounds"), "*bf16"),
    "scale": "fp32",
    "mask": "*i1",
}
HEADS = {"KV_HEADS": 8, "RATIO": 4, "GROUP": 128, "HEAD_DIM": 128}
HEAD_TYPES = {
    **dict.fromkeys(("q", "keys"), "*bf16"),
    **dict.fromkeys(("logits", "lse", "scores"), "*fp32"),
    **dict.fromkeys(("slots", "chunks"), "i32"),
    "lengths": "*i32",
    "scale": "fp32",
}


def sparse_job(module: str, kernel: str, warps: int, types: dict[str, str], **constants: Any) -> dict[str, Any]:
    return {"module": module, "kernel": kernel, "types": types, "constants": constants, "options": {"num_warps": warps}}


def sparse(
    bits: int, queries: int, rows: int, value_rows: bool = False, page: int = 1, slot_bytes: int = 0
) -> dict[str, Any]:
    constants = {**HEADS, "QUERIES": queries, "BITS": bits, "VALUE_ROWS": value_rows, "PAGE": page, "ROWS": rows}
    constants |= {"SLOT_BYTES": slot_bytes} | ({} if slot_bytes else {"slots_of": None})
    types = TYPES | {"q_strides": ["i32"] * 3, **STRIDES, **planes(bits)}
    return sparse_job("sparse_attention.triton", "_sparse_attention_kernel", 4, types, **constants, BLOCK=32)


def selecting(kernel: str, **constants: int) -> dict[str, Any]:
    return sparse_job("selection.triton", kernel, 8, TYPES, PASSES=4, BLOCK=2048, CHUNK=8192, **constants)


def sparse_jobs(every: bool) -> dict[str, dict[str, Any]]:
    """Selections, sparse attention and scores."""
    more = {"sparse int4 rows": sparse(4, 1, 16, value_rows=True), "sparse int8 8 queries": sparse(8, 8, 32)}
    return (more if every else {}) | {
        "sparse bf16": sparse(0, 1, 16),
        "sparse int4 page 16": sparse(4, 1, 16, page=16),
        "sparse int8 in slots": sparse(8, 1, 16, value_rows=True, slot_bytes=144),
        "pages": sparse_job("selection.triton", "_page_scores_kernel", 4, TYPES, **HEADS, PADDED=128, BLOCK=32),
        "head logits": sparse_job(
            "selection.triton", "_head_logits_kernel", 4, HEAD_TYPES, **HEADS, PADDED=128, ROWS=16, BLOCK=64, CHUNK=512
        ),
        "head scores": sparse_job(
            "selection.triton",
            "_head_scores_kernel",
            4,
            HEAD_TYPES,
            GROUPS=8,
            HEADS=4,
            CHUNKS=128,
            CHUNK=512,
            BLOCK=1024,
        ),
        "pack": sparse_job("selection.triton", "_pack_kernel", 4, TYPES, **HEADS),
        "two-bit": sparse_job("selection.triton", "_two_bit_kernel", 4, TYPES, **HEADS, ROWS=16, GROUPS=2),
        **{f"histogram {i}": selecting("_histogram_kernel", DIGIT=i) for i in (range(4) if every else (0, 3))},
        "count": selecting("_count_kernel"),
        "write": selecting("_write_kernel", PROGRAMS=16),
    }


# KV on the host.

INDEXES = ["slot_of", "unit_of", "used", "step", "index", "count", "into"]
OUT = [f"out_{name}" for name in ("slots", "units", "into", "count")]
SLOTS = dict.fromkeys((*INDEXES, *OUT), "*i32") | dict.fromkeys(("units", "slots", "width"), "i32")
SLOTS |= dict.fromkeys(("requested", "loaded"), "*i64")
GATHER = dict.fromkeys(("units", "into", "count"), "*i32") | dict.fromkeys(("width", "rows"), "i32")
GATHER |= dict.fromkeys(("keys", "values", "slot_keys", "slot_values"), "*bf16")
GATHER |= {"strides": ["i32"] * 3, "slot_strides": ["i32"] * 3}
STORE = {"recent": "*bf16", "out": "*bf16", "first": "*i32", "mask": "*i1"}
STORE |= {"strides": ["i32"] * 3, "out_strides": ["i32"] * 3}
ROWS = dict.fromkeys(("key_upper", "key_lower", "value_upper", "value_lower", "out_keys", "out_values"), "*u8")
ROWS |= dict.fromkeys(("value_scale", "value_min", "out_pairs"), "*fp16")
ROWS |= {"first": "*i32", "mask": "*i1", "strides": ["i64"] * 3}
COPY = {"source": "*i32", "out": "*i32", "count": "*i32", "source_entries": "i32", "out_entries": "i32"}


def offload_job(kernel: str, warps: int, types: dict[str, str], **constants: Any) -> dict[str, Any]:
    return {
        "module": "offload.triton",
        "kernel": kernel,
        "types": types,
        "constants": constants,
        "options": {"num_warps": warps},
    }


def offload_jobs(every: bool) -> dict[str, dict[str, Any]]:
    """KV on the host."""
    gather = {"KV_HEADS": 8, "PARTS": 9, "TURNS": 2, "ROWS": 16, "HEAD_DIM": 128, "PADDED": 128}
    store = {name: value for name, value in gather.items() if name not in ("PARTS", "TURNS", "ROWS")}
    jobs = {
        "group store": offload_job("_flush_to_host_kernel", 4, STORE, GROUP=128, BLOCK=32, **store),
        "codes store": offload_job(
            "_flush_codes_kernel", 4, ROWS, KV_HEADS=8, GROUP=128, HEAD_DIM=128, HALF_PADDED=64, BLOCK=32
        ),
        "leading copy": offload_job("_copy_prefix_kernel", 8, COPY, ENTRY_WORDS=2048, HEADS=8, PARTS=9, BLOCK=4096),
        "slots": offload_job("_allocate_slots_kernel", 8, SLOTS, SLOTS=4096, WIDTH=2048),
        "gather": offload_job("_gather_kernel", 4, GATHER, SETS=8, PAGE=1, **gather),
        "gather pages": offload_job("_gather_kernel", 4, GATHER, SETS=1, PAGE=16, **gather),
    }
    if every:
        jobs["most slots"] = offload_job("_allocate_slots_kernel", 8, SLOTS, SLOTS=16384, WIDTH=8192)
    return jobs


# Sampling.

FIGURES = ["*fp32", "*fp32", "*fp32"]  # peak, cutoff and mass
SAMPLING_SIZES = {"CHUNKS": 32, "PADDED": 32, "CHUNK": 4096, "FILTERED": True, "PDL": True}
ROW = {"vocab": "i32", "scale": "fp32", "draft_scale": "fp32"}
FILTERING = dict.fromkeys(("cutoffs", "peaks", "masses", "peak", "cutoff", "mass"), "*fp32") | ROW


LOOKUP = {"text": "*i32", "lengths": "*i32", "best": "*i64", "tokens": "*i64", "counts": "*i64", "capacity": "i32"}
LOOKUP |= {"min_match": "i32"}
LOOKUP_SIZES = {"MAX_MATCH": 16, "CHUNKS": 9, "PADDED_CHUNKS": 16, "CHUNK": 2048, "DEPTH": 5, "PADDED_DEPTH": 8}


def sampling_job(module: str, kernel: str, types: dict[str, Any], constants: dict[str, Any]) -> dict[str, Any]:
    return job(module, kernel, types, SAMPLING_SIZES | constants, {"num_warps": 8})


def rounds(element: str, gamma: int, certain: bool = False) -> dict[str, dict[str, Any]]:
    """Kernels that verify `gamma` drafts, or of a draw where there are none; of rows with few if they are `certain`."""
    types: dict[str, Any] = {"target": ["*" + element, *FIGURES], "uniform": "*fp64", "sums": "*i64", "out": "*i64"}
    types |= {"draft": [[kind] * gamma * (not certain) for kind in types["target"]]} | ROW
    constants: dict[str, Any] = {"GAMMA": gamma, "CERTAIN": certain}
    if certain:
        types |= {"drafted_counts": "*i64"}
    else:
        constants |= {"drafted_counts": None}
    if gamma:
        types |= {"drafted": "*i64", "counts": "*i64", "max_tokens": "*i32"}
    else:
        constants |= {"drafted": None, "counts": None}
    kernels = ["_accept_kernel"] * (gamma > 0) + ["_weigh_kernel", "_pick_kernel"]
    return {
        f"{kernel} {element} {gamma} {certain}": sampling_job("sampling.triton", kernel, types, constants)
        for kernel in kernels
    }


def sampling_jobs(every: bool) -> dict[str, dict[str, Any]]:
    """Draws and verifications, tuples of drafts included."""
    greedy = {
        "logits": "*bf16",
        "places": "*i32",
        "best": "*i64",
        "drafted": "*i64",
        "counts": "*i64",
        "max_tokens": "*i32",
        "drafted_counts": "*i64",
    }
    return {
        "softmax": sampling_job("sampling.triton", "_softmax_kernel", FILTERING | {"logits": "*bf16"}, {}),
        "join": sampling_job("sampling.triton", "_join_kernel", FILTERING, {"FILTERED": False}),
        "best": sampling_job("sampling.triton", "_best_kernel", FILTERING | greedy, {}),
        "join best": sampling_job("sampling.triton", "_join_best_kernel", FILTERING | greedy, {}),
        "agree": sampling_job("sampling.triton", "_agree_kernel", FILTERING | greedy, {"GAMMA": 7, "PADDED": 8}),
        "uniform": sampling_job(
            "sampling.triton", "_row_uniform_kernel",
            {"seed": "*i64", "positions": "*i32", "out": "*fp64", "first": "i32"}, {"DRAWS": 9, "PADDED": 16},
        ),
        **rounds("bf16", 8),
        **rounds("bf16", 4, certain=True),
        **rounds("fp32", 0),
        "match": job("sampling.suffix_lookup_triton", "_match_kernel", LOOKUP, LOOKUP_SIZES, {"num_warps": 8}),
        "propose": job("sampling.suffix_lookup_triton", "_propose_kernel", LOOKUP, LOOKUP_SIZES, {"num_warps": 1}),
    }  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's wheels are for Linux")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["main", "every"])
@pytest.mark.parametrize("groups", [(dense_jobs,), (sparse_jobs, offload_jobs, sampling_jobs)], ids=["dense", "sparse"])
def test_every_kernel_compiles_for_hopper(
    groups: tuple[Callable[[bool], dict[str, Any]], ...],
    every: bool,
    compiled_for_hopper: Callable[[dict[str, Any]], dict[str, int]],
) -> None:
    jobs = {name: kernel for make_jobs in groups for name, kernel in make_jobs(every).items()}
    for name, used in compiled_for_hopper(jobs).items():
        wide = "128 rows" in name or "64 rows" in name
        assert used <= (HOPPER_SHARED_BYTES if wide else ADA_SHARED_BYTES), name
