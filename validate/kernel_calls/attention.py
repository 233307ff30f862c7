"""Calls of decode attention: one query in every KV format, rows of unequal lengths, several queries against one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ridgeplan.kernels.attention import attention_cost, decode_attention
from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.execution import choose_splits
from ridgeplan.validate.kernel_calls.case import (
    KernelCase,
    Peers,
    SpeedUp,
    Target,
    attention_peers,
    fresh,
    relative_error,
)
from ridgeplan.validate.kernel_calls.sizes import GROUP, AttentionSize, RaggedSize, VerificationSize
from ridgeplan.validate.timing import Bench

BUFFER_SLOTS = 200  # full-precision tokens beside the quantized ones, about the double buffer's mean
FULL_BITS = 16  # per full-precision element
FORMATS = {0: "full", 4: "INT4", 8: "INT8"}
MOST_SLOWDOWN = 1.2  # allowed for several queries against one
ONE_QUERY = "ours, 1 query"
EQUAL_LENGTHS = "ours, equal lengths"
RAGGED_SHARE = 0.85  # least of the bandwidth at equal lengths


@dataclass(frozen=True, eq=False)
class Inputs:
    """Variants of keys and values [variants, B, Hkv, N, D], and queries [B, T, Hq, D] that read each of them.

    Quantized formats hold the same N tokens as codes.
    """

    q: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def draw(
        cls, bench: Bench, size: AttentionSize | RaggedSize | VerificationSize, queries: int, bits: Iterable[int]
    ) -> Inputs:
        """Random inputs, with enough variants to exceed the GPU's caches in the narrowest format of `bits`."""
        shape = (size.batch, size.kv_heads, size.tokens, size.head_dim)
        least_bits = min(width or FULL_BITS for width in bits)
        store = (bench.variants(2 * math.prod(shape) * least_bits / 8), *shape)
        q = fresh(bench, size.batch, queries, size.q_heads, size.head_dim)
        return cls(q, fresh(bench, *store), fresh(bench, *store))

    @property
    def variants(self) -> int:
        """Number of variants of the KV cache."""
        return len(self.keys)

    @property
    def shape(self) -> str:
        """The size as shown in tables."""
        batch, queries, q_heads, head_dim = self.q.shape
        several = f", {queries} queries" if queries > 1 else ""
        return f"{q_heads}/{self.keys.shape[2]} x {head_dim}, B{batch}, {self.keys.shape[3]} tokens{several}"

    @cached_property
    def codes(self) -> QuantizedKV:
        """All tokens of all variants, [variants * B] rows, as upper and lower codes; INT4 reads the upper ones only."""
        keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        rows, kv_heads, tokens, head_dim = keys.shape
        whole = QuantizedKV.allocate(rows, kv_heads, tokens // GROUP, GROUP, head_dim, keys.device, lower=True)
        quantize(keys, values, whole, torch.zeros(rows, dtype=torch.int32, device=keys.device))
        return whole

    def integers(self, value: int) -> Tensor:
        """int32 [B] filled with `value`, on the device."""
        return torch.full((len(self.q),), value, dtype=torch.int32, device=self.q.device)

    def first(self, queries: int) -> Inputs:
        """The same inputs with only the first `queries` queries."""
        return Inputs(self.q[:, :queries].contiguous(), self.keys, self.values)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Decode attention over `inputs` in one format: codes and a buffer, or full-precision keys and values."""

    inputs: Inputs
    bits: int
    keys: Tensor
    values: Tensor
    codes: QuantizedKV | None

    @classmethod
    def of(cls, inputs: Inputs, bits: int) -> AttentionCall:
        """`inputs` read with `bits` bits, 0 for full precision."""
        slots = BUFFER_SLOTS if bits else inputs.keys.shape[3]
        keys, values = (store[..., :slots, :].contiguous() for store in (inputs.keys, inputs.values))
        return cls(inputs, bits, keys, values, inputs.codes if bits else None)

    @property
    def name(self) -> str:
        """The size and format as shown in tables."""
        return f"{self.inputs.shape}, {FORMATS[self.bits]}"

    @cached_property
    def visible(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """begin, end and groups of `decode_attention`."""
        whole = self.inputs.integers
        end = self.keys.shape[3] - self.inputs.q.shape[1] + 1
        return whole(0), whole(end), whole(self.codes.groups) if self.codes else None

    def __call__(self, variant: int) -> Tensor:
        return self._attend(variant, self.keys.dtype, "auto")

    def error(self) -> float:
        """Relative error against the float32 reference on the same codes.

        The reference runs first, as the kernel reads lengths and codes before kernels that just wrote them have ended.
        """
        reference = self._attend(0, torch.float32, "reference")
        return relative_error(self(0), reference)

    def _attend(self, variant: int, dtype: torch.dtype, backend: Backend) -> Tensor:
        q, keys, values = (tensor.to(dtype) for tensor in (self.inputs.q, self.keys[variant], self.values[variant]))
        begin, end, groups = self.visible
        lower, codes = self.bits == 8, self._codes(variant)
        return decode_attention(q, keys, values, begin, end, codes, groups, lower=lower, backend=backend)

    def _codes(self, variant: int) -> QuantizedKV | None:
        batch = len(self.inputs.q)
        return self.codes and self.codes.rows(slice(variant * batch, (variant + 1) * batch))

    @property
    def tokens(self) -> int:
        """Mean tokens of a row, those in the buffer beside codes not counted."""
        return self.inputs.keys.shape[3]

    def cost(self, num_sms: int) -> Cost:
        """Declared cost of the attention, including its merge."""
        q, keys, codes = self.inputs.q, self.keys[0], self._codes(0)
        splits = int(choose_splits(len(q), keys.shape[1], self.tokens, num_sms))
        quantized, full = (self.tokens // GROUP * GROUP, keys.shape[2]) if codes else (0, self.tokens)
        return attention_cost(q, keys, codes, self.bits == 8, quantized, full, splits)


@dataclass(frozen=True, eq=False)
class RaggedCall(AttentionCall):
    """Rows of unequal lengths, as sequences or KV heads have that keep different shares of their prompts.

    lengths: tokens of each row, whole groups.
    """

    lengths: tuple[int, ...]

    @classmethod
    def of_size(cls, bench: Bench, size: RaggedSize, bits: int) -> RaggedCall:
        """Random inputs of `size`, read with `bits` bits."""
        whole = AttentionCall.of(Inputs.draw(bench, replace(size, tokens=max(size.lengths)), 1, [bits]), bits)
        return cls(whole.inputs, whole.bits, whole.keys, whole.values, whole.codes, size.lengths)

    @property
    def name(self) -> str:
        """The size with the shortest and the longest row."""
        q_heads, kv_heads, head_dim = self.inputs.q.shape[2], self.keys.shape[2], self.keys.shape[4]
        batch, rows = len(self.lengths), f"{min(self.lengths)} to {max(self.lengths)} tokens"
        return f"{q_heads}/{kv_heads} x {head_dim}, B{batch}, {rows}, {FORMATS[self.bits]}"

    @cached_property
    def visible(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """begin, end and groups of `decode_attention`."""
        begin, end, groups = super().visible
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=begin.device)
        return (begin, lengths, None) if groups is None else (begin, end, lengths // GROUP)

    @property
    def tokens(self) -> int:
        """Mean tokens of a row."""
        return sum(self.lengths) // len(self.lengths)


def attention_cases(bench: Bench, sizes: Iterable[AttentionSize]) -> Iterator[KernelCase]:
    """One query in all formats against the best full-precision attention."""
    for size in sizes:
        inputs = Inputs.draw(bench, size, 1, (bits for bits, _ in size.speedups))
        peers = attention_peers(inputs.q, inputs.keys, inputs.values)
        for bits, least in size.speedups:
            yield _case("attention", AttentionCall.of(inputs, bits), peers, SpeedUp(least))


def ragged_cases(bench: Bench, sizes: Iterable[RaggedSize]) -> Iterator[KernelCase]:
    """Rows of unequal lengths against as many of their mean length, which have as many bytes."""
    for size in sizes:
        for bits in FORMATS:
            equal = AttentionCall.of(Inputs.draw(bench, size, 1, [bits]), bits)
            ragged = RaggedCall.of_size(bench, size, bits)
            yield _case("ragged", ragged, {EQUAL_LENGTHS: equal}, SpeedUp(RAGGED_SHARE), EQUAL_LENGTHS)


def verification_cases(bench: Bench, sizes: Iterable[VerificationSize]) -> Iterator[KernelCase]:
    """Several queries, as in a verification, against one query of the same format.

    Full-precision peers apply no mask between the queries, which is no faster.
    """
    for size in sizes:
        inputs = Inputs.draw(bench, size, size.queries, size.bits)
        peers = attention_peers(inputs.q, inputs.keys, inputs.values)
        one = inputs.first(1)
        for bits in size.bits:
            both: Peers = {ONE_QUERY: AttentionCall.of(one, bits), **peers}
            yield _case("verification", AttentionCall.of(inputs, bits), both, SpeedUp(1 / MOST_SLOWDOWN), ONE_QUERY)


def _case(
    kernel: str, attention_call: AttentionCall, peers: Peers, target: Target, over: str | None = None
) -> KernelCase:
    device = attention_call.inputs.q.device
    cuda = device.type == "cuda"
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if cuda else torch.get_num_threads()
    cost, variants = attention_call.cost(num_sms), attention_call.inputs.variants
    return KernelCase(
        kernel, attention_call.name, cost, attention_call, peers, attention_call.error, target, over, variants
    )
