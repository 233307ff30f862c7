"""CUDA C++ kernel of attention to an index list of upper codes (csrc/), compiled at first use."""

from __future__ import annotations

from torch import Tensor

from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.sparse_attention.cuda_launch import TILES, SparseKernel, compiled_kernel, supported_variant

SOURCE, ENTRY = "sparse_attention/csrc/index_list.cu", "index_list"


def find_kernel(q: Tensor, keys: Tensor, values: Tensor, codes: QuantizedKV) -> SparseKernel | None:
    """The kernel that computes this call, or None: then Triton's does."""
    variant = supported_variant(q, keys, values, codes)
    return None if variant is None else compiled_kernel(SOURCE, ENTRY, variant, q.device, TILES * variant.tile_bytes)


def index_list_attention_cuda(
    kernel: SparseKernel,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: tuple[Tensor, Tensor, Tensor],
    index: Tensor,
    count: Tensor,
    codes: QuantizedKV,
    value_rows: Tensor,
    page: int,
    scale: float,
) -> Tensor:
    """See `ridgeplan.kernels.sparse_attention.sparse_decode_attention`; lengths: begin, end and groups."""
    index, count = index.contiguous(), count.contiguous()
    sizes = {"sets": index.shape[1], "index_capacity": index.shape[2], "page": page}
    fields = {"index": index, "count": count, **sizes}
    return kernel.run(q, keys, values, lengths, codes, value_rows.contiguous(), scale, fields)
