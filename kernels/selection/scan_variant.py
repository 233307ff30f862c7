"""What the CUDA C++ kernels that scan 2-bit keys (csrc/) are compiled for, and how many CTAs they have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache.quantized_planes import GROUP, HEAD_DIMS
from ridgeplan.roofline.execution import CUDA_SCAN_HEADS

THREADS, WARPS = 512, 16
STAGES = 2  # groups of a warp that are being scanned or copied
ALIGNMENT = 8  # elements of 16 bytes


@dataclass(frozen=True)
class ScanVariant:
    """What a compiled kernel is specialized for. heads: query heads of a KV head."""

    head_dim: int
    heads: int
    bf16: bool

    @property
    def options(self) -> list[str]:
        """Compile-time configuration (csrc/config.cuh)."""
        shape = [f"-DHEAD_DIM={self.head_dim}", f"-DHEADS={self.heads}", f"-DBF16={int(self.bf16)}"]
        return [*shape, f"-DSTAGE_BYTES={self.stage_bytes}"]

    @property
    def stage_bytes(self) -> int:
        """What the scan reads of a group: 2-bit keys, scales and minima."""
        return GROUP * self.head_dim // 4 + 2 * 2 * self.head_dim


def scan_variant(q: Tensor, kv_heads: int, group: int) -> ScanVariant | None:
    """The variant for one query per row, or None: then Triton's kernels run.

    It needs Hopper or newer, groups of 128, head_dim 64 or 128, at most 8 query heads per KV head, 16-bit queries, and
    rows that 16-byte loads can read.
    """
    if not q.is_cuda or torch.version.cuda is None or group != GROUP or q.shape[3] not in HEAD_DIMS:
        return None
    heads = q.shape[2] // kv_heads
    if q.shape[1] > 1 or heads > CUDA_SCAN_HEADS or torch.cuda.get_device_capability(q.device) < (9, 0):
        return None
    if q.dtype not in (torch.bfloat16, torch.float16) or not aligned(q):
        return None
    return ScanVariant(q.shape[3], heads, q.dtype == torch.bfloat16)


def aligned(tensor: Tensor) -> bool:
    """Whether 16-byte loads can read its rows."""
    strides = tensor.stride()
    return strides[-1] == 1 and tensor.data_ptr() % 16 == 0 and not any(s % ALIGNMENT for s in strides[:-1])


def parts_of(rows: int, num_sms: int, least: int = 1) -> int:
    """CTAs of a row, at least `least`: as many as run at once, or in the fewest turns that give enough."""
    turns = -(-least * rows // num_sms)  # rounded up
    return turns * num_sms // rows
