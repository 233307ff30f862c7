"""Triton kernel of dequantization: one program per (batch row, KV head) and group."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.nibbles_triton import centred_affine, centred_codes
from ridgeplan.kernels.kv_cache.cost import dequantize_metadata
from ridgeplan.kernels.kv_cache.layout import QuantizedKV


@triton.jit
def _decode_keys(
    at, upper, lower, scale, minimum, out, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BITS: tl.constexpr
):
    HALF: tl.constexpr = HEAD_DIM // 2
    tokens = tl.arange(0, GROUP)[:, None]
    channels = tl.arange(0, HALF)[None, :]
    byte = at * GROUP * HALF + tokens * HALF + channels
    first, second = centred_codes(upper, lower, byte, BITS, tl.float32)
    pair = at * HEAD_DIM + channels
    to = out + (at * GROUP + tokens) * HEAD_DIM + channels
    step, zero = centred_affine(tl.load(scale + pair), tl.load(minimum + pair), BITS)
    tl.store(to, (first * step + zero).to(out.dtype.element_ty))
    pair += HALF
    step, zero = centred_affine(tl.load(scale + pair), tl.load(minimum + pair), BITS)
    tl.store(to + HALF, (second * step + zero).to(out.dtype.element_ty))


@triton.jit
def _decode_values(
    at, upper, lower, scale, minimum, out, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BITS: tl.constexpr
):
    HALF: tl.constexpr = GROUP // 2
    channels = tl.arange(0, HEAD_DIM)[:, None]
    tokens = tl.arange(0, HALF)[None, :]
    byte = at * HEAD_DIM * HALF + channels * HALF + tokens
    first, second = centred_codes(upper, lower, byte, BITS, tl.float32)
    pair = at * GROUP + tokens
    to = out + pair * HEAD_DIM + channels
    step, zero = centred_affine(tl.load(scale + pair), tl.load(minimum + pair), BITS)
    tl.store(to, (first * step + zero).to(out.dtype.element_ty))
    pair += HALF
    step, zero = centred_affine(tl.load(scale + pair), tl.load(minimum + pair), BITS)
    tl.store(to + HALF * HEAD_DIM, (second * step + zero).to(out.dtype.element_ty))


@triton.jit(launch_metadata=dequantize_metadata)
def _dequantize_kernel(
    keys,
    values,
    key_upper,
    key_lower,
    key_scale,
    key_min,
    value_upper,
    value_lower,
    value_scale,
    value_min,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    _decode_keys(at, key_upper, key_lower, key_scale, key_min, keys, GROUP, HEAD_DIM, BITS)
    _decode_values(at, value_upper, value_lower, value_scale, value_min, values, GROUP, HEAD_DIM, BITS)


def dequantize_triton(codes: QuantizedKV, lower: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `ridgeplan.kernels.kv_cache.dequantize`; group and head_dim must be powers of two."""
    shape = (codes.batch, codes.kv_heads, codes.groups * codes.group, codes.head_dim)
    keys, values = (torch.empty(shape, dtype=dtype, device=codes.key_upper.device) for _ in range(2))
    _dequantize_kernel[(codes.batch * codes.kv_heads * codes.groups,)](
        keys,
        values,
        **vars(codes),
        GROUP=codes.group,
        HEAD_DIM=codes.head_dim,
        BITS=8 if lower else 4,
        num_warps=8,
    )
    return keys, values
