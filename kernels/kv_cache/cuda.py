"""CUDA C++ kernel of hierarchical quantization (csrc/quantize.cu), and the parameter struct of a quantized cache.

docs/kernels/kv_cache.md explains how it works and what was measured.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.device.cuda import KernelParams, compile_kernel, config_options, launch_with_pdl, program
from ridgeplan.kernels.kv_cache.layout import QuantizedKV

GROUP = 128  # tokens of a group, in every CUDA C++ kernel that reads or writes codes
HEAD_DIMS = (64, 128)  # that these kernels support


class QuantizedPlanes(KernelParams):
    """Pointers to the codes, scales and minima of keys or of values."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("upper", "lower", "scale", "minimum"))


def key_planes(codes: QuantizedKV | None) -> QuantizedPlanes:
    """The planes of the keys; null pointers for missing lower codes, or if there are no codes."""
    if codes is None:
        return QuantizedPlanes(upper=None, lower=None, scale=None, minimum=None)
    return QuantizedPlanes(upper=codes.key_upper, lower=codes.key_lower, scale=codes.key_scale, minimum=codes.key_min)


def value_planes(codes: QuantizedKV | None) -> QuantizedPlanes:
    """The planes of the values, likewise."""
    if codes is None:
        return QuantizedPlanes(upper=None, lower=None, scale=None, minimum=None)
    return QuantizedPlanes(
        upper=codes.value_upper, lower=codes.value_lower, scale=codes.value_scale, minimum=codes.value_min
    )


SOURCE, ENTRY = "kv_cache/csrc/quantize.cu", "quantize"
STREAMS = 16  # tokens that a CTA reads at once, with HEAD_DIM / 8 threads each
ALIGNMENT = 8  # elements per 16 bytes, which a lane loads at once
MAX_GROUPS = 65535  # largest second dimension of a grid
STRIDES = [f"{x}_{axis}stride" for x in ("key", "value") for axis in ("batch_", "head_", "")]


class QuantizeParams(KernelParams):
    """See csrc/quantize.cu."""

    constants = MappingProxyType({"GROUP": GROUP, "STREAMS": STREAMS})

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "group_index", "mask", "first_slot")),
        ("key_codes", QuantizedPlanes),
        ("value_codes", QuantizedPlanes),
        *((name, ctypes.c_int) for name in ("kv_heads", "group_capacity", *STRIDES)),
    )


@dataclass(frozen=True)
class QuantizeKernel:
    """The kernel compiled for one head_dim, number of planes and dtype."""

    compiled: Any

    def run(
        self,
        keys: Tensor,
        values: Tensor,
        out: QuantizedKV,
        group_index: Tensor,
        mask: Tensor | None,
        first_slot: Tensor | None,
    ) -> None:
        """See `ridgeplan.kernels.kv_cache.quantize`."""
        batch, kv_heads, tokens, _ = keys.shape
        rows = {"group_index": group_index, "mask": mask, "first_slot": first_slot}
        rows = {name: None if row is None else row.contiguous() for name, row in rows.items()}
        strides = [stride // ALIGNMENT for tensor in (keys, values) for stride in tensor.stride()[:3]]
        params = QuantizeParams(
            keys=keys,
            values=values,
            **rows,
            key_codes=key_planes(out),
            value_codes=value_planes(out),
            kv_heads=kv_heads,
            group_capacity=out.groups,
            **dict(zip(STRIDES, strides, strict=True)),
        )
        grid = (batch * kv_heads, tokens // GROUP if first_slot is None else 1, 2)
        with torch.cuda.device(keys.device):
            launch_with_pdl(self.compiled, grid, (STREAMS * out.head_dim // 8, 1, 1), params)


def find_quantize_kernel(keys: Tensor, values: Tensor, out: QuantizedKV) -> QuantizeKernel | None:
    """The kernel for this call, or None if Triton's must run.

    It needs Hopper or newer (where it was measured), groups of 128, head_dim 64 or 128, one 16-bit dtype, and rows
    aligned to 16 bytes.
    """
    if not keys.is_cuda or torch.version.cuda is None or torch.cuda.get_device_capability(keys.device) < (9, 0):
        return None
    if out.group != GROUP or out.head_dim not in HEAD_DIMS or keys.shape[2] > MAX_GROUPS * GROUP:
        return None
    if keys.dtype not in (torch.bfloat16, torch.float16) or values.dtype != keys.dtype:
        return None
    if not all(map(_aligned, (keys, values))):
        return None
    return _compiled(out.head_dim, out.planes, keys.dtype == torch.bfloat16, keys.device)


def options(head_dim: int, planes: int, bf16: bool) -> list[str]:
    """The compiled variant: `Config` in csrc/quantize.cu."""
    return config_options(HEAD_DIM=head_dim, PLANES=planes, BF16=bf16)


@cache
def _compiled(head_dim: int, planes: int, bf16: bool, device: torch.device) -> QuantizeKernel | None:
    """None, with one warning, if the kernel does not compile."""
    fallback = "the CUDA quantization kernel does not compile, Triton's runs instead"
    text = program(SOURCE, QuantizeParams)
    kernel = compile_kernel(text, ENTRY, options(head_dim, planes, bf16), device, fallback=fallback)
    return None if kernel is None else QuantizeKernel(kernel)


def _aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0 and not any(stride % ALIGNMENT for stride in tensor.stride()[:-1])
