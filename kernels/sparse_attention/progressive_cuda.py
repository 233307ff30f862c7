"""CUDA C++ kernel of progressive attention (csrc/), compiled at first use: scan, choice and attention in one launch."""

from __future__ import annotations

from torch import Tensor

from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.draft_planes import DraftPlanes
from ridgeplan.kernels.sparse_attention.cuda_launch import (
    SparseKernel,
    SparseVariant,
    compiled_kernel,
    supported_variant,
)

SOURCE, ENTRY = "sparse_attention/csrc/progressive.cu", "progressive"
STAGES, BINS = 2, 1024


def buffer_bytes(variant: SparseVariant) -> int:
    """A warp's buffers: two groups to scan, and a tile of chosen tokens."""
    return STAGES * variant.stage_bytes + variant.tile_bytes


def find_kernel(q: Tensor, keys: Tensor, values: Tensor, codes: QuantizedKV) -> SparseKernel | None:
    """The kernel that computes this call, or None: then the separate kernels do."""
    variant = supported_variant(q, keys, values, codes)
    if variant is None:
        return None
    return compiled_kernel(SOURCE, ENTRY, variant, q.device, buffer_bytes(variant), BINS)


def progressive_attention_cuda(
    kernel: SparseKernel,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: tuple[Tensor, Tensor, Tensor],
    codes: QuantizedKV,
    planes: DraftPlanes,
    k: Tensor,
    lse: Tensor,
    threshold: Tensor,
    sinks: int,
    scale: float,
) -> Tensor:
    """See `ridgeplan.kernels.sparse_attention.progressive.progressive_attention`; lengths: begin, end and groups."""
    fields = {"two_bit": planes.key_two_bit, "k": k.contiguous(), "lse": lse, "threshold": threshold, "sinks": sinks}
    return kernel.run(
        q, keys, values, lengths, codes, planes.value_rows, scale, lambda scratch: {**fields, "scan_sum": scratch}
    )
