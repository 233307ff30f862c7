"""Random caches of codes and planes that cases of sparse drafts read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ridgeplan.kernels.attention import decode_attention
from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, pack_draft_planes
from ridgeplan.kernels.selection.two_bit_keys import TwoBitKeys
from ridgeplan.kernels.selection.two_bit_top_k import two_bit_top_k
from ridgeplan.kernels.sparse_attention.progressive import progressive_attention
from ridgeplan.validate.kernel_bench.case import fresh
from ridgeplan.validate.kernel_bench.sizes import GROUP, SparseSize
from ridgeplan.validate.timing import Bench

BUFFER_SLOTS = 200  # full-precision tokens beside the quantized ones, about the double buffer's mean


@dataclass(frozen=True, eq=False)
class Store:
    """Random codes of `variants` caches with their planes, the recent tokens, and queries that read each of them."""

    size: SparseSize
    q: Tensor
    keys: Tensor
    values: Tensor
    codes: QuantizedKV
    planes: DraftPlanes

    @classmethod
    def draw(cls, bench: Bench, size: SparseSize, queries: int = 1, lower: bool = False) -> Store:
        """Random keys and values, with enough variants for their 2-bit keys to exceed the GPU's caches."""
        heads = (size.kv_heads, size.tokens, size.head_dim)
        variants = bench.variants(size.batch * math.prod(heads) / 4)
        rows = variants * size.batch
        # Sharp queries, as models have: tokens at the edge of what is chosen weigh little.
        q = 4 * fresh(bench, size.batch, queries, size.q_heads, size.head_dim)
        codes = QuantizedKV.allocate(
            rows, size.kv_heads, size.tokens // GROUP, GROUP, size.head_dim, bench.device, lower
        )
        first = torch.zeros(1, dtype=torch.int32, device=bench.device)
        for row in range(rows):
            drawn = fresh(bench, 2, 1, *heads)
            if size.clustered:
                drawn[0, 0, :, _cluster(size)] += _towards(q[row % size.batch], size.kv_heads)
            quantize(drawn[0], drawn[1], codes.rows(slice(row, row + 1)), first)
        planes = DraftPlanes.allocate(codes)
        pack_draft_planes(codes, planes, first.expand(rows).contiguous(), codes.groups)
        keys, values = fresh(bench, 2, size.batch, size.kv_heads, BUFFER_SLOTS, size.head_dim)
        return cls(size, q, keys, values, codes, planes)

    @property
    def variants(self) -> int:
        """Number of caches."""
        return self.codes.batch // self.size.batch

    @property
    def chosen(self) -> int:
        """Tokens that a KV head chooses."""
        return _chosen(self.size)

    @property
    def name(self) -> str:
        """The size as shown in tables."""
        size, neighbors = self.size, ", neighbors" if self.size.clustered else ""
        heads = f"{size.q_heads}/{size.kv_heads} x {size.head_dim}"
        return f"{heads}, B{size.batch}, {size.tokens} tokens, {size.ratio:.0%}{neighbors}"

    def integers(self, value: int, count: int | None = None) -> Tensor:
        """int32 [count] filled with `value`, by default one per row of the batch."""
        return torch.full((count or self.size.batch,), value, dtype=torch.int32, device=self.q.device)

    @cached_property
    def window(self) -> tuple[Tensor, Tensor]:
        """begin and end of the recent tokens."""
        return self.integers(0), self.integers(BUFFER_SLOTS - self.q.shape[1] + 1)

    @cached_property
    def groups(self) -> Tensor:
        """All groups of each row."""
        return self.integers(self.codes.groups)

    @cached_property
    def k(self) -> Tensor:
        """How many tokens each row chooses."""
        return self.integers(self.chosen)

    def rows(self, variant: int) -> slice:
        """The variant's rows of the codes."""
        return slice(variant * self.size.batch, (variant + 1) * self.size.batch)

    def variant(self, variant: int) -> tuple[QuantizedKV, DraftPlanes]:
        """The codes and planes of one cache."""
        return self.codes.rows(self.rows(variant)), self.planes.rows(self.rows(variant))

    def full(self, variant: int) -> Tensor:
        """Attention to all upper codes, the kernel that sparse drafts are compared with."""
        codes, _ = self.variant(variant)
        return decode_attention(self.q, self.keys, self.values, *self.window, codes, self.groups)

    def choose(self, variant: int, backend: Backend = "auto") -> Tensor:
        """The choice by 2-bit keys [B, Hkv, chosen]."""
        keys = TwoBitKeys.of(*self.variant(variant))
        return two_bit_top_k(self.q, keys, self.groups, self.k, max_k=self.chosen, backend=backend)[0]

    def progressive(self, variant: int, backend: Backend = "auto") -> Tensor:
        """The whole draft attention."""
        codes, planes = self.variant(variant)
        return progressive_attention(
            self.q, self.keys, self.values, *self.window, codes, planes, self.groups, self.k,
            max_k=self.chosen, backend=backend,
        )  # fmt: skip


def _chosen(size: SparseSize) -> int:
    return max(1, int(size.ratio * size.tokens))


def _cluster(size: SparseSize) -> slice:
    """As many neighbors as are chosen, in the middle."""
    return slice(size.tokens // 2, size.tokens // 2 + _chosen(size))


def _towards(q: Tensor, kv_heads: int) -> Tensor:
    """A share of each KV head's mean query [Hkv, 1, D], which raises keys' logits by some deviations."""
    return q.unflatten(1, (kv_heads, -1)).mean((0, 2))[:, None] / 4
