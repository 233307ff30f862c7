"""A query's choice of tokens by their 2-bit keys: scores and top-k, in two launches where a GPU has them."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import require_rows
from ridgeplan.kernels.selection.top_k import top_k
from ridgeplan.kernels.selection.two_bit import check_scan, two_bit_scores
from ridgeplan.kernels.selection.two_bit_keys import TwoBitKeys
from ridgeplan.kernels.selection.two_bit_top_k_cuda import find_kernel, two_bit_top_k_cuda


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
    require_rows(batch, torch.int32, k=k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kernel = find_kernel(q, keys) if backend == "auto" else None
    if kernel is not None:
        return two_bit_top_k_cuda(kernel, q, keys, groups, k, max_k, sinks, scale)
    scores = two_bit_scores(q, keys, groups, scale=scale, backend=backend)
    scores[:, :, :sinks] = torch.inf
    tokens, wanted = (x[:, None].expand(-1, keys.kv_heads).flatten() for x in (groups * keys.group, k))
    index, count = top_k(scores.flatten(0, 1), tokens.int(), wanted, max_k, backend=backend)
    return index.view(batch, -1, max_k), count.view(batch, -1)
