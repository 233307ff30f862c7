"""Scores of a retrieval head: attention probabilities of one query a row, the largest of each group of query heads."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.kv_cache import require_rows
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost


def head_scores(q: Tensor, keys: Tensor, lengths: Tensor, groups: int, *, backend: Backend = "auto") -> Tensor:
    """Attention of one query per row, the largest of each group of query heads -> float32 [R, groups, slots].

    q: [R, Hq, D]. keys: [R, Hkv, slots, D]. lengths: int32 [R] on the device, leading slots that a query sees; scores
    of later ones are undefined. A captured CUDA graph reads no more keys than rows hold at its replay. groups: sets of
    as many query heads each: KV heads of the target, so that GQA and MQA take the element-wise maximum over the heads
    that share one (SpeContext, section 4.3).
    Raises ValueError when shapes disagree, or lengths is not int32 [R].
    """
    rows, q_heads, head_dim = q.shape
    if q_heads % groups or q_heads % keys.shape[1] or (keys.shape[0], keys.shape[3]) != (rows, head_dim):
        raise ValueError(f"q {list(q.shape)}, keys {list(keys.shape)} and {groups} groups disagree")
    require_rows(rows, torch.int32, q.device, lengths=lengths)
    if not uses_gpu_kernel(backend, q):
        return head_scores_reference(q, keys, lengths, groups)
    from ridgeplan.kernels.selection.triton import head_scores_triton

    return head_scores_triton(q, keys, lengths, groups)


def head_scores_reference(q: Tensor, keys: Tensor, lengths: Tensor, groups: int) -> Tensor:
    """The same in plain torch; later slots score 0."""
    unseen = torch.arange(keys.shape[2], device=keys.device) >= lengths[:, None]
    weights = head_logits(q, keys).masked_fill_(unseen[:, None], -torch.inf).softmax(-1)
    return weights.unflatten(1, (groups, -1)).amax(2)


def head_logits(q: Tensor, keys: Tensor) -> Tensor:
    """Logits of all slots, float32 [R, Hq, slots]: those of one head rank tokens as its attention does."""
    kv_heads, slots = keys.shape[1:3]
    heads = q.unflatten(1, (kv_heads, -1)) * q.shape[-1] ** -0.5
    return _products(heads.flatten(0, 1), keys.flatten(0, 1).mT).view(len(q), -1, slots)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Batched products in float32, whatever the dtype of the factors."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left, right).float()


def head_scores_cost(q: Tensor, keys: Tensor, groups: int) -> Cost:
    """Cost of `head_scores` where rows see all slots."""
    rows, kv_heads, slots, head_dim = keys.shape
    return ops.head_scores(rows, q.shape[1], kv_heads, head_dim, slots, groups, keys.element_size())
