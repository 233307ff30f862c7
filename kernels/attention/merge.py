"""Merge of split-KV partial results by their log-sum-exp, with its plain-torch twin."""

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_triton


def merge(partial: Tensor, lse: Tensor, dtype: torch.dtype, *, backend: Backend = "auto") -> Tensor:
    """Softmax-weighted sum of splits: partial float32 [..., splits, D], lse [..., splits] -> [..., D].

    Each partial is normalized over its own tokens, lse is the natural log of its sum of exponentials. An
    empty split has lse -inf, weight 0 and an unread partial; where all are empty the result is 0.
    """
    if not uses_triton(backend, partial):
        return merge_reference(partial, lse, dtype)
    from ridgeplan.kernels.attention.merge_triton import merge_triton

    return merge_triton(partial, lse, dtype)


def merge_reference(partial: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """The same in plain torch."""
    top = lse.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(lse - top)[..., None]
    weighted = torch.where(weights > 0, partial * weights, 0)
    return (weighted.sum(-2) / weights.sum(-2).clamp_min(torch.finfo(torch.float32).tiny)).to(dtype)
