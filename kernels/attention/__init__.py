"""Decode attention over a KV cache, full precision or quantized, and the merge of its split results.

Not here: the codes themselves (kernels/kv_cache), and attention of prompts, for which the runtime uses torch.
"""

import torch
from torch import Tensor

from ridgeplan.kernels.attention.cuda import find_attention_kernel
from ridgeplan.kernels.attention.inputs import AttentionInputs
from ridgeplan.kernels.attention.reference import decode_attention_reference
from ridgeplan.kernels.attention.scores import ScoreRequest, collect_scores_reference
from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.kv_cache.layout import PageTable, QuantizedKV
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost

MAX_QUERIES = 16  # of a row in one call


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, begin: Tensor, end: Tensor, codes: QuantizedKV | None = None,
    groups: Tensor | None = None, *, lower: bool = False, scale: float | None = None, sinks: Tensor | None = None,
    soft_cap: float = 0.0, window: int | None = None, splits: int | None = None, scores: ScoreRequest | None = None,
    pages: PageTable | None = None, out: Tensor | None = None, backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Attention of a few queries per row -> [B, T, Hq, D] in q's dtype; rows without visible tokens give zeros.

    q: [B, T, Hq, D], T of 1..16. keys, values: [B, Hkv, C, D] in full precision, on CUDA in q's dtype. begin, end:
    int32 [B] on the device; query t of row b sees the slots begin[b] <= j < end[b] + t, so end[b] is one past the first
    query's own token. codes with groups (int32 [B]): every query also sees the row's first groups[b] quantized groups,
    as INT8 when `lower`, else as INT4. scale: softmax scale, by default D ** -0.5. sinks: [Hq], a
    logit of each head that joins its softmax without a value. soft_cap: c of scores c tanh(score / c), 0 for none.
    window: slots that query t sees, up to its own, where there are several queries; begin is the first one's.
    splits: number of splits of a row's
    tokens on CUDA, by default enough to fill the GPU. scores: where to leave the earlier tokens' scores, if anywhere.
    pages: of a paged cache, the page of each group of a row and the row's place in keys and values, which then have
    any number of rows; not with scores. out: what to write and return, contiguous, of q's shape and dtype.

    Query heads of one KV head and all T queries share a tile, so KV is read once. On CUDA the kernel may start before
    earlier kernels of the stream have ended, if those allow it (see `ridgeplan.kernels.device.cuda`). It waits for
    them before it reads q, keys and values, but not before begin, end, groups and codes. So a kernel that writes the
    latter must not let the next kernel start early, and at least one other kernel should run in between.

    Raises ValueError when heads do not divide, shapes disagree, lengths are not int32 [B], or `lower` is set for codes
    that hold the upper plane only, the scores' tensors or `out` do not fit, or scores are requested of a paged cache.
    """
    inputs = AttentionInputs(q, keys, values, begin, end, codes, groups, lower, scale, pages, sinks, soft_cap, window)
    if scores is not None and pages is not None:
        raise ValueError("scores: allowed without pages")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous()):
        raise ValueError(f"out is {out.dtype} {list(out.shape)}; allowed: {q.dtype} {list(q.shape)}, contiguous")
    if scores is not None:
        tokens = keys.shape[2] if codes is None else codes.groups * codes.group
        scores.require(q.shape[0], q.shape[1], q.shape[2], keys.shape[1], tokens)
    if not uses_gpu_kernel(backend, q):
        if scores is not None:
            collect_scores_reference(scores, inputs)
        result = decode_attention_reference(inputs)
    elif kernel := find_attention_kernel(inputs, scores) if backend == "auto" else None:
        return kernel.run(inputs, splits, scores, out)
    else:
        from ridgeplan.kernels.attention.triton import decode_attention_triton

        result = decode_attention_triton(inputs, splits, scores)
    return result if out is None else out.copy_(result)


def merge(
    partial: Tensor, lse: Tensor, dtype: torch.dtype, *, sinks: Tensor | None = None, backend: Backend = "auto"
) -> Tensor:
    """Softmax-weighted sum of splits: partial float32 [..., splits, D], lse [..., splits] -> [..., D].

    A partial is normalized over its own tokens, and lse is the natural logarithm of its sum of exponentials. An empty
    split has lse -inf and weight 0, and its partial is not read; if all splits are empty, the result is 0. sinks: [Hq],
    of the last dimension before the splits, logits of a further split whose partial is 0.
    """
    if not uses_gpu_kernel(backend, partial):
        return merge_reference(partial, lse, dtype, sinks)
    from ridgeplan.kernels.attention.triton import merge_triton

    return merge_triton(partial, lse, dtype, sinks)


def merge_reference(partial: Tensor, lse: Tensor, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    """The same in plain torch."""
    if sinks is not None:
        lse = torch.cat([lse, sinks.to(lse)[:, None].expand(*lse.shape[:-1], 1)], dim=-1)
        partial = torch.cat([partial, torch.zeros_like(partial[..., :1, :])], dim=-2)
    row_max = lse.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(lse - row_max)[..., None]
    weighted = torch.where(weights > 0, partial * weights, 0)
    return (weighted.sum(-2) / weights.sum(-2).clamp_min(torch.finfo(torch.float32).tiny)).to(dtype)


def attention_cost(
    q: Tensor, kv_heads: int, quantized_tokens: int, full_tokens: int, bits: int, group: int, splits: int
) -> Cost:
    """Cost of `decode_attention` without its merge, where each row sees `quantized_tokens` and `full_tokens`.

    bits: of the codes, 4 or 8, or 0 without codes. Lengths are on the device, so the caller passes them.
    """
    batch, queries, q_heads, head_dim = q.shape
    kv = ops.KVRead(quantized_tokens, full_tokens, bits, q.element_size(), group, splits)
    return ops.split_attention(batch, queries, q_heads, kv_heads, head_dim, kv)


def merge_cost(out: Tensor, splits: int) -> Cost:
    """Cost of `merge` of `splits` splits into out [..., D]."""
    head_dim = out.shape[-1]
    return ops.merge(out.numel() // head_dim, 1, 1, head_dim, splits, out.element_size())


def scores_cost(request: ScoreRequest, q: Tensor, tokens: int) -> Cost:
    """What `decode_attention` adds to leave the scores of `tokens` tokens of each row."""
    batch, queries, q_heads, _ = q.shape
    relative, stored = 1 if request.what == "probabilities" else 0, request.stored_rows(queries)
    summed = len(request.summed(queries))
    return ops.collect_scores(batch, q_heads, request.out.shape[1], tokens, summed, relative, stored)
