"""What each kernel declares that it costs, counted from the sizes of the tensors it touches.

The model prices kernels by the formulas of `ridgeplan.roofline.ops`; a test holds both equal, so neither a
change of layout nor one of a formula goes unnoticed. The `*_metadata` functions hand the same figures to
Triton's launch hooks (as read by `triton.profiler`).
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from ridgeplan.kernels.layout import QuantizedKV
from ridgeplan.roofline.cost import Cost

ENCODE_FLOPS = 6  # minimum, maximum, difference, division and two roundings of each element


def group_bytes(codes: QuantizedKV, planes: int) -> int:
    """Bytes of one group of one KV head: `planes` planes of codes, scales and minima, keys and values."""
    upper = (codes.key_upper, codes.value_upper)
    pairs = (codes.key_scale, codes.key_min, codes.value_scale, codes.value_min)
    whole = planes * sum(tensor.nbytes for tensor in upper) + sum(tensor.nbytes for tensor in pairs)
    return whole // (codes.batch * codes.kv_heads * codes.groups)


def attention_cost(
    q: Tensor,
    keys: Tensor,
    codes: QuantizedKV | None,
    lower: bool,
    quantized_tokens: int,
    full_tokens: int,
    splits: int,
) -> Cost:
    """Decode attention where each row sees `quantized_tokens` (whole groups) and `full_tokens` slots.

    Lengths live on the device, so the caller says them. Writes are the float32 partials and log-sum-exps of
    all splits; reads count KV once, as all query heads of a KV head share a tile.
    """
    kv_rows = keys.shape[0] * keys.shape[1]
    read_bytes = q.numel() * q.element_size()
    read_bytes += 2 * kv_rows * full_tokens * keys.shape[3] * keys.element_size()
    if codes is not None:
        groups = quantized_tokens // codes.group
        read_bytes += kv_rows * groups * group_bytes(codes, planes=2 if lower else 1)
    lse = q.numel() // q.shape[3] * splits
    return Cost(
        flops=4 * q.numel() * (quantized_tokens + full_tokens),
        read_bytes=read_bytes,
        write_bytes=4 * (lse * q.shape[3] + lse),
    )


def merge_cost(partial: Tensor, lse: Tensor, element_bytes: int) -> Cost:
    """Merge of all splits into an output of `element_bytes` per element."""
    return Cost(
        flops=2 * partial.numel(),
        read_bytes=partial.nbytes + lse.nbytes,
        write_bytes=partial.numel() // partial.shape[-2] * element_bytes,
    )


def quantize_cost(keys: Tensor, values: Tensor, out: QuantizedKV) -> Cost:
    """Quantization of all of `keys` and `values` [B, Hkv, n * G, D] into the planes that `out` holds."""
    groups = keys.numel() // (out.group * out.head_dim)
    return Cost(
        flops=ENCODE_FLOPS * (keys.numel() + values.numel()),
        read_bytes=keys.numel() * keys.element_size() + values.numel() * values.element_size(),
        write_bytes=groups * group_bytes(out, out.planes),
    )


def dequantize_cost(codes: QuantizedKV, lower: bool, element_bytes: int) -> Cost:
    """All of `codes` back to keys and values of `element_bytes` per element: one multiply-add each."""
    groups = codes.batch * codes.kv_heads * codes.groups
    elements = 2 * groups * codes.group * codes.head_dim
    return Cost(2 * elements, groups * group_bytes(codes, 2 if lower else 1), elements * element_bytes)


def attention_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """Launch metadata of the attention kernel, priced at full capacity: reading lengths would synchronize."""
    codes = _codes(args) if args["BITS"] else None
    quantized_tokens = codes.groups * codes.group if codes is not None else 0
    cost = attention_cost(
        args["q"], args["keys"], codes, args["BITS"] == 8, quantized_tokens, args["capacity"], args["splits"]
    )
    return _launch(f"decode_attention_{args['BITS']}bit", cost, args["q"])


def merge_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """Launch metadata of the merge kernel."""
    partial = args["partial"]
    return _launch("merge", merge_cost(partial, args["lse"], args["out"].element_size()), partial)


def quantize_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """Launch metadata of the quantization kernel, priced as if no row were masked."""
    return _launch("quantize", quantize_cost(args["keys"], args["values"], _codes(args)), args["keys"])


def dequantize_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """Launch metadata of the dequantization kernel; its arithmetic is in float32."""
    cost = dequantize_cost(_codes(args), args["BITS"] == 8, args["keys"].element_size())
    return {"name": "dequantize", "flops32": cost.flops, "bytes": cost.bytes}


def _codes(args: Mapping[str, Any]) -> QuantizedKV:
    return QuantizedKV(**{field.name: args[field.name] for field in fields(QuantizedKV)})


def _launch(name: str, cost: Cost, operand: Tensor) -> dict[str, Any]:
    """The keys that the profiler reads; flops are filed under the width of the operand."""
    return {"name": name, f"flops{8 * operand.element_size()}": cost.flops, "bytes": cost.bytes}
