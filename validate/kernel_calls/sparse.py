"""Calls of sparse drafts: scores, choice, attention to chosen tokens, and the random caches that they read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ridgeplan.kernels.attention import attention_cost, decode_attention, scores_cost
from ridgeplan.kernels.attention.scores import ScoreRequest, What
from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection import (
    page_bounds,
    page_scores,
    page_scores_cost,
    top_k,
    top_k_cost,
    two_bit_scores,
    two_bit_top_k,
    two_bit_top_k_cost,
)
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, TwoBitKeys, pack_draft_planes
from ridgeplan.kernels.sparse_attention import (
    progressive_attention,
    progressive_cost,
    sparse_attention_cost,
    sparse_decode_attention,
)
from ridgeplan.roofline.cost import Cost
from ridgeplan.validate.kernel_calls.case import KernelCase, Peers, RoofShare, SpeedUp, fresh, relative_error
from ridgeplan.validate.kernel_calls.sizes import GROUP, SparseSize
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


QUERIES = 8  # of a verification
FULL_INT4, WITHOUT = "all upper codes", "without scores"
BANDWIDTH_SHARE = 0.6  # of the contiguous kernel's, for the bytes that chosen tokens need
MOST_OF_INT4 = {1: 0.35, 4: 0.30}  # progressive attention over attention to all upper codes, by batch
MOST_COLLECTING = 1.02  # verification with scores over one without


def two_bit_cases(bench: Bench, sizes: Iterable[SparseSize]) -> Iterator[KernelCase]:
    """The choice by 2-bit keys; its error is the share of the best tokens' scores that the chosen ones have not.

    Where scores differ by less than the kernel's steps it chooses other tokens, which costs hardly any score.
    """
    for size in sizes:
        store = Store.draw(bench, size)
        codes, planes = store.variant(0)
        index = torch.empty(size.batch, size.kv_heads, store.chosen, dtype=torch.int32, device="meta")
        cost = two_bit_top_k_cost(store.q, TwoBitKeys.of(codes, planes), size.tokens, index)
        yield KernelCase(
            "two_bit", store.name, cost, store.choose, {}, partial(_lost_scores, store), RoofShare(0.7),
            variants=store.variants,
        )  # fmt: skip


def _lost_scores(store: Store) -> float:
    scores = two_bit_scores(store.q, TwoBitKeys.of(*store.variant(0)), store.groups, backend="reference").exp()

    def of(chosen: Tensor) -> Tensor:
        return (scores * torch.zeros_like(scores).scatter_(2, chosen.long(), 1)).sum()

    return 1 - float(of(store.choose(0)) / of(store.choose(0, "reference")))


def progressive_cases(bench: Bench, sizes: Iterable[SparseSize]) -> Iterator[KernelCase]:
    """Scan, choice and attention of one draft query, against attention to all upper codes."""
    for size in sizes:
        store = Store.draw(bench, size)
        codes, _ = store.variant(0)
        cost = progressive_cost(store.q, codes, size.tokens, store.chosen, BUFFER_SLOTS, 16)

        def error(store: Store = store) -> float:
            return relative_error(store.progressive(0), store.progressive(0, "reference"))

        target = SpeedUp(1 / MOST_OF_INT4.get(size.batch, 0.35))
        peers: Peers = {FULL_INT4: store.full}
        yield KernelCase(
            "progressive", store.name, cost, store.progressive, peers, error, target, FULL_INT4, store.variants
        )


@dataclass(frozen=True, eq=False)
class TopKCall:
    """The choice of the `chosen` best of each row of scores [variants, rows, tokens]."""

    scores: Tensor
    chosen: int

    @cached_property
    def sizes(self) -> tuple[Tensor, Tensor]:
        """Lengths and k of all rows."""
        rows, tokens = self.scores.shape[1:]
        device = self.scores.device
        lengths, k = (torch.full((rows,), x, dtype=torch.int32, device=device) for x in (tokens, self.chosen))
        return lengths, k

    def __call__(self, variant: int) -> Tensor:
        return top_k(self.scores[variant], *self.sizes, self.chosen)[0]

    def library(self, variant: int) -> Tensor:
        """The same by torch, unordered."""
        return self.scores[variant].topk(self.chosen, sorted=False).indices

    def error(self) -> float:
        """Share of the numbers that differ from the reference's."""
        expected = top_k(self.scores[0], *self.sizes, self.chosen, backend="reference")[0]
        return float((self(0) != expected).float().mean())


