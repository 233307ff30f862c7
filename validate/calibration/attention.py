"""Trials of attention: dense over every kind of cache, prefill, quantization, and a sparse draft's operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from ridgeplan.kernels.attention import decode_attention
from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection import top_k, two_bit_top_k
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, TwoBitKeys
from ridgeplan.kernels.sparse_attention import progressive_attention, sparse_decode_attention
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.execution import choose_splits
from ridgeplan.roofline.latency import SCANS, WIDE, WIDE_SCANS, attention_kind, prefill_attention_kind
from ridgeplan.roofline.ops import merge
from ridgeplan.runtime.model.prefill import causal_attention
from ridgeplan.validate.timing import Bench, Trial

KV_GROUP = 128
BUFFERED_TOKENS = 3 * KV_GROUP // 2  # tokens in the double buffer, on average


@dataclass(frozen=True)
class Heads:
    """Head counts and head_dim of one attention layer."""

    q_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class DecodeSize:
    """One decode attention: `batch` sequences of `tokens` tokens with `queries` queries each, codes of `bits` bits."""

    heads: Heads
    batch: int
    tokens: int
    queries: int
    bits: int

    @property
    def groups(self) -> int:
        """Quantized groups of a sequence."""
        return max(1, (self.tokens - BUFFERED_TOKENS) // KV_GROUP) if self.bits else 0

    @property
    def kind(self) -> str:
        """The kernel class it belongs to."""
        return attention_kind(self.bits, self.heads.head_dim)

    @property
    def full_kv_elements(self) -> int:
        """Elements of the keys and values of all tokens, if all are held in full precision."""
        return 2 * self.batch * self.heads.kv_heads * (self.tokens + self.queries) * self.heads.head_dim

    @property
    def full_tokens(self) -> int:
        """Tokens read in full precision, including new ones."""
        return self.queries + (BUFFERED_TOKENS if self.bits else self.tokens)

    @property
    def query_rows(self) -> int:
        """Query rows that share a KV head."""
        return self.queries * self.heads.q_heads // self.heads.kv_heads

    @property
    def total_tokens(self) -> int:
        """All tokens that are read."""
        return self.groups * KV_GROUP + self.full_tokens

    @property
    def name(self) -> str:
        """The trial's name in reports."""
        heads = self.heads
        shape = f"{heads.q_heads}/{heads.kv_heads} x {heads.head_dim}"
        return f"{shape}, batch {self.batch}, {self.tokens} tokens, {self.queries} queries"


def decode_trials(
    bench: Bench, decode_sizes: Iterable[DecodeSize], num_sms: int, backend: Backend = "auto"
) -> Iterator[Trial]:
    """Decode attention as the runtime calls it, with each layer's KV cache cold."""
    for size in decode_sizes:
        yield decode_trial(bench, size, _splits(size, num_sms), backend)


def decode_trial(bench: Bench, size: DecodeSize, splits: int, backend: Backend = "auto") -> Trial:
    """The trial of one size; its cost and its time both include the merge of the splits."""
    heads, batch = size.heads, size.batch
    cost = ops.attention(
        batch,
        size.queries,
        heads.q_heads,
        heads.kv_heads,
        heads.head_dim,
        size.groups * KV_GROUP,
        size.full_tokens,
        size.bits,
        bench.element_bytes,
        KV_GROUP,
        splits,
    )
    variants = bench.variants(cost.read_bytes)
    store = bench.random(variants, 2, batch, heads.kv_heads, size.full_tokens, heads.head_dim)
    planes = random_codes(bench, size, variants) if size.bits else None
    q = bench.random(batch, size.queries, heads.q_heads, heads.head_dim)
    begin, end, groups = (
        torch.full((batch,), value, dtype=torch.int32, device=bench.device)
        for value in (0, size.full_tokens - size.queries + 1, size.groups)
    )

    def call(i: int) -> Tensor:
        keys, values = store[i]
        if planes is None:
            return decode_attention(q, keys, values, begin, end, backend=backend)
        codes = planes.rows(slice(i * batch, (i + 1) * batch))  # a new view for each call, as in the runtime's cache
        return decode_attention(q, keys, values, begin, end, codes, groups, lower=size.bits == 8, backend=backend)

    return Trial(size.kind, size.name, cost, call, variants, size.query_rows, batch * heads.kv_heads, size.total_tokens)


