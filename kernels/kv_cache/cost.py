"""Declared costs of quantization and dequantization, counted from the kernels' tensors.

The cost model uses the formulas of `ridgeplan.roofline.ops`; a test checks that both are equal, so a change of the
layout or of a formula is noticed. The `*_metadata` functions pass the same numbers to Triton's launch hooks, as
`triton.profiler` reads them.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from ridgeplan.kernels.device.launch_metadata import launch_metadata
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.roofline.cost import Cost

ENCODE_FLOPS = 6  # per element: minimum, maximum, difference, division and two roundings


def group_bytes(codes: QuantizedKV, planes: int) -> int:
    """Bytes of one group of one KV head: `planes` planes of codes, with scales and minima, for keys and values."""
    upper = (codes.key_upper, codes.value_upper)
    pairs = (codes.key_scale, codes.key_min, codes.value_scale, codes.value_min)
    whole = planes * sum(tensor.nbytes for tensor in upper) + sum(tensor.nbytes for tensor in pairs)
    return whole // (codes.batch * codes.kv_heads * codes.groups)


def quantize_cost(keys: Tensor, values: Tensor, out: QuantizedKV) -> Cost:
    """Quantization of all of `keys` and `values` [B, Hkv, n * G, D] into the planes that `out` holds."""
    groups = keys.numel() // (out.group * out.head_dim)
    return Cost(
        flops=ENCODE_FLOPS * (keys.numel() + values.numel()),
        read_bytes=keys.numel() * keys.element_size() + values.numel() * values.element_size(),
        write_bytes=groups * group_bytes(out, out.planes),
    )


def dequantize_cost(codes: QuantizedKV, lower: bool, element_bytes: int) -> Cost:
    """Dequantization of all `codes` to `element_bytes` per element: one multiply-add each."""
    groups = codes.batch * codes.kv_heads * codes.groups
    elements = 2 * groups * codes.group * codes.head_dim
    return Cost(2 * elements, groups * group_bytes(codes, 2 if lower else 1), elements * element_bytes)


def quantize_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """Launch metadata of the quantization kernel, priced as if no row were masked."""
    return launch_metadata("quantize", quantize_cost(args["keys"], args["values"], codes_of(args)), args["keys"])


def dequantize_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """Launch metadata of the dequantization kernel; its arithmetic is in float32."""
    cost = dequantize_cost(codes_of(args), args["BITS"] == 8, args["keys"].element_size())
    return {"name": "dequantize", "flops32": cost.flops, "bytes": cost.bytes}


def codes_of(args: Mapping[str, Any]) -> QuantizedKV:
    return QuantizedKV(**{field.name: args[field.name] for field in fields(QuantizedKV)})
