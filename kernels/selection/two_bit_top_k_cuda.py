"""CUDA C++ kernels of the choice by 2-bit keys (csrc/), compiled at first use: a scan, then a choice by histograms."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.device.kernel_params import KernelParams
from ridgeplan.kernels.device.launch import launch_with_pdl
from ridgeplan.kernels.device.nvrtc import compile_kernel, program
from ridgeplan.kernels.kv_cache.quantized_planes import GROUP
from ridgeplan.kernels.selection.scan_variant import (
    ALIGNMENT,
    STAGES,
    THREADS,
    WARPS,
    ScanVariant,
    parts_of,
    scan_variant,
)
from ridgeplan.kernels.selection.two_bit_keys import SAMPLES, TwoBitKeys

SCAN, CHOOSE = "two_bit_scan", "two_bit_choose"
BINS = 2048  # of a score: 8 for each power of two
MOST_GROUPS = 320  # of a CTA
POINTERS = ("q", "groups", "k", "codes", "scales", "minima", "bins", "histograms", "index", "count")
SIZES = ("kv_heads", "group_capacity", "parts", "sinks", "max_k", "q_batch_stride", "q_head_stride")


class TwoBitParams(KernelParams):
    """See csrc/two_bit_params.cuh."""

    constants = MappingProxyType(
        {
            "THREADS": THREADS,
            "WARPS": WARPS,
            "STAGES": STAGES,
            "SAMPLES": SAMPLES,
            "GROUP": GROUP,
            "BINS": BINS,
            "MOST_GROUPS": MOST_GROUPS,
        }
    )

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int) for name in SIZES),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class TwoBitKernels:
    """Both kernels, compiled for a variant on one device."""

    scan: Any
    choose: Any
    variant: ScanVariant
    num_sms: int

    def run(self, params: TwoBitParams, rows: int) -> None:
        """Launches both for `rows` rows of params.parts CTAs each."""
        grid, threads = (rows * params.parts, 1, 1), (THREADS, 1, 1)
        launch_with_pdl(self.scan, grid, threads, params, scan_bytes(self.variant))
        launch_with_pdl(self.choose, grid, threads, params)


def scan_bytes(variant: ScanVariant) -> int:
    """Dynamic shared memory of a CTA that scans."""
    return WARPS * STAGES * variant.stage_bytes


def find_kernel(q: Tensor, keys: TwoBitKeys) -> TwoBitKernels | None:
    """The kernels that compute this call, or None: then the separate ones do."""
    variant = scan_variant(q, keys.kv_heads, keys.group)
    return None if variant is None else compiled_kernels(variant, q.device)


@cache
def compiled_kernels(variant: ScanVariant, device: torch.device) -> TwoBitKernels | None:
    """The kernels of a variant. None, with one warning, if they do not compile."""
    found = []
    for entry, shared_bytes in ((SCAN, scan_bytes(variant)), (CHOOSE, 0)):
        text = program(f"selection/csrc/{entry}.cu", TwoBitParams)
        fallback = f"the CUDA kernel {entry} does not compile, Triton's run instead"
        kernel = compile_kernel(text, entry, variant.options, device, shared_bytes=shared_bytes, fallback=fallback)
        found.append(kernel)
    scan, choose = found
    if scan is None or choose is None:
        return None
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return TwoBitKernels(scan, choose, variant, num_sms)


def two_bit_top_k_cuda(
    kernels: TwoBitKernels,
    q: Tensor,
    keys: TwoBitKeys,
    groups: Tensor,
    k: Tensor,
    max_k: int,
    sinks: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `ridgeplan.kernels.selection.two_bit_top_k.two_bit_top_k`."""
    batch, rows = keys.batch, keys.batch * keys.kv_heads
    parts = parts_of(rows, kernels.num_sms, -(-keys.groups // MOST_GROUPS))
    index, bins, histograms = (
        torch.empty(rows, *shape, dtype=dtype, device=q.device)
        for shape, dtype in (
            ((max_k,), torch.int32),
            ((keys.groups * GROUP,), torch.int16),
            ((parts, BINS), torch.int32),
        )
    )
    count = torch.empty(rows, dtype=torch.int32, device=q.device)
    params = TwoBitParams(
        q=q,
        groups=groups.contiguous(),
        k=k.contiguous(),
        codes=keys.codes,
        scales=keys.scale,
        minima=keys.minimum,
        bins=bins,
        histograms=histograms,
        index=index,
        count=count,
        kv_heads=keys.kv_heads,
        group_capacity=keys.groups,
        parts=parts,
        sinks=sinks,
        max_k=max_k,
        q_batch_stride=q.stride(0) // ALIGNMENT,
        q_head_stride=q.stride(2) // ALIGNMENT,
        scale=scale,
    )
    with torch.cuda.device(q.device):
        kernels.run(params, rows)
    return index.view(batch, -1, max_k), count.view(batch, -1)