def top_k_cases(bench: Bench, sizes: Iterable[SparseSize]) -> Iterator[KernelCase]:
    """The choice of each KV head's best tokens, against torch's."""
    for size in sizes:
        rows = size.batch * size.kv_heads
        variants = bench.variants(4 * rows * size.tokens)
        scores = torch.randn(variants, rows, size.tokens, device=bench.device)
        call = TopKCall(scores, max(1, int(size.ratio * size.tokens)))
        cost = top_k_cost(scores[0], torch.empty(rows, call.chosen, dtype=torch.int32, device="meta"))
        name = f"{rows} rows, {size.tokens} scores, {size.ratio:.0%}"
        peers: Peers = {"torch.topk": call.library}
        yield KernelCase("top_k", name, cost, call, peers, call.error, SpeedUp(1.0), variants=variants)


def page_scores_cases(bench: Bench, sizes: Iterable[SparseSize]) -> Iterator[KernelCase]:
    """Quest's bounds of pages of 16."""
    for size in sizes:
        heads = (size.batch, size.kv_heads, size.tokens, size.head_dim)
        bounds = page_bounds(fresh(bench, *heads), 16)
        variants = bench.variants(bounds.nbytes)
        store = torch.stack([bounds] * variants)
        q = fresh(bench, size.batch, 1, size.q_heads, size.head_dim)
        pages = torch.full((size.batch,), bounds.shape[2], dtype=torch.int32, device=bench.device)

        def scan(i: int, store: Tensor = store, q: Tensor = q, pages: Tensor = pages) -> Tensor:
            return page_scores(q, store[i], pages)

        def error(store: Tensor = store, q: Tensor = q, pages: Tensor = pages) -> float:
            return relative_error(page_scores(q, store[0], pages), page_scores(q, store[0], pages, backend="reference"))

        name = f"{size.q_heads}/{size.kv_heads} x {size.head_dim}, B{size.batch}, {size.tokens} tokens, pages of 16"
        yield KernelCase(
            "page_scores", name, page_scores_cost(q, bounds), scan, {}, error, RoofShare(0.6), variants=variants
        )


@dataclass(frozen=True, eq=False)
class SparseCall:
    """Attention to an index list of tokens or pages of the store's upper codes, the same number for every KV head."""

    store: Store
    index: Tensor
    count: Tensor
    page: int

    @classmethod
    def draw(cls, store: Store, page: int) -> SparseCall:
        """Random distinct tokens or pages in ascending order, as top-k leaves them."""
        pages, wanted = store.size.tokens // page, max(1, store.chosen // page)
        sets = (store.size.batch, store.size.kv_heads)
        drawn = torch.rand(*sets, pages, device=store.q.device).topk(wanted).indices.sort(-1).values
        return cls(store, drawn.int(), torch.full(sets, wanted, dtype=torch.int32, device=store.q.device), page)

    def __call__(self, variant: int) -> Tensor:
        return self._attend(variant, "auto")

    def _attend(self, variant: int, backend: Backend) -> Tensor:
        store, (codes, planes) = self.store, self.store.variant(variant)
        return sparse_decode_attention(
            store.q, store.keys, store.values, *store.window, self.index, self.count, codes, store.groups,
            value_rows=planes.value_rows, page=self.page, backend=backend,
        )  # fmt: skip

    def gathered(self, variant: int) -> Tensor:
        """The same by torch: dequantized beforehand, gathered, and given to scaled_dot_product_attention."""
        keys, values = self._dense
        at = self.index.long()[..., None] * self.page + torch.arange(self.page, device=self.index.device)
        at = at.flatten(2)[..., None].expand(-1, -1, -1, keys.shape[3])
        gathered = keys.gather(2, at), values.gather(2, at)
        return scaled_dot_product_attention(self.store.q.transpose(1, 2), *gathered, enable_gqa=True)

    @cached_property
    def _dense(self) -> tuple[Tensor, Tensor]:
        shape = (self.store.size.batch, self.store.size.kv_heads, self.store.size.tokens, self.store.size.head_dim)
        drawn = torch.randn(2, *shape, dtype=self.store.q.dtype, device=self.store.q.device)
        return drawn[0], drawn[1]

    def error(self) -> float:
        """Relative error against the reference."""
        return relative_error(self(0), self._attend(0, "reference"))

    @property
    def cost(self) -> Cost:
        """Declared cost."""
        chosen = self.index.shape[2] * self.page
        codes, _ = self.store.variant(0)
        return sparse_attention_cost(
            self.store.q, self.store.keys, codes, False, self.index, chosen, BUFFER_SLOTS, 16, self.page
        )


