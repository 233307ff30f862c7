"""Suffix lookup, which drafts for free: it proposes what followed the latest occurrence of a text's suffix."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.execution import MAX_SUFFIX_TOKENS


class Proposals(NamedTuple):
    """Proposed tokens int64 [rows, depth], and how many of them count, int64 [rows]: all of a row's, or 0."""

    tokens: Tensor
    counts: Tensor


def suffix_lookup(text: Tensor, lengths: Tensor, depth: int, min_match: int, *, backend: Backend = "auto") -> Proposals:
    """Proposes what followed the latest of the longest earlier occurrences of each text's suffix (prompt lookup).

    text: int32 [rows, capacity]; lengths: int32 [rows], tokens of each row, 1 or more. An occurrence has `min_match` to
    `MAX_SUFFIX_TOKENS` equal tokens and ends before the text does. One that ends `period` tokens before the end
    proposes the last `period` tokens over and over. Rows without an occurrence have no proposals; their tokens are some
    of the text's.
    """
    if not uses_gpu_kernel(backend, text):
        return Proposals(*suffix_lookup_reference(text, lengths, depth, min_match))
    from ridgeplan.kernels.sampling.suffix_lookup_triton import suffix_lookup_triton

    return Proposals(*suffix_lookup_triton(text, lengths, depth, min_match))


def suffix_lookup_reference(text: Tensor, lengths: Tensor, depth: int, min_match: int) -> tuple[Tensor, Tensor]:
    """See `suffix_lookup`."""
    rows, capacity = text.shape
    lengths = lengths.long()
    ends = torch.arange(capacity, device=text.device)  # an occurrence's end: the place of the token after it
    matching = (ends >= 1) & (ends < lengths[:, None])
    matched = torch.zeros(rows, capacity, dtype=torch.int64, device=text.device)
    for back in range(1, MAX_SUFFIX_TOKENS + 1):
        equal = text == text.gather(1, (lengths[:, None] - back).clamp_min(0))
        matching = matching & (ends >= back) & equal.roll(back, dims=1)
        if not bool(matching.any()):
            break
        matched += matching
    ranks = torch.where(matched >= min_match, matched * capacity + ends, 0)
    best = ranks.amax(1)
    end = best % capacity
    period = (lengths - end).clamp_min(1)
    tokens = text.long().gather(1, end[:, None] + torch.arange(depth, device=text.device) % period[:, None])
    return tokens, (best > 0) * depth


def suffix_lookup_cost(text: Tensor) -> Cost:
    """Cost of `suffix_lookup` where texts fill their capacity."""
    return ops.suffix_lookup(*text.shape)
