"""CUDA C++ kernels of the choice by 2-bit keys (csrc/): a scan, then top-k by histograms; compiled at first use."""

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
    may_start_early,
    pack_strides,
    program,
)
from ridgeplan.kernels.kv_cache.cuda import GROUP, HEAD_DIMS
from ridgeplan.kernels.selection.draft_planes import SAMPLES, TwoBitKeys
from ridgeplan.roofline.execution import CUDA_SCAN_HEADS

THREADS, WARPS = 512, 16
STAGES = 2  # groups of a warp that are being scanned or copied


@dataclass(frozen=True)
class ScanVariant:
    """What a compiled kernel is specialized for. heads: query heads of a KV head."""

    head_dim: int
    heads: int
    bf16: bool

    @property
    def options(self) -> list[str]:
        """The compiled variant: `ScanConfig` in csrc/config.cuh."""
        return config_options(HEAD_DIM=self.head_dim, HEADS=self.heads, BF16=self.bf16, STAGE_BYTES=self.stage_bytes)

    @property
    def column_heads(self) -> int:
        """Query heads that the columns of a product have, once or twice."""
        return 4 if self.heads <= 4 else 8

    @property
    def stage_bytes(self) -> int:
        """What the scan reads of a group: 2-bit keys, scales and minima."""
        return GROUP * self.head_dim // 4 + 2 * 2 * self.head_dim


def scan_variant(q: Tensor, kv_heads: int, group: int) -> ScanVariant | None:
    """The variant for one query per row, or None: then Triton's kernels run.

    It needs Hopper or newer, groups of 128, head_dim 64 or 128, at most 8 query heads per KV head, 16-bit queries, and
    rows that 16-byte loads can read.
    """
    if not is_on_hopper(q) or group != GROUP or q.shape[3] not in HEAD_DIMS:
        return None
    heads = q.shape[2] // kv_heads
    if q.shape[1] > 1 or heads > CUDA_SCAN_HEADS or q.dtype not in (torch.bfloat16, torch.float16) or not is_packed(q):
        return None
    return ScanVariant(q.shape[3], heads, q.dtype == torch.bfloat16)


def parts_of(rows: int, num_sms: int, min_parts: int = 1) -> int:
    """CTAs of a row, at least `min_parts`: as many as run at once, or in the fewest turns that give enough."""
    turns = -(-min_parts * rows // num_sms)  # rounded up
    return turns * num_sms // rows


SCAN, CHOOSE = "two_bit_scan", "two_bit_choose"
BINS = 2048  # of a score: 8 for each power of two
MAX_GROUPS = 320  # of a CTA
POINTERS = ("q", "groups", "k", "codes", "scales", "minima", "bins", "histograms", "index", "count")
SIZES = ("kv_heads", "group_capacity", "parts", "sinks", "max_k", "q_batch_stride", "q_head_stride")


class TwoBitParams(KernelParams):
    """See csrc/two_bit.cuh."""

    constants = MappingProxyType(
        {
            "THREADS": THREADS,
            "WARPS": WARPS,
            "STAGES": STAGES,
            "SAMPLES": SAMPLES,
            "GROUP": GROUP,
            "BINS": BINS,
            "MAX_GROUPS": MAX_GROUPS,
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

    def run(self, params: TwoBitParams, rows: int, early: bool) -> None:
        """Launches both for `rows` rows of params.parts CTAs each. early: of the scan, see `launch_with_pdl`."""
        grid, threads = (rows * params.parts, 1, 1), (THREADS, 1, 1)
        launch_with_pdl(self.scan, grid, threads, params, scan_bytes(self.variant), early=early)
        launch_with_pdl(self.choose, grid, threads, params)


def scan_bytes(variant: ScanVariant) -> int:
    """Dynamic shared memory of a CTA that scans."""
    return WARPS * STAGES * variant.stage_bytes


def find_two_bit_kernels(q: Tensor, keys: TwoBitKeys) -> TwoBitKernels | None:
    """The kernels that compute this call, or None: then the separate ones do."""
    variant = scan_variant(q, keys.kv_heads, keys.group)
    return None if variant is None else compiled_kernels(variant, q.device)


@cache
def compiled_kernels(variant: ScanVariant, device: torch.device) -> TwoBitKernels | None:
    """The kernels of a variant. None, with one warning, if they do not compile."""
    kernels = []
    for entry, shared_bytes in ((SCAN, scan_bytes(variant)), (CHOOSE, 0)):
        text = program(f"selection/csrc/{entry}.cu", TwoBitParams)
        fallback = f"the CUDA kernel {entry} does not compile, Triton's run instead"
        kernel = compile_kernel(text, entry, variant.options, device, shared_bytes=shared_bytes, fallback=fallback)
        kernels.append(kernel)
    scan, choose = kernels
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
    """See `ridgeplan.kernels.selection.two_bit_top_k`."""
    batch, rows = keys.batch, keys.batch * keys.kv_heads
    parts = parts_of(rows, kernels.num_sms, -(-keys.groups // MAX_GROUPS))
    index, bins, histograms = (
        torch.empty(rows, *shape, dtype=dtype, device=q.device)
        for shape, dtype in (
            ((max_k,), torch.int32),
            ((keys.groups * GROUP,), torch.int16),
            ((parts, BINS), torch.int32),
        )
    )
    count = torch.empty(rows, dtype=torch.int32, device=q.device)
    batch_stride, _, head_stride = pack_strides(q)
    params = TwoBitParams(
        q=q, groups=groups.contiguous(), k=k.contiguous(),
        codes=keys.codes, scales=keys.scale, minima=keys.minimum,
        bins=bins, histograms=histograms, index=index, count=count,
        kv_heads=keys.kv_heads, group_capacity=keys.groups, parts=parts, sinks=sinks, max_k=max_k,
        q_batch_stride=batch_stride, q_head_stride=head_stride, scale=scale,
    )  # fmt: skip
    with torch.cuda.device(q.device):
        kernels.run(params, rows, may_start_early(groups))
    return index.view(batch, -1, max_k), count.view(batch, -1)