def sparse_attention_cases(bench: Bench, sizes: Iterable[SparseSize]) -> Iterator[KernelCase]:
    """Attention to chosen tokens and to pages of 16, against all upper codes and against a gather by torch.

    The target: at least `BANDWIDTH_SHARE` of the contiguous kernel's bytes per second, for the bytes that are needed.
    """
    for size in sizes:
        store = Store.draw(bench, size)
        codes, _ = store.variant(0)
        whole = attention_cost(store.q, store.keys, codes, False, size.tokens, BUFFER_SLOTS, 16)
        for page in (1, 16):
            call = SparseCall.draw(store, page)
            least = BANDWIDTH_SHARE * float(whole.read_bytes / call.cost.read_bytes)
            peers: Peers = {FULL_INT4: store.full, "torch gather + SDPA": call.gathered}
            name = f"{store.name}, pages of {page}" if page > 1 else store.name
            yield KernelCase(
                "sparse_attention", name, call.cost, call, peers, call.error, SpeedUp(least), FULL_INT4, store.variants
            )


@dataclass(frozen=True, eq=False)
class Verification:
    """A verification of several queries over INT8, which leaves the scores that are asked for."""

    store: Store
    request: ScoreRequest

    @classmethod
    def asking(cls, store: Store, what: What) -> Verification:
        """For scores of the first and the last query."""
        size, device = store.size, store.q.device
        out = torch.zeros(size.batch, size.kv_heads, size.tokens, device=device)
        return cls(store, ScoreRequest(out, "ends", what, torch.zeros(size.batch, size.q_heads, device=device)))

    def __call__(self, variant: int) -> Tensor:
        return self._verify(variant, self.request, "auto")

    def plain(self, variant: int) -> Tensor:
        """The same without scores."""
        return self._verify(variant, None, "auto")

    def error(self) -> float:
        """Relative error of the scores against the reference's, from log-sum-exps that are the queries' own."""
        self(0)
        given, asked = self.request.lse, self.request
        expected = replace(asked, out=torch.zeros_like(asked.out), lse=None if given is None else given.clone())
        self._verify(0, expected, "reference")
        self(0)
        return relative_error(asked.out, expected.out)

    def _verify(self, variant: int, request: ScoreRequest | None, backend: Backend) -> Tensor:
        store, (codes, _) = self.store, self.store.variant(variant)
        return decode_attention(
            store.q, store.keys, store.values, *store.window, codes, store.groups, lower=True, scores=request,
            backend=backend,
        )  # fmt: skip

    @property
    def cost(self) -> Cost:
        """Declared cost."""
        codes, _ = self.store.variant(0)
        tokens = self.store.size.tokens
        attending = attention_cost(self.store.q, self.store.keys, codes, True, tokens, BUFFER_SLOTS, 16)
        return attending + scores_cost(self.request, self.store.q, tokens)


def scores_cases(bench: Bench, sizes: Iterable[SparseSize]) -> Iterator[KernelCase]:
    """Verification of 8 queries that leaves the first and last one's scores, against one that does not."""
    kinds: tuple[What, ...] = ("logits", "probabilities")
    for size in sizes:
        store = Store.draw(bench, size, QUERIES, lower=True)
        calls = [Verification.asking(store, what) for what in kinds]
        peers: Peers = {WITHOUT: calls[0].plain}
        target = SpeedUp(1 / MOST_COLLECTING)
        for call in calls:
            name = f"{store.name.rpartition(',')[0]}, {QUERIES} queries, INT8, {call.request.what}"
            yield KernelCase("scores", name, call.cost, call, peers, call.error, target, WITHOUT, store.variants)
