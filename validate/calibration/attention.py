"""Trials of attention: decode attention over every kind of cache, prefill attention, quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ridgeplan.kernels.attention import decode_attention
from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.execution import choose_splits
from ridgeplan.roofline.latency import attention_kind, prefill_attention_kind
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
