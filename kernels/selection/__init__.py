"""Which tokens a sparse draft reads: scores from pages or 2-bit keys, and top-k.

Not here: attention to the chosen tokens (kernels/sparse_attention), and when a policy chooses (runtime/policies).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.kv_cache import require_rows
from ridgeplan.kernels.selection.cuda import find_two_bit_kernels, two_bit_top_k_cuda
from ridgeplan.kernels.selection.draft_planes import SAMPLES, TwoBitKeys, unpack_two_bit
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost


def page_bounds(keys: Tensor, page: int) -> Tensor:
    """Smallest and largest key of every page and channel, in keys' dtype -> [B, Hkv, pages, 2, D].

    keys: [B, Hkv, pages * page, D]. Raises ValueError when the keys are not whole pages.
    """
    if page < 1 or keys.shape[2] % page:
        raise ValueError(f"{keys.shape[2]} keys are not whole pages of {page}")
    return torch.stack(keys.unflatten(2, (-1, page)).aminmax(dim=3), dim=3)


def page_scores(q: Tensor, bounds: Tensor, pages: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Upper bounds of q . k over the keys of each page, the largest of a KV head's query heads -> float32 [B, Hkv, P].

    q: [B, 1, Hq, D]. bounds: [B, Hkv, P, 2, D] of `page_bounds`. pages: int32 [B] on the device, pages of each row;
    scores of later ones are undefined. A bound is the sum over channels of max(q * smallest, q * largest), without the
    softmax scale.

    Raises ValueError when the shapes disagree, or pages is not int32 [B].
    """
    batch, queries, q_heads, head_dim = q.shape
    kv_heads = bounds.shape[1]
    if queries != 1 or q_heads % kv_heads or bounds.shape != (batch, kv_heads, bounds.shape[2], 2, head_dim):
        raise ValueError(f"q {list(q.shape)} and bounds {list(bounds.shape)} disagree; allowed: one query, equal sizes")
    require_rows(batch, torch.int32, q.device, pages=pages)
    if not uses_gpu_kernel(backend, q):
        return page_scores_reference(q, bounds)
    from ridgeplan.kernels.selection.triton import page_scores_triton

    return page_scores_triton(q, bounds, pages)


def page_scores_reference(q: Tensor, bounds: Tensor) -> Tensor:
    """The same in plain torch, for all pages."""
    heads = q[:, 0].float().unflatten(1, (bounds.shape[1], -1))  # [B, Hkv, heads of the KV head, D]
    low, high = bounds.float().unbind(3)
    return (heads.clamp(max=0) @ low.mT + heads.clamp(min=0) @ high.mT).amax(2)


