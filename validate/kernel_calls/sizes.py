"""Sizes and targets of the kernel bench: a class for each kind of kernel, whose values are in sizes.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

GROUP = 128  # tokens, or inputs of a weight, per scale and minimum
BF16_SPEEDUP = 1 / 1.05  # over the best peer in the same precision
NARROW = ((0, BF16_SPEEDUP), (4, 2.2), (8, 1.5))
GROUPED = ((0, BF16_SPEEDUP), (4, 2.6), (8, 1.6))
MULTI_HEAD = ((0, BF16_SPEEDUP), (4, 3.0), (8, 1.7))


@dataclass(frozen=True)
class CacheSize:
    """Heads, and the tokens that the cache of each of `batch` sequences holds."""

    q_heads: int
    kv_heads: int
    head_dim: int
    batch: int
    tokens: int


@dataclass(frozen=True)
class AttentionSize(CacheSize):
    """Decode attention of one query."""

    @property
    def speedups(self) -> tuple[tuple[int, float], ...]:
        """(bits of the codes or 0 for bf16, target over the best bf16 peer)."""
        if self.head_dim == 64:
            return NARROW
        return MULTI_HEAD if self.q_heads == self.kv_heads else GROUPED


@dataclass(frozen=True)
class RaggedSize(CacheSize):
    """Decode attention of one query over rows of `tokens` tokens in the mean, an even number of groups."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row, whole groups: pairs of rows, one as much shorter as the other is longer, by up to 3/4."""
        groups, pairs = self.tokens // GROUP, self.batch // 2
        differences = [round(groups * 3 * (pair + 1) / (4 * pairs)) for pair in range(pairs)]
        return tuple(GROUP * (groups + sign * difference) for sign in (-1, 1) for difference in differences)


@dataclass(frozen=True)
class VerificationSize(CacheSize):
    """Decode attention of several queries against one query, in the formats `bits` (0 is bf16)."""

    queries: int
    bits: tuple[int, ...]


@dataclass(frozen=True)
class LatentSize:
    """Decode attention of `queries` queries over latent rows of `latent` + `rope` channels, or `bits`-bit codes."""

    q_heads: int
    latent: int
    rope: int
    batch: int
    tokens: int
    queries: int = 1
    bits: int = 0


@dataclass(frozen=True)
class LinearSize:
    """A product with 4-, 8- or 16-bit weights. speedups: (rows, target over the peer).

    The peer is cuBLAS with 16-bit weights or, for gated products, ours with a separate activation.
    """

    outputs: int
    inputs: int
    speedups: tuple[tuple[int, float], ...]
    group: int = GROUP  # inputs per scale and minimum


@dataclass(frozen=True)
class ExpertSize:
    """A layer's routed experts. speedups: (rows, target over the fastest peer)."""

    experts: int
    per_token: int
    hidden: int
    intermediate: int
    speedups: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class QuantizeSize:
    """Quantization of one layer of a prompt into both planes."""

    kv_heads: int
    head_dim: int
    tokens: int


@dataclass(frozen=True)
class FlushSize:
    """The end of a round in the cache of a whole model of `params` parameters."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    params: float
    context: int


@dataclass(frozen=True)
class LayerSize:
    """A layer's small operations on `rows` tokens."""

    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rows: int


@dataclass(frozen=True)
class StateSize:
    """A layer with a recurrent state: `queries` new tokens of each of `batch` sequences, or of one prompt."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    batch: int
    queries: int

    @property
    def name(self) -> str:
        """For tables."""
        heads = f"{self.key_heads}/{self.value_heads} x {self.key_dim} x {self.value_dim}"
        return f"{heads}, B{self.batch}, {self.queries} tokens"


@dataclass(frozen=True)
class SamplingSize:
    """Sampling for `batch` sequences; temperature 0 is greedy."""

    vocab: int
    gamma: int
    batch: int
    temperature: float
    top_k: int | None = None
    top_p: float | None = None


@dataclass(frozen=True)
class SparseSize(CacheSize):
    """A sparse draft's step: each KV head reads `ratio` of `tokens` quantized tokens per sequence.

    clustered: whether those that it scores highest are neighbors, as passages of a text are.
    """

    ratio: float
    clustered: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        heads, neighbors = f"{self.q_heads}/{self.kv_heads} x {self.head_dim}", ", neighbors" if self.clustered else ""
        return f"{heads}, B{self.batch}, {self.tokens} tokens, {self.ratio:.0%}{neighbors}"


@dataclass(frozen=True)
class ResidencySize:
    """One layer's KV on the host. Each KV head chooses `chosen` pages of `page` tokens; `missing` are not in slots."""

    kv_heads: int
    head_dim: int
    batch: int
    tokens: int
    chosen: int
    missing: int
    page: int = 1

    @property
    def name(self) -> str:
        """For tables."""
        pages = f", pages of {self.page}" if self.page > 1 else ""
        sizes = f"{self.kv_heads} x {self.head_dim}, batch {self.batch}, {self.tokens} tokens"
        return f"{sizes}, {self.missing} of {self.chosen}{pages}"


# The class of each kernel's sizes, by the kernel's name in `ridgeplan bench kernels --only`.
SIZES: Mapping[str, Any] = {
    "attention": AttentionSize,
    "ragged": RaggedSize,
    "verification": VerificationSize,
    "latent_append": LatentSize,
    "latent_attention": LatentSize,
    **{f"{kind}_{weights}": LinearSize for kind in ("linear", "gated") for weights in ("int4", "int8", "dense")},
    **dict.fromkeys(("linear_q4_k", "linear_q6_k"), LinearSize),
    **{f"experts_{weights}": ExpertSize for weights in ("int4", "int8", "dense", "mxfp4")},
    "quantize": QuantizeSize,
    "flush": FlushSize,
    **dict.fromkeys(("norm", "rope", "swiglu"), LayerSize),
    **dict.fromkeys(("delta_step", "delta_chunks", "gated_norm"), StateSize),
    **dict.fromkeys(("rejection_sample", "draw"), SamplingSize),
    **dict.fromkeys(("two_bit", "page_scores", "top_k", "sparse_attention", "progressive", "scores"), SparseSize),
    **dict.fromkeys(("host_copy", "host_store", "host_gather", "take_slots"), ResidencySize),
}
KERNELS = tuple(SIZES)


@cache
def bench_sizes(name: str) -> Mapping[str, tuple[Any, ...]]:
    """The sizes of every kernel: "full", or "tiny" ones that reach every variant of a kernel."""
    sizes: dict[str, tuple[Any, ...]] = dict.fromkeys(KERNELS, ())
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for group in tables[name]:
        for kernel in group["kernels"]:
            rows = (as_tuples([*row, *group.get("each", ())]) for row in group["sizes"])
            sizes[kernel] += tuple(SIZES[kernel](*row) for row in rows)
    return sizes


def as_tuples(value: Any) -> Any:
    """A value of TOML, its lists as tuples."""
    if isinstance(value, dict):
        return {name: as_tuples(each) for name, each in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value
