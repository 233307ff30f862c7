"""Progressive precision: the query chooses tokens by their 2-bit keys and reads the 4-bit codes of the chosen ones."""

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import require_rows
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.draft_planes import DraftPlanes
from ridgeplan.kernels.selection.two_bit import check_scan
from ridgeplan.kernels.selection.two_bit_keys import TwoBitKeys
from ridgeplan.kernels.selection.two_bit_top_k import two_bit_top_k
from ridgeplan.kernels.sparse_attention import sparse_decode_attention
from ridgeplan.kernels.sparse_attention.progressive_cuda import find_kernel, progressive_attention_cuda


def progressive_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    begin: Tensor,
    end: Tensor,
    codes: QuantizedKV,
    planes: DraftPlanes,
    groups: Tensor,
    k: Tensor,
    *,
    max_k: int,
    sinks: int = 0,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attention of one query per row to the k quantized tokens that its 2-bit scores rank first -> [B, 1, Hq, D].

    q, keys, values, begin, end: as in `decode_attention`; the query also sees the slots begin[b] <= j < end[b].
    codes, planes, groups: as in `two_bit_scores`. k: int32 [B] on the device, how many tokens each KV head chooses of
    its row's first `groups` groups, at most max_k. The first `sinks` tokens are always among them. The chosen ones are
    read as INT4.

    On Hopper, where it supports the shapes, backend "auto" is one fused kernel, whose choice is stratified: the row's
    groups are dealt in turn to `parts` CTAs (group g to part g % parts), and each chooses its share of k among its own
    groups, shares adding up to k. Scores are compared in steps of 1/8 of a power of two; of those that tie with a
    part's last one, tokens of its first groups are chosen. The other kernels choose the k best of all. Calls of the
    fused kernel on one device must not overlap.

    Raises ValueError as `two_bit_scores` and `sparse_decode_attention` do, and for k that is not int32 [B].
    """
    two_bit_keys = TwoBitKeys.of(codes, planes)
    check_scan(q, two_bit_keys, groups)
    require_rows(codes.batch, torch.int32, begin=begin, end=end, k=k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kernel = find_kernel(q, keys, values, codes) if backend == "auto" else None
    if kernel is not None:
        return progressive_attention_cuda(kernel, q, keys, values, (begin, end, groups), codes, planes, k, sinks, scale)
    index, count = two_bit_top_k(q, two_bit_keys, groups, k, max_k=max_k, sinks=sinks, scale=scale, backend=backend)
    return sparse_decode_attention(
        q, keys, values, begin, end, index, count, codes, groups,
        value_rows=planes.value_rows, scale=scale, backend=backend,
    )  # fmt: skip
