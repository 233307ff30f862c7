"""CUDA C++ kernel of progressive attention (csrc/), compiled at first use: scan, choice and attention in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.quantized_planes import GROUP
from ridgeplan.kernels.selection.draft_planes import DraftPlanes
from ridgeplan.kernels.selection.scan_variant import STAGES
from ridgeplan.kernels.sparse_attention.cuda_launch import (
    TILES,
    SparseKernel,
    SparseVariant,
    compiled_kernel,
    supported_variant,
)

SOURCE, ENTRY = "sparse_attention/csrc/progressive.cu", "progressive"
GROUP_BYTES = 2 * GROUP  # bins of a group's scores
MOST_GROUPS = 512  # of a CTA
RESERVED_BYTES = 1024  # shared memory of an SM that the driver keeps
STATIC_BYTES = 15 * 1024  # shared memory of a CTA beside its warps' buffers and the bins, at most


def buffer_bytes(variant: SparseVariant) -> int:
    """A warp's buffers: groups to scan, then tiles of chosen tokens."""
    return max(STAGES * variant.stage_bytes, TILES * variant.tile_bytes)


def most_groups(variant: SparseVariant, cta_bytes: int) -> int:
    """Groups of a CTA whose bins fit into its shared memory of `cta_bytes`."""
    return min(MOST_GROUPS, (cta_bytes - STATIC_BYTES - variant.shared_bytes(buffer_bytes(variant))) // GROUP_BYTES)


def find_kernel(q: Tensor, keys: Tensor, values: Tensor, codes: QuantizedKV) -> SparseKernel | None:
    """The kernel that computes this call, or None: then the separate kernels do."""
    variant = supported_variant(q, keys, values, codes)
    if variant is None:
        return None
    sm_bytes = torch.cuda.get_device_properties(q.device).shared_memory_per_multiprocessor
    groups = most_groups(variant, sm_bytes - RESERVED_BYTES)
    if groups < 1:
        return None
    return compiled_kernel(SOURCE, ENTRY, variant, q.device, buffer_bytes(variant), GROUP_BYTES, groups)


def progressive_attention_cuda(
    kernel: SparseKernel,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: tuple[Tensor, Tensor, Tensor],
    codes: QuantizedKV,
    planes: DraftPlanes,
    k: Tensor,
    sinks: int,
    scale: float,
) -> Tensor:
    """See `ridgeplan.kernels.sparse_attention.progressive.progressive_attention`; lengths: begin, end and groups."""
    fields = {"two_bit": planes.key_two_bit, "k": k.contiguous(), "sinks": sinks}
    return kernel.run(q, keys, values, lengths, codes, planes.value_rows, scale, fields)
