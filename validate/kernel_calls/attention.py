"""Calls of attention: decoding in every KV format, with rows of unequal lengths and several queries, and prefill."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from ridgeplan.kernels.attention import attention_cost, decode_attention, merge_cost
from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.execution import choose_splits, short_attention_factor
from ridgeplan.roofline.latency import attention_kind, prefill_attention_kind
from ridgeplan.runtime.model.prefill_layer import attend_in_place
from ridgeplan.validate.kernel_calls.case import (
    BenchCase,
    Peers,
    SpeedUp,
    attention_peers,
    flashinfer_peers,
    fresh,
    relative_error,
)
from ridgeplan.validate.kernel_calls.sizes import GROUP, AttentionSize, CacheSize, RaggedSize, VerificationSize
from ridgeplan.validate.kernel_calls.vllm_peers import flash_attention, prepared
from ridgeplan.validate.random_model import fill_codes
from ridgeplan.validate.timing import Bench, KernelCall

BUFFERED_TOKENS = 3 * GROUP // 2  # tokens in the double buffer, on average
BUFFER_SLOTS = 200  # the bench's: full-precision tokens beside the codes, the queries' own included
FULL_BITS = 16  # per full-precision element
FORMATS = {0: "full", 4: "INT4", 8: "INT8"}
MAX_SLOWDOWN = 1.2  # allowed for several queries against one
ONE_QUERY = "ours, 1 query"
EQUAL_LENGTHS = "ours, equal lengths"
RAGGED_SHARE = 0.85  # smallest share of the bandwidth at equal lengths


@dataclass(frozen=True)
class Heads:
    """Head counts and head_dim of one attention layer."""

    q_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class DecodeSize:
    """Decode attention of `batch` sequences with `queries` queries each.

    tokens: of a sequence. bits: of the codes, or 0 where everything is in full precision. quantized_tokens: of a
    sequence, whole groups. full_tokens: of a sequence in full precision, the queries' own included.
    """

    name: str
    heads: Heads
    batch: int
    tokens: int
    queries: int
    bits: int
    quantized_tokens: int
    full_tokens: int

    @classmethod
    def of_cache(cls, heads: Heads, batch: int, tokens: int, queries: int, bits: int) -> DecodeSize:
        """The attention to a cache that holds `tokens` tokens of each sequence, most of them as codes."""
        name = f"{heads.q_heads}/{heads.kv_heads} x {heads.head_dim}, batch {batch}, {tokens} tokens, {queries} queries"
        if not bits:
            return cls(name, heads, batch, tokens, queries, 0, 0, queries + tokens)
        groups = max(1, (tokens - BUFFERED_TOKENS) // GROUP)
        return cls(name, heads, batch, tokens, queries, bits, groups * GROUP, queries + BUFFERED_TOKENS)

    @property
    def kind(self) -> str:
        """The kernel class."""
        return attention_kind(self.bits, self.heads.head_dim)

    @property
    def groups(self) -> int:
        """Quantized groups of a sequence."""
        return self.quantized_tokens // GROUP

    def splits(self, num_sms: int) -> int:
        """How many ways the kernel cuts each sequence."""
        return int(choose_splits(self.batch, self.heads.kv_heads, self.tokens, num_sms))

    def cost(self, q: Tensor, splits: int) -> Cost:
        """The cost of a call with queries `q`, the merge of the splits included."""
        tokens = self.quantized_tokens, self.full_tokens
        return attention_cost(q, self.heads.kv_heads, *tokens, self.bits, GROUP, splits) + merge_cost(q, splits)


@dataclass(frozen=True, eq=False)
class DecodeAttention:
    """Decode attention of queries [B, T, Hq, D] to one of several caches.

    keys, values: in full precision [variants, B, Hkv, slots, D]. codes: of all variants, [variants * B] rows.
    lengths: tokens of each row, whole groups, where they differ; by default all that the cache has room for.
    """

    size: DecodeSize
    q: Tensor
    keys: Tensor
    values: Tensor
    codes: QuantizedKV | None
    lengths: tuple[int, ...] | None = None
    backend: Backend = "auto"

    @cached_property
    def visible(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """begin, end and groups of `decode_attention`."""
        device = self.q.device
        begin, end, groups = (
            torch.full((self.size.batch,), value, dtype=torch.int32, device=device)
            for value in (0, self.keys.shape[3] - self.size.queries + 1, self.size.groups)
        )
        lengths = None if self.lengths is None else torch.tensor(self.lengths, dtype=torch.int32, device=device)
        if self.codes is None:
            return begin, end if lengths is None else lengths, None
        return begin, end, groups if lengths is None else lengths // GROUP

    def __call__(self, variant: int) -> Tensor:
        begin, end, groups = self.visible
        return decode_attention(
            self.q, self.keys[variant], self.values[variant], begin, end, self._codes(variant), groups,
            lower=self.size.bits == 8, backend=self.backend,
        )  # fmt: skip

    def error(self) -> float:
        """Relative error against the float32 reference on the same codes.

        The reference runs first because the kernel reads lengths and codes before the kernels that wrote them have
        ended.
        """
        q, keys, values = (tensor.float() for tensor in (self.q, self.keys[:1], self.values[:1]))
        reference = replace(self, q=q, keys=keys, values=values, backend="reference")(0)
        return relative_error(self(0), reference)

    def call(self, num_sms: int, peers: Peers | None = None) -> KernelCall:
        """The call; its cost and its time both include the merge of the splits."""
        size, heads = self.size, self.size.heads
        return KernelCall(
            size.kind,
            size.name,
            size.cost(self.q, size.splits(num_sms)),
            self,
            variants=len(self.keys),
            rows=size.queries * heads.q_heads // heads.kv_heads,
            width=size.batch * heads.kv_heads,
            depth=size.quantized_tokens + size.full_tokens,
            error=self.error,
            peers=peers or {},
        )

    def _codes(self, variant: int) -> QuantizedKV | None:
        """A new view for each call, as the runtime's cache makes them."""
        batch = self.size.batch
        return self.codes and self.codes.rows(slice(variant * batch, (variant + 1) * batch))


