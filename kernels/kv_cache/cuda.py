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

from ridgeplan.kernels.device.cuda import (
    KernelParams,
    compile_kernel,
    config_options,
    is_on_hopper,
    is_packed,
    launch_with_pdl,
    pack_strides,
    program,
)
from ridgeplan.kernels.kv_cache.layout import GroupWrite, Planes, QuantizedKV

GROUP = 128  # tokens of a group, in every CUDA C++ kernel that reads or writes codes
HEAD_DIMS = (64, 128)  # that these kernels support


class QuantizedPlanes(KernelParams):
    """Pointers to the codes, scales and minima of keys or of values."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("upper", "lower", "scale", "minimum"))

    @classmethod
    def of(cls, planes: Planes) -> QuantizedPlanes:
        """Pointers to `QuantizedKV.key_planes` or `value_planes`; a missing plane gives a null pointer."""
        upper, lower, scale, minimum = planes
        return cls(upper=upper, lower=lower, scale=scale, minimum=minimum)


SOURCE, ENTRY = "kv_cache/csrc/quantize.cu", "quantize"
STREAMS = 16  # tokens that a CTA reads at once, with HEAD_DIM / 8 threads each
MAX_GROUPS = 65535  # largest second dimension of a grid
STRIDES = [f"{x}_{axis}stride" for x in ("key", "value") for axis in ("batch_", "head_", "")]


class QuantizeParams(KernelParams):
    """See csrc/quantize.cu."""

    constants = MappingProxyType({"GROUP": GROUP, "STREAMS": STREAMS})

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "group_index", "mask", "first_slot")),
        ("key_codes", QuantizedPlanes),
        ("value_codes", QuantizedPlanes),
        *((name, ctypes.c_int) for name in ("kv_heads", "group_capacity", *STRIDES, "paged")),
    )


@dataclass(frozen=True)
class QuantizeKernel:
    """The kernel compiled for one head_dim, number of planes and dtype."""

    compiled: Any

    def run(self, keys: Tensor, values: Tensor | None, target: GroupWrite) -> None:
        """See `ridgeplan.kernels.kv_cache.quantize`."""
        batch, kv_heads, tokens, _ = keys.shape
        parts = 1 if values is None else 2
        values = keys if values is None else values  # which no CTA then reads
        out, rows = target.out, {name: getattr(target, name) for name in ("group_index", "mask", "first_slot")}
        rows = {name: None if row is None else row.contiguous() for name, row in rows.items()}
        params = QuantizeParams(
            keys=keys,
            values=values,
            **rows,
            key_codes=QuantizedPlanes.of(out.key_planes),
            value_codes=QuantizedPlanes.of(out.value_planes),
            kv_heads=kv_heads,
            group_capacity=out.batch if target.paged else out.groups,
            **dict(zip(STRIDES, pack_strides(keys, values), strict=True)),
            paged=int(target.paged),
        )
        grid = (batch * kv_heads, tokens // GROUP if target.first_slot is None else 1, parts)
        with torch.cuda.device(keys.device):
            launch_with_pdl(self.compiled, grid, (STREAMS * out.head_dim // 8, 1, 1), params)


def find_quantize_kernel(keys: Tensor, values: Tensor | None, out: QuantizedKV) -> QuantizeKernel | None:
    """The kernel for this call, or None if Triton's must run.

    It needs Hopper or newer (where it was measured), groups of 128, head_dim 64 or 128, one 16-bit dtype, and rows
    aligned to 16 bytes.
    """
    values = keys if values is None else values
    if not is_on_hopper(keys) or not is_packed(keys) or not is_packed(values):
        return None
    if out.group != GROUP or out.head_dim not in HEAD_DIMS or keys.shape[2] > MAX_GROUPS * GROUP:
        return None
    if keys.dtype not in (torch.bfloat16, torch.float16) or values.dtype != keys.dtype:
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
