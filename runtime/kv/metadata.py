"""Attention metadata of one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ridgeplan.kernels.attention.scores import ScoreRequest


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """Tokens of a layer that a pass reads beside a run of recent ones, as `sparse_decode_attention` takes them.

    index: int32 [rows, 1 or kv_heads, K], numbers of tokens, or of pages of `page` tokens. count: int32 [rows, 1 or
    kv_heads], the entries that hold. value_rows: the codes of values by token, if these are read.
    """

    index: Tensor
    count: Tensor
    page: int = 1
    value_rows: Tensor | None = None


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Where one forward pass writes its tokens' KV, and what it attends to; all tensors are on the device.

    positions, slots: int64 [rows, queries], positions of the new tokens in the text and in the full-precision store.
    begin, end: int32 [rows], the range of full-precision slots visible to the first query; each later query sees one
    more. groups: int32 [rows], leading groups that are read as codes, or None for no codes. lower: whether lower codes
    are read with the upper ones. select: for a layer's number and queries, the tokens among the groups or before
    `begin` that are read, where not all are. scores: where attention leaves a layer's scores of what it read, if asked.
    """

    positions: Tensor
    slots: Tensor
    begin: Tensor
    end: Tensor
    groups: Tensor | None
    lower: bool
    select: Callable[[int, Tensor], TokenIndex] | None = None
    scores: Callable[[int], ScoreRequest] | None = None
