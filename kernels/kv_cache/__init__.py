"""Hierarchical quantization of blocks of keys and values into a layer's cache, and the way back."""

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_triton
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.quantize_cuda import fits, quantize_cuda
from ridgeplan.kernels.kv_cache.reference import dequantize_reference, quantize_reference


def quantize(
    keys: Tensor,
    values: Tensor,
    out: QuantizedKV,
    group_index: Tensor,
    mask: Tensor | None = None,
    *,
    first_slot: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Writes whole groups of tokens as codes into `out` (QuantSpec sec. 4.2; format in quantize_twin.py).

    keys, values: [B, Hkv, n * G, D], any strides with contiguous channels. group_index: int32 [B], on the
    device: the first group of each row to write, n groups follow. mask: bool [B] or None; rows that are False
    stay as they are, which is how a captured CUDA graph flushes conditionally. first_slot: int32 [B] or None, on the
    device; with it keys and values are a store of any length, and of each row one group is written, which begins at
    that slot. Keys get one (scale, minimum) per channel and group, values one per token.

    Raises ValueError when the tokens are not whole groups, the shapes disagree with `out`, or what lies on the device
    for each row is of another type.
    """
    _check(keys, values, out, whole_groups=first_slot is None)
    require_rows(out.batch, torch.int32, group_index=group_index, first_slot=first_slot)
    require_rows(out.batch, torch.bool, mask=mask)
    if not uses_triton(backend, keys):
        quantize_reference(keys, values, out, group_index, mask, first_slot)
        return
    if backend == "auto" and fits(keys, values, out):
        quantize_cuda(keys, values, out, group_index, mask, first_slot)
        return
    from ridgeplan.kernels.kv_cache.quantize_triton import quantize_triton

    quantize_triton(keys, values, out, group_index, mask, first_slot)


def dequantize(
    codes: QuantizedKV, lower: bool, dtype: torch.dtype = torch.float32, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Keys and values [B, Hkv, groups * G, D] of `codes` in `dtype`: INT8 when `lower`, else INT4.

    Raises ValueError when `lower` is asked of codes that hold the upper plane only.
    """
    require_lower(codes, lower)
    if not uses_triton(backend, codes.key_upper):
        return dequantize_reference(codes, lower, dtype)
    from ridgeplan.kernels.kv_cache.dequantize_triton import dequantize_triton

    return dequantize_triton(codes, lower, dtype)


def require_lower(codes: QuantizedKV, lower: bool) -> None:
    """Raises ValueError when lower codes are asked of an upper-only cache."""
    if lower and codes.planes == 1:
        raise ValueError("lower=True needs lower codes, this QuantizedKV holds the upper plane only")


def require_rows(batch: int, dtype: torch.dtype, **figures: Tensor | None) -> None:
    """Raises ValueError for one of `figures` that is not `dtype` [batch]: CUDA C++ kernels get bare pointers."""
    for name, figure in figures.items():
        if figure is not None and (figure.dtype != dtype or figure.shape != (batch,)):
            raise ValueError(f"{name} is {figure.dtype} {list(figure.shape)}; allowed: {dtype} [{batch}]")


def _check(keys: Tensor, values: Tensor, out: QuantizedKV, whole_groups: bool) -> None:
    batch, kv_heads, tokens, head_dim = keys.shape
    if values.shape != keys.shape:
        raise ValueError(f"keys {list(keys.shape)} and values {list(values.shape)} must have one shape")
    if (batch, kv_heads, head_dim) != (out.batch, out.kv_heads, out.head_dim):
        raise ValueError(
            f"keys {list(keys.shape)} do not fit codes of batch {out.batch}, {out.kv_heads} KV heads "
            f"and head_dim {out.head_dim}"
        )
    if whole_groups and tokens % out.group:
        raise ValueError(f"{tokens} tokens are not whole groups of {out.group}")
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError("keys and values need contiguous channels (stride 1 in the last dimension)")