def top_k(
    scores: Tensor, lengths: Tensor, k: Tensor, max_k: int, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """The numbers of each row's k largest scores, in ascending order -> index int32 [R, max_k], count int32 [R].

    scores: float32 [R, N]; row r holds lengths[r] of them (int32 [R]). k: int32 [R], how many to choose; count[r] is
    the smallest of k[r], lengths[r] and max_k, and index[r, count[r]:] is undefined. All three are on the device, so
    the choice follows a growing context inside a captured CUDA graph. Of equal scores the lower numbers are chosen, so
    the result is deterministic. Scores may be infinite; a NaN counts as the lowest.

    Raises ValueError for other dtypes or shapes, and for max_k below 1.
    """
    if scores.dtype != torch.float32 or scores.dim() != 2 or max_k < 1:
        raise ValueError(
            f"scores are {scores.dtype} {list(scores.shape)} with max_k {max_k}; allowed: float32 [rows, n], from 1"
        )
    require_rows(len(scores), torch.int32, scores.device, lengths=lengths, k=k)
    if not uses_gpu_kernel(backend, scores):
        return top_k_reference(scores, lengths, k, max_k)
    from ridgeplan.kernels.selection.triton import top_k_triton

    return top_k_triton(scores, lengths, k, max_k)


def top_k_reference(scores: Tensor, lengths: Tensor, k: Tensor, max_k: int) -> tuple[Tensor, Tensor]:
    """The same in plain torch: a stable sort in descending order."""
    rows, width = scores.shape
    places = torch.arange(width, device=scores.device)
    known = scores.masked_fill(scores.isnan(), -torch.inf)
    # Sorted by (outside the row, score), so that even a score of -inf comes before what lies beyond the row.
    order = known.sort(dim=1, descending=True, stable=True).indices
    outside = (order >= lengths[:, None]).int()
    order = order.gather(1, outside.sort(dim=1, stable=True).indices)
    count = torch.minimum(lengths, k).clamp(0, min(max_k, width)).int()
    chosen = order.masked_fill(places >= count[:, None], width).sort(dim=1).values[:, :max_k]
    index = torch.zeros(rows, max_k, dtype=torch.int32, device=scores.device)
    index[:, : chosen.shape[1]] = chosen
    return index, count


MIN_HEAD_DIM = 64  # of the kernel: a quarter of the channels, those of one place in a byte, fills a tensor core's tile


def two_bit_scores(
    q: Tensor, keys: TwoBitKeys, groups: Tensor, *, scale: float | None = None, backend: Backend = "auto"
) -> Tensor:
    """Scores of the tokens of each row's first `groups` groups -> float32 [B, Hkv, all groups * G], else undefined.

    q: [B, 1, Hq, D]. groups: int32 [B] on the device. A token's score is log sum_h exp(s_h - lse_h) over the query
    heads h of the KV head, where s_h = scale * q_h . k with its 2-bit key, and lse_h is `sampled_lse`. With the
    log-sum-exp over all tokens exp(score) would be the sum of the heads' attention probabilities, by which tokens are
    chosen; what all heads of a KV head lack to it changes no choice.

    Raises ValueError for more than one query, and when shapes disagree.
    """
    check_scan(q, keys, groups)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    lse = sampled_lse(q, keys, groups, scale)
    if not uses_gpu_kernel(backend, q) or (backend == "auto" and q.shape[3] < MIN_HEAD_DIM):
        return two_bit_scores_reference(q, keys, lse, scale)
    from ridgeplan.kernels.selection.triton import two_bit_scores_triton

    return two_bit_scores_triton(q, keys, groups, lse, scale)


def two_bit_scores_reference(q: Tensor, keys: TwoBitKeys, lse: Tensor, scale: float) -> Tensor:
    """The same in plain torch, of all groups. lse: float32 [B, Hq]."""
    logits = two_bit_logits(q, keys, scale)
    return (logits - lse.view(*logits.shape[:3], 1)).logsumexp(2)


def sampled_lse(q: Tensor, keys: TwoBitKeys, groups: Tensor, scale: float) -> Tensor:
    """The log of the sum of exp(s_h) over a sample of each row's groups -> float32 [B, Hq].

    All groups of a row that has up to SAMPLES; else the first, the last, and others evenly between. Of a row without
    groups it is undefined.
    """
    row, place = torch.arange(len(q), device=q.device)[:, None], torch.arange(SAMPLES, device=q.device)
    count = groups[:, None].clamp_max(SAMPLES)
    at = (place * (groups[:, None] - 1) // (count - 1).clamp_min(1)).clamp(0, keys.groups - 1)
    sample = TwoBitKeys(*(held[row, :, at].transpose(1, 2) for held in (keys.codes, keys.scale, keys.minimum)))
    logits = two_bit_logits(q, sample, scale).unflatten(3, (SAMPLES, -1))
    taken = (place < count)[:, None, None, :, None]
    return logits.masked_fill(~taken, -torch.inf).flatten(3).logsumexp(3).flatten(1)


def two_bit_logits(q: Tensor, keys: TwoBitKeys, scale: float) -> Tensor:
    """scale * q_h . k with 2-bit keys, of all groups -> float32 [B, Hkv, query heads of a KV head, groups * G]."""
    heads = (q[:, 0].float() * scale).unflatten(1, (keys.kv_heads, -1))[:, :, None]  # [B, Hkv, 1, heads, D]
    step, low = keys.scale.float()[..., None, :], keys.minimum.float()[..., None, :]
    middle = unpack_two_bit(keys.codes) * 4 + 1.5
    return (heads @ (middle * step + low).mT).transpose(2, 3).flatten(3)


def check_scan(q: Tensor, keys: TwoBitKeys, groups: Tensor) -> None:
    """Raises ValueError where a scan's arguments disagree."""
    batch, queries, q_heads, head_dim = q.shape
    if queries != 1 or q_heads % keys.kv_heads or (batch, head_dim) != (keys.batch, keys.head_dim):
        raise ValueError(
            f"q {list(q.shape)} does not fit keys of batch {keys.batch}, {keys.kv_heads} KV heads and head_dim "
            f"{keys.head_dim}; allowed: one query per row"
        )
    require_rows(batch, torch.int32, q.device, groups=groups)


def two_bit_top_k(
    q: Tensor,
    keys: TwoBitKeys,
    groups: Tensor,
    k: Tensor,
    *,
    max_k: int,
    sinks: int = 0,
    scale: float | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The k tokens of each KV head that `two_bit_scores` ranks first, in ascending order.

    -> index int32 [B, Hkv, max_k] and count int32 [B, Hkv], as `top_k` has them.

    q, keys, groups: as in `two_bit_scores`. k: int32 [B] on the device, how many to choose of a row's first `groups`
    groups. The first `sinks` tokens come before all others.

    On Hopper, where it supports the shapes, backend "auto" compares scores in steps of 1/8 of a power of two, over the
    range of positive floats; of those that tie with the last one the lower numbers are chosen. That does not depend on
    the batch, nor on how many CTAs share a row.

    Raises ValueError as `two_bit_scores` and `top_k` do.
    """
    if max_k < 1:
        raise ValueError(f"max_k is {max_k}; allowed: from 1")
    batch = len(q)
    check_scan(q, keys, groups)
    require_rows(batch, torch.int32, q.device, k=k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kernel = find_two_bit_kernels(q, keys) if backend == "auto" else None
    if kernel is not None:
        return two_bit_top_k_cuda(kernel, q, keys, groups, k, max_k, sinks, scale)
    scores = two_bit_scores(q, keys, groups, scale=scale, backend=backend)
    scores[:, :, :sinks] = torch.inf
    lengths, head_k = (x[:, None].expand(-1, keys.kv_heads).flatten() for x in (groups * keys.group, k))
    index, count = top_k(scores.flatten(0, 1), lengths.int(), head_k, max_k, backend=backend)
    return index.view(batch, -1, max_k), count.view(batch, -1)


def page_scores_cost(q: Tensor, bounds: Tensor) -> Cost:
    """Cost of `page_scores` of all pages."""
    batch, kv_heads, pages, _, head_dim = bounds.shape
    return ops.page_scan(batch, q.shape[2], kv_heads, head_dim, pages, bounds.element_size())


def top_k_cost(scores: Tensor, max_k: int) -> Cost:
    """Cost of `top_k` of whole rows of scores [R, N]."""
    rows, width = scores.shape
    return ops.top_k(rows, width, max_k)


def two_bit_top_k_cost(q: Tensor, keys: TwoBitKeys, tokens: int, max_k: int) -> Cost:
    """Cost of `two_bit_top_k` of `tokens` tokens of each row, as its CUDA kernels run it."""
    sizes = keys.batch, q.shape[2], keys.kv_heads, keys.head_dim
    return ops.two_bit_top_k(*sizes, tokens, keys.group, max_k)
