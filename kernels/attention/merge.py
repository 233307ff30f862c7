"""Merge of the partial results of split-KV attention by their log-sum-exps."""

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel


def merge(partial: Tensor, lse: Tensor, dtype: torch.dtype, *, backend: Backend = "auto") -> Tensor:
    """Softmax-weighted sum of splits: partial float32 [..., splits, D], lse [..., splits] -> [..., D].

    A partial is normalized over its own tokens, and lse is the natural logarithm of its sum of exponentials. An empty
    split has lse -inf and weight 0, and its partial is not read; if all splits are empty, the result is 0.
    """
    if not uses_gpu_kernel(backend, partial):
        return merge_reference(partial, lse, dtype)
    from ridgeplan.kernels.attention.merge_triton import merge_triton

    return merge_triton(partial, lse, dtype)


def merge_reference(partial: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """The same in plain torch."""
    row_max = lse.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(lse - row_max)[..., None]
    weighted = torch.where(weights > 0, partial * weights, 0)
    return (weighted.sum(-2) / weights.sum(-2).clamp_min(torch.finfo(torch.float32).tiny)).to(dtype)
