"""Calls that fill the KV cache: quantization of whole prompts, and the flush at the end of a round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache import dequantize, quantize, quantize_cost, shift_slots_cost
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.plan.plan import KVFormat
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.validate.kernel_calls.case import H200_BYTES_PER_S, BenchCase, RoofShare, Within, fresh, relative_error
from ridgeplan.validate.kernel_calls.sizes import GROUP, FlushSize, QuantizeSize
from ridgeplan.validate.random_model import llama_like_shape
from ridgeplan.validate.timing import Bench, KernelCall

GAMMA = 4  # QuantSpec's preset; the buffer also holds a round's tokens
MIN_SHARE = 0.5  # smallest share of the copy bandwidth
MAX_OF_A_ROUND = 0.03


def quantize_cases(bench: Bench, sizes: Iterable[QuantizeSize]) -> Iterator[BenchCase]:
    """Quantization of one layer's keys and values of whole prompts into both planes."""
    for size in sizes:
        shape = (size.kv_heads, size.tokens, size.head_dim)
        variants = bench.variants(2 * math.prod(shape) * bench.element_bytes)
        keys, values = fresh(bench, 2, variants, *shape)
        name = f"{size.kv_heads} x {size.head_dim}, {size.tokens} tokens, 2 planes"
        yield BenchCase("quantize", quantize_call(name, keys, values), RoofShare(MIN_SHARE))


def quantize_call(name: str, keys: Tensor, values: Tensor) -> KernelCall:
    """Quantization of prompts: keys and values [variants, Hkv, N, D]; each variant's codes are a row of one batch."""
    codes, first = _empty_codes(keys), torch.zeros(1, dtype=torch.int32, device=keys.device)

    def operands(variant: int) -> tuple[Tensor, Tensor, QuantizedKV]:
        rows = slice(variant, variant + 1)
        return keys[rows], values[rows], codes.rows(rows)

    def error() -> float:
        """The error of the dequantized codes against the reference's."""
        quantize(*operands(0), first)
        reference = _empty_codes(keys[:1])
        quantize(keys[:1], values[:1], reference, first, backend="reference")
        pairs = zip(dequantize(operands(0)[2], True), dequantize(reference, True, backend="reference"), strict=True)
        return max(relative_error(*pair) for pair in pairs)

    cost = quantize_cost(keys[:1], GROUP, codes.planes)
    return KernelCall("quantize", name, cost, lambda i: quantize(*operands(i), first), len(keys), error=error)


def _empty_codes(keys: Tensor) -> QuantizedKV:
    batch, kv_heads, tokens, head_dim = keys.shape
    return QuantizedKV.allocate(batch, kv_heads, tokens // GROUP, GROUP, head_dim, keys.device, lower=True)


def flush_cases(bench: Bench, sizes: Iterable[FlushSize]) -> Iterator[BenchCase]:
    """The end of a round in the cache of all layers, with and without a group to flush.

    The target is a share of the shortest possible round, which reads all 16-bit weights once.
    """
    for size in sizes:
        shortest_round_s = 2 * size.params / H200_BYTES_PER_S
        for length in (size.context - 1, size.context):
            flushes = Flush.several(bench, size, length)
            call = _flush_call(f"{size.layers} layers of {size.kv_heads} x {size.head_dim}", flushes)
            yield BenchCase("flush", call, Within(MAX_OF_A_ROUND * shortest_round_s))


def _flush_call(name: str, flushes: Sequence[Flush]) -> KernelCall:
    first = flushes[0]
    name = f"{name}, {'taken' if first.taken else 'not taken'}"
    return KernelCall("flush", name, first.cost, lambda i: flushes[i](), len(flushes), error=first.error)


@dataclass(frozen=True, eq=False)
class Flush:
    """Adds one token to a cache of `length` tokens, repeatedly."""

    cache: Cache
    length: int

    @classmethod
    def build(cls, bench: Bench, size: FlushSize, length: int) -> Flush:
        """A hierarchical cache with a random buffer."""
        shape = llama_like_shape(size.layers, size.kv_heads, size.kv_heads, size.q_heads, size.kv_heads, size.head_dim)
        config = KVCacheConfig(1, size.context + 2, KVFormat.HIERARCHICAL, GROUP, GAMMA)
        cache = Cache(shape, config, bench.device, bench.pool.dtype)
        cache.keys.copy_(fresh(bench, *cache.keys.shape))
        cache.values.copy_(fresh(bench, *cache.values.shape))
        return cls(cache, length)

    @classmethod
    def several(cls, bench: Bench, size: FlushSize, length: int) -> list[Flush]:
        """As many flushes as make their buffers exceed the GPU's caches."""
        first = cls.build(bench, size, length)
        count = bench.variants(first.cache.keys.nbytes + first.cache.values.nbytes)
        return [first, *(cls.build(bench, size, length) for _ in range(count - 1))]

    @property
    def taken(self) -> bool:
        """Whether the token completes a group."""
        return (self.length + 1) % self.cache.config.group == 0

    def __call__(self) -> None:
        self.cache.lengths.fill_(self.length)
        self.cache.advance(torch.ones_like(self.cache.lengths))

    @property
    def cost(self) -> Cost:
        """Declared cost: quantization of the oldest group of all layers and the shift of the buffer, or nothing."""
        if not self.taken:
            return Cost()
        keys, group = self.cache.keys, self.cache.config.group
        return quantize_cost(self._oldest(keys), group, planes=2) + shift_slots_cost(keys.flatten(0, 1), group)

    def error(self) -> float:
        """The largest relative error of the buffer and of the new codes, against the reference."""
        group = self.cache.config.group
        moved = group if self.taken else 0
        before = self.cache.keys.clone(), self.cache.values.clone()
        self()
        after = self.cache.keys, self.cache.values
        buffers = (
            relative_error(now[..., :group, :], then[..., moved : moved + group, :])
            for now, then in zip(after, before, strict=True)
        )
        return max(*buffers, self._code_error(*map(self._oldest, before)) if self.taken else 0.0)

    def _oldest(self, store: Tensor) -> Tensor:
        """The oldest full-precision group, [layers, Hkv, G, D]."""
        return store[:, 0, :, : self.cache.config.group]

    def _code_error(self, keys: Tensor, values: Tensor) -> float:
        reference = _empty_codes(keys)
        first = torch.zeros(len(keys), dtype=torch.int32, device=keys.device)
        quantize(keys, values, reference, first, backend="reference")
        expected = torch.stack(dequantize(reference, True, backend="reference"))
        end = self.length + 1 - self.cache.config.group
        written = slice(end - self.cache.config.group, end)
        layers = (torch.stack(dequantize(self.cache.codes(layer), True)) for layer in range(self.cache.layers))
        return max(relative_error(now[:, 0, :, written], expected[:, i]) for i, now in enumerate(layers))