def prefill_trials(bench: Bench, heads: Iterable[Heads], tokens: Iterable[int]) -> Iterator[Trial]:
    """Causal attention of whole prompts, as in the runtime's prefill."""
    for one in heads:
        for count in tokens:
            q = bench.random(one.q_heads, count, one.head_dim)
            keys, values = bench.random(2, one.kv_heads, count, one.head_dim)
            elements = 2 * one.kv_heads * one.head_dim
            cost = ops.causal_attention(
                1, one.q_heads, elements, one.head_dim, one.head_dim, count, bench.element_bytes
            )
            name = f"{one.q_heads}/{one.kv_heads} x {one.head_dim}, {count} tokens"
            yield Trial(prefill_attention_kind(one.head_dim), name, cost, _causal(q, keys, values))


def quantize_trials(bench: Bench, heads: Iterable[Heads], tokens: Iterable[int]) -> Iterator[Trial]:
    """Quantization of whole groups of one layer into both planes."""
    for one in heads:
        for count in tokens:
            stores = bench.randoms(2, 1, one.kv_heads, count, one.head_dim)
            codes = QuantizedKV.allocate(
                len(stores), one.kv_heads, count // KV_GROUP, KV_GROUP, one.head_dim, bench.device, lower=True
            )
            cost = ops.quantize(1, one.kv_heads, one.head_dim, count, bench.element_bytes, KV_GROUP, 2)
            name = f"{one.kv_heads} x {one.head_dim}, {count} tokens"
            yield Trial("quantize", name, cost, _quantizing(stores, codes), len(stores))


def gather_trials(bench: Bench, row_elements: int, rows: Iterable[int]) -> Iterator[Trial]:
    """Gathers of scattered rows from a large table, as a sparse draft reads single tokens' keys."""
    table = bench.random(bench.pool.numel() // row_elements, row_elements)
    for count in rows:
        nbytes = count * row_elements * bench.element_bytes
        index = torch.randint(len(table), (bench.variants(nbytes), count), device=bench.device)
        cost = Cost(read_bytes=nbytes, write_bytes=nbytes)
        yield Trial("gather", f"{count} rows", cost, _gathering(table, index), len(index))


def _causal(q: Tensor, keys: Tensor, values: Tensor) -> Callable[[int], object]:
    return lambda _: causal_attention(q, keys, values, None)


def _quantizing(stores: Tensor, codes: QuantizedKV) -> Callable[[int], object]:
    first = torch.zeros(1, dtype=torch.int32, device=stores.device)
    return lambda i: quantize(stores[i, 0], stores[i, 1], codes.rows(slice(i, i + 1)), first)


def _gathering(table: Tensor, index: Tensor) -> Callable[[int], object]:
    return lambda i: table.index_select(0, index[i])


def _splits(size: DecodeSize, num_sms: int) -> int:
    return int(choose_splits(size.batch, size.heads.kv_heads, size.tokens, num_sms))


def random_codes(bench: Bench, size: DecodeSize, variants: int) -> QuantizedKV:
    """Random codes for all variants that decode to about -1..1.

    Larger keys would make attention weights so small that CPUs slow down on their denormal numbers.
    """
    heads, lower = size.heads, size.bits == 8
    rows = variants * size.batch
    codes = QuantizedKV.allocate(rows, heads.kv_heads, size.groups, KV_GROUP, heads.head_dim, bench.device, lower=lower)
    noise = bench.pool.view(torch.uint8)
    for field in fields(codes):
        plane = getattr(codes, field.name)
        if plane is not None and plane.dtype == torch.uint8:
            plane.copy_(noise[: plane.numel()].view(plane.shape))
        elif plane is not None:
            plane.fill_(-1.0 if field.name.endswith("min") else 2 / 15)
    return codes


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
        return ops.two_bit_top_k(*shape, size.groups * KV_GROUP, KV_GROUP, self.chosen)

    def attend_cost(self, bits: int) -> Cost:
        """Of `attend` to codes of `bits` bits, or of `attend_full` with 0, merge included."""
        size, heads = self.size, self.size.heads
        shape, splits = (size.batch, 1, heads.q_heads, heads.kv_heads, heads.head_dim), self._splits
        attending = ops.sparse_attention(
            *shape, self.chosen, size.full_tokens, bits, self.bench.element_bytes, KV_GROUP, splits, self.index.numel()
        )
        return attending + merge(size.batch, 1, heads.q_heads, heads.head_dim, splits, self.bench.element_bytes)

    @property
    def progressive_cost(self) -> Cost:
        """Of `progressive`."""
        size, heads = self.size, self.size.heads
        return ops.progressive_attention(
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
            "sparse_attention": (draft.attend, draft.attend_cost(ops.UPPER_BITS)),
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
        yield Trial("top_k", size.name, ops.top_k(rows, tokens, chosen), _choosing(scores, lengths, k, chosen))


def _choosing(scores: Tensor, lengths: Tensor, k: Tensor, chosen: int) -> Callable[[int], object]:
    return lambda _: top_k(scores, lengths, k, chosen)