def random_decode(bench: Bench, size: DecodeSize, num_sms: int, backend: Backend = "auto") -> KernelCall:
    """Decode attention to random caches, whose variants together exceed the device's caches."""
    heads = size.heads
    q = bench.random(size.batch, size.queries, heads.q_heads, heads.head_dim)
    variants = bench.variants(size.cost(q, size.splits(num_sms)).read_bytes)
    keys, values = bench.random(variants, 2, size.batch, heads.kv_heads, size.full_tokens, heads.head_dim).unbind(1)
    codes = random_codes(bench, size, variants) if size.bits else None
    return DecodeAttention(size, q, keys, values, codes, backend=backend).call(num_sms)


def random_codes(bench: Bench, size: DecodeSize, variants: int) -> QuantizedKV:
    """Random codes of `variants` caches, which decode to about -1 to 1.

    Larger keys would make attention weights so small that CPUs slow down on denormal numbers.
    """
    heads, rows = size.heads, variants * size.batch
    codes = QuantizedKV.allocate(
        rows, heads.kv_heads, size.groups, GROUP, heads.head_dim, bench.device, lower=size.bits == 8
    )
    fill_codes(codes, partial(fill_with_noise, bench))
    return codes


def fill_with_noise(bench: Bench, plane: Tensor) -> None:
    """Fills a uint8 tensor with the pool's bytes."""
    plane.copy_(bench.pool.view(torch.uint8)[: plane.numel()].view(plane.shape))


def prefill_attention(bench: Bench, heads: Heads, tokens: int) -> KernelCall:
    """Causal attention of a whole prompt, as in the runtime's prefill: the output overwrites the queries.

    Its arithmetic is counted as cuDNN's, so that prompts that are too short for cuDNN are of the same class.
    """
    queries = bench.random(tokens, heads.q_heads, heads.head_dim).clone()
    keys, values = bench.random(2, heads.kv_heads, tokens, heads.head_dim)
    sizes = ops.PromptHeads(heads.q_heads, 2 * heads.kv_heads * heads.head_dim, heads.head_dim, heads.head_dim)
    cost = ops.causal_attention(1, sizes, tokens, bench.element_bytes)
    cost = replace(cost, flops=cost.flops * short_attention_factor(tokens, bench.device.type == "cuda"))
    name = f"{heads.q_heads}/{heads.kv_heads} x {heads.head_dim}, {tokens} tokens"
    kind = prefill_attention_kind(heads.head_dim)
    return KernelCall(kind, name, cost, lambda _: attend_in_place(queries, keys, values, None, tokens))


