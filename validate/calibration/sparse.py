"""Trials of a sparse draft's operations: scores of 2-bit keys, choice, attention to chosen tokens, and all in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.draft_planes import DraftPlanes
from ridgeplan.kernels.selection.top_k import top_k
from ridgeplan.kernels.selection.two_bit_keys import TwoBitKeys
from ridgeplan.kernels.selection.two_bit_top_k import two_bit_top_k
from ridgeplan.kernels.sparse_attention import sparse_decode_attention
from ridgeplan.kernels.sparse_attention.progressive import progressive_attention
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.latency import SCANS, WIDE, WIDE_SCANS
from ridgeplan.roofline.ops import merge
from ridgeplan.roofline.sparsity import sparse_ops
from ridgeplan.validate.calibration.attention import KV_GROUP, DecodeSize, random_codes
from ridgeplan.validate.timing import Bench, Trial

RATIO = 0.07  # of the tokens that drafts read
SPARSE_CLASSES = (*SCANS, *WIDE_SCANS, "sparse_attention", "sparse_attention_full")


@dataclass(frozen=True, eq=False)
class SparseDraft:
    """One draft query per sequence over `variants` caches of random codes, and what it chooses."""

    size: DecodeSize
    bench: Bench
    num_sms: int

    @property
    def chosen(self) -> int:
        """Tokens that a KV head chooses."""
        return max(1, int(RATIO * self.size.groups * KV_GROUP))

    @cached_property
    def variants(self) -> int:
        """Stores of codes that together exceed the device's caches, as do their 2-bit keys."""
        heads = self.size.heads
        return self.bench.variants(self.size.batch * heads.kv_heads * self.size.groups * KV_GROUP * heads.head_dim / 2)

    @cached_property
    def codes(self) -> QuantizedKV:
        """Codes of all variants."""
        return random_codes(self.bench, self.size, self.variants)

    @cached_property
    def planes(self) -> DraftPlanes:
        """Random planes of all variants."""
        found = DraftPlanes.allocate(self.codes)
        noise = self.bench.pool.view(torch.uint8)
        for plane in (found.key_two_bit, found.value_rows):
            plane.copy_(noise[: plane.numel()].view(plane.shape))
        return found

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and the recent tokens' keys and values."""
        heads, batch = self.size.heads, self.size.batch
        q = self.bench.random(batch, 1, heads.q_heads, heads.head_dim)
        keys, values = self.bench.random(2, batch, heads.kv_heads, self.size.full_tokens, heads.head_dim)
        return q, keys, values

    def integers(self, value: int, rows: int | None = None) -> Tensor:
        """int32 filled with `value`, one per sequence by default."""
        return torch.full((rows or self.size.batch,), value, dtype=torch.int32, device=self.bench.device)

    @cached_property
    def lengths(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """begin, end, groups and k of every sequence."""
        values = (0, self.size.full_tokens, self.size.groups, self.chosen)
        begin, end, groups, k = (self.integers(value) for value in values)
        return begin, end, groups, k

    @cached_property
    def index(self) -> Tensor:
        """Random distinct tokens for every KV head, in ascending order."""
        sets = (self.size.batch, self.size.heads.kv_heads)
        drawn = torch.rand(*sets, self.size.groups * KV_GROUP, device=self.bench.device)
        return drawn.topk(self.chosen).indices.sort(-1).values.int()

    @cached_property
    def _count(self) -> Tensor:
        return self.integers(self.chosen, self.index.shape[0] * self.index.shape[1]).view(self.index.shape[:2])

    def cache(self, variant: int) -> tuple[QuantizedKV, DraftPlanes]:
        """One variant's codes and planes."""
        rows = slice(variant * self.size.batch, (variant + 1) * self.size.batch)
        return self.codes.rows(rows), self.planes.rows(rows)

    def choose(self, variant: int) -> Tensor:
        """The choice by 2-bit keys."""
        _, _, groups, k = self.lengths
        keys = TwoBitKeys.of(*self.cache(variant))
        return two_bit_top_k(self.tensors[0], keys, groups, k, max_k=self.chosen)[0]

    def attend(self, variant: int) -> Tensor:
        """Attention to the index list."""
        begin, end, groups, _ = self.lengths
        codes, planes = self.cache(variant)
        return sparse_decode_attention(
            *self.tensors, begin, end, self.index, self._count, codes, groups, value_rows=planes.value_rows
        )

    @cached_property
    def full_store(self) -> Tensor:
        """Keys and values of all tokens in full precision, [variants, 2, batch, kv_heads, tokens, head_dim]."""
        size, heads = self.size, self.size.heads
        tokens = size.groups * KV_GROUP + size.full_tokens
        one = 2 * size.batch * heads.kv_heads * tokens * heads.head_dim * self.bench.element_bytes
        sizes = 2, size.batch, heads.kv_heads, tokens, heads.head_dim
        return self.bench.random(self.bench.variants(one), *sizes)

    def attend_full(self, variant: int) -> Tensor:
        """Attention to the index list in full precision."""
        begin, end, groups, _ = self.lengths
        keys, values = self.full_store[variant]
        old = groups * KV_GROUP
        return sparse_decode_attention(self.tensors[0], keys, values, begin + old, end + old, self.index, self._count)

    def progressive(self, variant: int) -> Tensor:
        """Scan, choice and attention."""
        begin, end, groups, k = self.lengths
        return progressive_attention(*self.tensors, begin, end, *self.cache(variant), groups, k, max_k=self.chosen)

    @property
    def choose_cost(self) -> Cost:
        """Of `choose`."""
        size, heads = self.size, self.size.heads
        shape = size.batch, heads.q_heads, heads.kv_heads, heads.head_dim
        return sparse_ops.two_bit_top_k(*shape, size.groups * KV_GROUP, KV_GROUP, self.chosen)

    def attend_cost(self, bits: int) -> Cost:
        """Of `attend` to codes of `bits` bits, or of `attend_full` with 0, merge included."""
        size, heads = self.size, self.size.heads
        shape, splits = (size.batch, 1, heads.q_heads, heads.kv_heads, heads.head_dim), self._splits
        attending = sparse_ops.sparse_attention(
            *shape, self.chosen, size.full_tokens, bits, self.bench.element_bytes, KV_GROUP, splits, self.index.numel()
        )
        return attending + merge(size.batch, 1, heads.q_heads, heads.head_dim, splits, self.bench.element_bytes)

    @property
    def progressive_cost(self) -> Cost:
        """Of `progressive`."""
        size, heads = self.size, self.size.heads
        return sparse_ops.progressive_attention(
            size.batch, heads.q_heads, heads.kv_heads, heads.head_dim, size.groups * KV_GROUP, self.chosen,
            size.full_tokens, self.bench.element_bytes, KV_GROUP, self._splits,
        )  # fmt: skip

    @property
    def _splits(self) -> int:
        return max(1, self.num_sms // (self.size.batch * self.size.heads.kv_heads))


def sparse_trials(bench: Bench, kind: str, sizes: Iterable[DecodeSize], num_sms: int) -> Iterator[Trial]:
    """The trials of class `kind`, one of `SPARSE_CLASSES`."""
    for size in sizes:
        draft = SparseDraft(size, bench, num_sms)
        call, cost = {
            "two_bit_scan": (draft.choose, draft.choose_cost),
            "sparse_attention": (draft.attend, draft.attend_cost(sparse_ops.UPPER_BITS)),
            "sparse_attention_full": (draft.attend_full, draft.attend_cost(0)),
            "progressive_attention": (draft.progressive, draft.progressive_cost),
        }[kind.removesuffix(WIDE)]
        variants = len(draft.full_store) if kind == "sparse_attention_full" else draft.variants
        yield Trial(kind, f"{size.name}, {RATIO:.0%} chosen", cost, call, variants)


def top_k_trials(bench: Bench, sizes: Iterable[DecodeSize]) -> Iterator[Trial]:
    """The choice of every KV head's best tokens; scores have just been written, so they are cached."""
    for size in sizes:
        rows, tokens = size.batch * size.heads.kv_heads, size.groups * KV_GROUP
        chosen = max(1, int(RATIO * tokens))
        scores = torch.randn(rows, tokens, device=bench.device)
        lengths, k = (torch.full((rows,), x, dtype=torch.int32, device=bench.device) for x in (tokens, chosen))
        yield Trial("top_k", size.name, sparse_ops.top_k(rows, tokens, chosen), _choosing(scores, lengths, k, chosen))


def _choosing(scores: Tensor, lengths: Tensor, k: Tensor, chosen: int) -> Callable[[int], object]:
    return lambda _: top_k(scores, lengths, k, chosen)
