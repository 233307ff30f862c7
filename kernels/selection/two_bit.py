"""Scores of quantized tokens from 2-bit keys: how much of its attention a query would pay to each."""

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.kv_cache import require_rows
from ridgeplan.kernels.selection.draft_planes import unpack_two_bit
from ridgeplan.kernels.selection.two_bit_keys import SAMPLES, TwoBitKeys

LEAST_HEAD_DIM = (
    64  # of the kernel: a quarter of the channels, those of one place in a byte, fills a tensor core's tile
)


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
    if not uses_gpu_kernel(backend, q) or (backend == "auto" and q.shape[3] < LEAST_HEAD_DIM):
        return two_bit_scores_reference(q, keys, lse, scale)
    from ridgeplan.kernels.selection.two_bit_triton import two_bit_scores_triton

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
    require_rows(batch, torch.int32, groups=groups)
