"""Scores of pages of keys by their bounds (Quest, Tang et al. 2024, algorithm 1)."""

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.kv_cache import require_rows


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
    require_rows(batch, torch.int32, pages=pages)
    if not uses_gpu_kernel(backend, q):
        return page_scores_reference(q, bounds)
    from ridgeplan.kernels.selection.pages_triton import page_scores_triton

    return page_scores_triton(q, bounds, pages)


def page_scores_reference(q: Tensor, bounds: Tensor) -> Tensor:
    """The same in plain torch, for all pages."""
    heads = q[:, 0].float().unflatten(1, (bounds.shape[1], -1))  # [B, Hkv, heads of the KV head, D]
    low, high = bounds.float().unbind(3)
    return (heads.clamp(max=0) @ low.mT + heads.clamp(min=0) @ high.mT).amax(2)