@dataclass(frozen=True, eq=False)
class BenchInputs:
    """Queries [B, T, Hq, D], and keys and values [variants, B, Hkv, N, D], which a case stores in every format."""

    q: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def draw(cls, bench: Bench, size: CacheSize, queries: int, bits: Iterable[int]) -> BenchInputs:
        """Random inputs, with enough variants to exceed the GPU's caches in the narrowest format of `bits`."""
        shape = (size.batch, size.kv_heads, size.tokens, size.head_dim)
        narrowest = min(width or FULL_BITS for width in bits)
        caches = (bench.variants(2 * math.prod(shape) * narrowest / 8), *shape)
        q = fresh(bench, size.batch, queries, size.q_heads, size.head_dim)
        return cls(q, fresh(bench, *caches), fresh(bench, *caches))

    @cached_property
    def codes(self) -> QuantizedKV:
        """All tokens of all variants, [variants * B] rows, as upper and lower codes; INT4 reads the upper ones only."""
        keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        rows, kv_heads, tokens, head_dim = keys.shape
        codes = QuantizedKV.allocate(rows, kv_heads, tokens // GROUP, GROUP, head_dim, keys.device, lower=True)
        quantize(keys, values, codes, torch.zeros(rows, dtype=torch.int32, device=keys.device))
        return codes

    @cached_property
    def peers(self) -> Peers:
        """Full-precision attention kernels of other projects."""
        flash = prepared(flash_attention, self.q, self.keys, self.values, self.q.dtype)
        return {**attention_peers(self.q, self.keys, self.values), "vLLM FlashAttention 3": flash}

    @cached_property
    def narrow_peers(self) -> Peers:
        """The same, and attention to FP8 caches."""
        inputs, fp8 = (self.q, self.keys, self.values), torch.float8_e4m3fn
        peers = {**self.peers, **flashinfer_peers(*inputs, {"FlashInfer, FP8 KV": fp8})}
        return peers | {"vLLM FlashAttention 3, FP8": prepared(flash_attention, *inputs, fp8)}

    def attention(self, bits: int, lengths: tuple[int, ...] | None = None) -> DecodeAttention:
        """Attention in one format. lengths: tokens of each row, where they differ."""
        batch, queries, q_heads, head_dim = self.q.shape
        kv_heads, capacity = self.keys.shape[2:4]
        heads, sizes = Heads(q_heads, kv_heads, head_dim), f"{q_heads}/{kv_heads} x {head_dim}, B{batch}"
        tokens = sum(lengths) // len(lengths) if lengths else capacity
        rows = f"{min(lengths)} to {max(lengths)}" if lengths else f"{tokens}"
        several = f", {queries} queries" if queries > 1 else ""
        name = f"{sizes}, {rows} tokens{several}, {FORMATS[bits]}"
        quantized, full = (tokens // GROUP * GROUP, BUFFER_SLOTS) if bits else (0, tokens)
        size = DecodeSize(name, heads, batch, tokens, queries, bits, quantized, full)
        slots = BUFFER_SLOTS if bits else capacity
        keys, values = (store[..., :slots, :].contiguous() for store in (self.keys, self.values))
        return DecodeAttention(size, self.q, keys, values, self.codes if bits else None, lengths)

    def call(self, bits: int, peers: Peers | None = None, lengths: tuple[int, ...] | None = None) -> KernelCall:
        """The call of `attention` on this device."""
        attention, device = self.attention(bits, lengths), self.q.device
        cuda = device.type == "cuda"
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if cuda else torch.get_num_threads()
        return attention.call(num_sms, peers)


def attention_cases(bench: Bench, sizes: Iterable[AttentionSize]) -> Iterator[BenchCase]:
    """One query in all formats against the best full-precision attention; codes beside FP8 caches, too."""
    for size in sizes:
        inputs = BenchInputs.draw(bench, size, 1, (bits for bits, _ in size.speedups))
        for bits, speedup in size.speedups:
            peers = inputs.narrow_peers if bits else inputs.peers
            yield BenchCase("attention", inputs.call(bits, peers), SpeedUp(speedup), tuple(inputs.peers))


def ragged_cases(bench: Bench, sizes: Iterable[RaggedSize]) -> Iterator[BenchCase]:
    """Rows of unequal lengths, against rows that all have the mean length and so read as many bytes."""
    for size in sizes:
        for bits in FORMATS:
            equal = BenchInputs.draw(bench, size, 1, [bits]).attention(bits)
            inputs = BenchInputs.draw(bench, replace(size, tokens=max(size.lengths)), 1, [bits])
            call = inputs.call(bits, {EQUAL_LENGTHS: equal}, size.lengths)
            yield BenchCase("ragged", call, SpeedUp(RAGGED_SHARE), (EQUAL_LENGTHS,))


def verification_cases(bench: Bench, sizes: Iterable[VerificationSize]) -> Iterator[BenchCase]:
    """Several queries, as in a verification, against one query of the same format.

    SDPA applies no mask between the queries, which is no faster.
    """
    for size in sizes:
        inputs = BenchInputs.draw(bench, size, size.queries, size.bits)
        single = replace(inputs, q=inputs.q[:, :1].contiguous())
        for bits in size.bits:
            peers: Peers = {ONE_QUERY: single.attention(bits), **inputs.peers}
            yield BenchCase("verification", inputs.call(bits, peers), SpeedUp(1 / MAX_SLOWDOWN), (ONE_QUERY,))
