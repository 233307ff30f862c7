"""Decode attention to chosen tokens or pages: by an index list, or chosen by the query itself from 2-bit keys.

Not here: how an index list is made (kernels/selection).
"""

import torch
from torch import Tensor

from ridgeplan.kernels.attention.inputs import AttentionInputs
from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.kv_cache import require_rows
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.token_rows import TokenRows
from ridgeplan.kernels.selection import check_scan, two_bit_top_k
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, TwoBitKeys
from ridgeplan.kernels.sparse_attention.cuda import (
    find_index_list_kernel,
    find_progressive_kernel,
    index_list_attention_cuda,
    progressive_attention_cuda,
)
from ridgeplan.kernels.sparse_attention.reference import sparse_decode_attention_reference
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost


def sparse_decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    begin: Tensor,
    end: Tensor,
    index: Tensor,
    count: Tensor,
    codes: QuantizedKV | TokenRows | None = None,
    groups: Tensor | None = None,
    *,
    value_rows: Tensor | None = None,
    slots: Tensor | None = None,
    page: int = 1,
    lower: bool = False,
    scale: float | None = None,
    splits: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attention of a few queries per row to chosen earlier tokens and all recent ones -> [B, T, Hq, D] in q's dtype.

    q, keys, values, begin, end, codes, groups, lower, scale, splits: as in `decode_attention`; query t of row b also
    sees the full-precision slots begin[b] <= j < end[b] + t.
    index: int32 [B, Hs, K], count: int32 [B, Hs], on the device; Hs is Hkv (a set per KV head) or 1 (one for all).
    index[b, h, :count[b, h]] are distinct page numbers, in any order, of pages of `page` tokens (page 1: tokens). With
    codes they name tokens of the quantized groups, read as INT8 when `lower`, else as INT4; tokens from
    groups[b] * group on are skipped. Without codes they name slots of the full-precision store below begin[b]; others
    are skipped. Sinks are ordinary entries.
    value_rows: uint8 [B, Hkv, groups, G, D/2] of `DraftPlanes`, or None. With it, upper codes of values are read from
    there: a few sectors per token, where QuantizedKV's transposed ones take one per channel.
    slots: int32, as index, with codes that are `TokenRows`: the tokens of page index[b, h, i] are in the slots from
    slots[b, h, i] * page on.

    Raises ValueError when shapes or dtypes disagree, when `page` does not divide the group, and when `lower` is set for
    codes that hold the upper plane only or together with value_rows.
    """
    inputs = AttentionInputs(q, keys, values, begin, end, codes, groups, lower, scale)
    _check_choice(index, count, len(q), keys.shape[1])
    if page < 1 or (codes is not None and codes.group % page):
        raise ValueError(f"page {page} must be positive and divide the group")
    if value_rows is not None and (
        lower or not isinstance(codes, QuantizedKV) or value_rows.shape != codes.key_upper.shape
    ):
        raise ValueError("value_rows holds the upper codes of the values of `codes`: give both, and lower=False")
    if (slots is not None) != isinstance(codes, TokenRows):
        raise ValueError("slots hold the tokens of codes that are TokenRows: give both")
    if slots is not None and (slots.shape != index.shape or slots.dtype != torch.int32):
        raise ValueError(f"slots are {slots.dtype} {list(slots.shape)}; allowed: int32 {list(index.shape)}, as index")
    if not uses_gpu_kernel(backend, q):
        return sparse_decode_attention_reference(inputs, index, count, page, slots)
    if backend == "auto" and splits is None and isinstance(codes, QuantizedKV) and value_rows is not None:
        kernel = find_index_list_kernel(q, keys, values, codes)
        if kernel is not None:
            return index_list_attention_cuda(kernel, inputs, index, count, value_rows, page)
    from ridgeplan.kernels.sparse_attention.triton import sparse_decode_attention_triton

    return sparse_decode_attention_triton(inputs, index, count, value_rows, page, splits, slots)


def _check_choice(index: Tensor, count: Tensor, batch: int, kv_heads: int) -> None:
    sets = index.shape[:2]
    if index.dim() != 3 or sets[0] != batch or sets[1] not in (1, kv_heads) or count.shape != sets:
        raise ValueError(
            f"index {list(index.shape)} and count {list(count.shape)}; allowed: [{batch}, 1 or {kv_heads}, K] and "
            f"[{batch}, 1 or {kv_heads}]"
        )
    if index.dtype != torch.int32 or count.dtype != torch.int32:
        raise ValueError(f"index and count are {index.dtype} and {count.dtype}; allowed: int32")


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
    require_rows(codes.batch, torch.int32, q.device, begin=begin, end=end, k=k)
    kernel = find_progressive_kernel(q, keys, values, codes) if backend == "auto" else None
    if kernel is not None:
        inputs = AttentionInputs(q, keys, values, begin, end, codes, groups, softmax_scale=scale)
        return progressive_attention_cuda(kernel, inputs, planes, k, sinks)
    index, count = two_bit_top_k(q, two_bit_keys, groups, k, max_k=max_k, sinks=sinks, scale=scale, backend=backend)
    return sparse_decode_attention(
        q, keys, values, begin, end, index, count, codes, groups,
        value_rows=planes.value_rows, scale=scale, backend=backend,
    )  # fmt: skip


def sparse_attention_cost(
    q: Tensor, kv_heads: int, index: Tensor, page: int, full_tokens: int, bits: int, group: int, splits: int
) -> Cost:
    """Cost of `sparse_decode_attention` without its merge, to all pages of `index` and `full_tokens` recent tokens."""
    batch, queries, q_heads, head_dim = q.shape
    kv = ops.KVRead(index.shape[2] * page, full_tokens, bits, q.element_size(), group, splits)
    return ops.sparse_attention(batch, queries, q_heads, kv_heads, head_dim, kv, index.numel())


def progressive_cost(
    q: Tensor, codes: QuantizedKV, tokens: int, chosen_tokens: int, full_tokens: int, splits: int
) -> Cost:
    """Cost of `progressive_attention` as one kernel: scores and choices are neither written nor read."""
    kv = ops.KVRead(chosen_tokens, full_tokens, ops.UPPER_BITS, q.element_size(), codes.group, splits)
    return ops.progressive_attention(codes.batch, q.shape[2], codes.kv_heads, codes.head_dim, tokens, kv)
