"""Sizes and targets of the kernel bench, by kernel. Targets are for an H200."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import product

GROUP = 128  # tokens, or inputs of a weight, per scale and minimum
BF16_SPEEDUP = 1 / 1.05  # over the best peer in the same precision
NARROW = ((0, BF16_SPEEDUP), (4, 2.2), (8, 1.5))  # head_dim 64
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
    """Decode attention of one query. speedups: (bits of the codes or 0 for bf16, target over the best bf16 peer)."""

    speedups: tuple[tuple[int, float], ...]


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
class LinearSize:
    """A product with 4-, 8- or 16-bit weights. speedups: (rows, target over the peer).

    The peer is cuBLAS with 16-bit weights or, for gated products, ours with a separate activation.
    """

    outputs: int
    inputs: int
    speedups: tuple[tuple[int, float], ...]


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
class SamplingSize:
    """Sampling for `batch` sequences; temperature 0 is greedy."""

    vocab: int
    gamma: int
    batch: int
    temperature: float
    top_k: int | None
    top_p: float | None


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


@dataclass(frozen=True)
class BenchSizes:
    """All sizes; a field's name is the kernel's name in `ridgeplan bench kernels --only`."""

    attention: tuple[AttentionSize, ...]
    ragged: tuple[RaggedSize, ...]
    verification: tuple[VerificationSize, ...]
    linear_int4: tuple[LinearSize, ...]
    linear_int8: tuple[LinearSize, ...]
    linear_dense: tuple[LinearSize, ...]
    gated_int4: tuple[LinearSize, ...]
    gated_int8: tuple[LinearSize, ...]
    gated_dense: tuple[LinearSize, ...]
    quantize: tuple[QuantizeSize, ...]
    flush: tuple[FlushSize, ...]
    norm: tuple[LayerSize, ...]
    rope: tuple[LayerSize, ...]
    swiglu: tuple[LayerSize, ...]
    rejection_sample: tuple[SamplingSize, ...]
    draw: tuple[SamplingSize, ...]
    two_bit: tuple[SparseSize, ...]
    page_scores: tuple[SparseSize, ...]
    top_k: tuple[SparseSize, ...]
    sparse_attention: tuple[SparseSize, ...]
    progressive: tuple[SparseSize, ...]
    scores: tuple[SparseSize, ...]
    host_copy: tuple[ResidencySize, ...]
    host_store: tuple[ResidencySize, ...]
    host_gather: tuple[ResidencySize, ...]
    take_slots: tuple[ResidencySize, ...]


KERNELS = tuple(field.name for field in fields(BenchSizes))


def _layers(rows: tuple[int, ...], *layers: tuple[int, int, int, int, int]) -> tuple[LayerSize, ...]:
    return tuple(LayerSize(*layer, rows=count) for layer, count in product(layers, rows))


def _samplings(vocab: int, gamma: int, batches: tuple[int, ...], top_k: int) -> tuple[SamplingSize, ...]:
    ways = ((0.0, None, None), (1.0, None, None), (1.0, top_k, 0.9))
    return tuple(SamplingSize(vocab, gamma, batch, *way) for batch, way in product(batches, ways))


_LINEAR_SPEEDUPS = ((1, 2.8), (4, 2.6), (8, 2.3), (16, 1.8))
_INT8_SPEEDUPS = ((1, 1.75), (4, 1.7), (8, 1.6), (16, 1.4))
_DENSE_SPEEDUPS = ((1, 1.0), (4, 1.0), (8, 1.0), (16, 1.0))
_LINEAR_SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
_GATED = LinearSize(28672, 4096, ((1, 1.0), (4, 1.0), (8, 1.0)))
# An 8-billion-parameter model (Llama-3.1-8B, whose layers have these sizes) and Qwen2.5-0.5B.
_LAYERS = _layers((1, 9, 64, 2048), (4096, 14336, 32, 8, 128), (896, 4864, 14, 2, 64))
_SAMPLINGS = _samplings(128256, 8, (1, 32), 50)
_SPARSE = (
    SparseSize(32, 8, 128, 1, 131072, 0.07),
    SparseSize(32, 8, 128, 4, 131072, 0.07),
    SparseSize(32, 8, 128, 8, 32768, 0.07),
    SparseSize(32, 8, 128, 1, 131072, 0.03),
    SparseSize(32, 8, 128, 4, 131072, 0.03),
)
# A step chooses about 1920 tokens beside recent ones, and slots miss a tenth of them; or all, without elastic loading.
_RESIDENCY = (
    ResidencySize(8, 128, 4, 131072, 1920, 192),
    ResidencySize(8, 128, 1, 131072, 1920, 192),
    ResidencySize(8, 128, 4, 131072, 1920, 1920),
    ResidencySize(8, 128, 4, 131072, 120, 12, page=16),
)

FULL = BenchSizes(
    attention=(
        AttentionSize(32, 32, 128, 1, 65536, MULTI_HEAD),
        AttentionSize(32, 32, 128, 1, 262144, MULTI_HEAD),
        AttentionSize(32, 8, 128, 1, 131072, GROUPED),
        AttentionSize(32, 8, 128, 8, 32768, GROUPED),
        AttentionSize(32, 8, 128, 32, 4096, GROUPED),
        *(
            AttentionSize(*heads, 64, batch, tokens, NARROW)
            for heads, batch, tokens in product(((9, 3), (14, 2)), (16, 64), (4096, 32768))
        ),
    ),
    # The third has a length for each KV head of 8 sequences.
    ragged=(
        RaggedSize(32, 8, 128, 32, 4096),
        RaggedSize(32, 8, 128, 8, 32768),
        RaggedSize(4, 1, 128, 64, 32768),
        RaggedSize(14, 2, 64, 64, 4096),
    ),
    verification=(VerificationSize(32, 8, 128, 1, 131072, 8, (0, 8)),),
    linear_int4=tuple(LinearSize(*shape, _LINEAR_SPEEDUPS) for shape in _LINEAR_SHAPES),
    linear_int8=tuple(LinearSize(*shape, _INT8_SPEEDUPS) for shape in _LINEAR_SHAPES),
    linear_dense=tuple(LinearSize(*shape, _DENSE_SPEEDUPS) for shape in _LINEAR_SHAPES),
    gated_int4=(_GATED,),
    gated_int8=(_GATED,),
    gated_dense=(_GATED,),
    quantize=(QuantizeSize(8, 128, 2048), QuantizeSize(8, 128, 32768)),
    flush=(FlushSize(32, 32, 8, 128, 8.03e9, 4096),),
    norm=_LAYERS,
    rope=_LAYERS,
    swiglu=_LAYERS,
    rejection_sample=_SAMPLINGS,
    draw=_SAMPLINGS,
    two_bit=_SPARSE[:2],
    page_scores=_SPARSE[:2],
    top_k=(*_SPARSE[:2], SparseSize(1, 1, 128, 1, 1 << 20, 0.03), SparseSize(32, 256, 128, 1, 131072, 0.07)),
    sparse_attention=_SPARSE,
    progressive=(*_SPARSE, *(replace(size, clustered=True) for size in _SPARSE[:3])),
    scores=_SPARSE[:2],
    host_copy=_RESIDENCY[:2],
    host_store=_RESIDENCY[:2],
    host_gather=_RESIDENCY,
    take_slots=_RESIDENCY,
)
# Every kernel in every variant, small enough for checkers that slow it down a hundred times. Some products give a CTA
# more output tiles than it has buffers for sums, some give a cluster outputs for several of its CTAs and more stages
# than its pipeline holds.
_TINY_LAYERS = _layers((1, 5), (256, 192, 4, 2, 64))
_TINY_SAMPLINGS = (*_samplings(1003, 2, (3,), 50), *_samplings(1024, 2, (3,), 50))  # without and with aligned rows
# Wide inputs are split between the CTAs of a cluster; 40 rows take several passes, 70 another kernel.
_TINY_QUANTIZED = (
    LinearSize(96, 256, ((1, 1.0), (5, 1.0), (40, 1.0), (70, 1.0))),
    LinearSize(2160, 256, ((1, 1.0), (5, 1.0), (16, 1.0))),
    LinearSize(4320, 256, ((1, 1.0), (5, 1.0), (16, 1.0))),
    LinearSize(16, 14336, ((16, 1.0),)),
    LinearSize(1000, 14336, ((8, 1.0), (16, 1.0))),
)
_TINY_GATED = (LinearSize(96, 256, ((1, 1.0), (5, 1.0), (9, 1.0))),)
_TINY_SPARSE = (SparseSize(8, 2, 128, 2, 512, 0.1), SparseSize(14, 2, 64, 1, 1024, 0.05))
_TINY_RESIDENCY = (ResidencySize(2, 64, 2, 512, 24, 5), ResidencySize(2, 24, 1, 512, 6, 2, page=16))
TINY = BenchSizes(
    # Splits of few rows are reduced by a separate kernel, splits of many rows by each row's last CTA.
    attention=(
        AttentionSize(4, 2, 128, 2, 256, GROUPED),
        AttentionSize(6, 2, 64, 1, 384, NARROW),
        AttentionSize(4, 2, 64, 8, 256, NARROW),
    ),
    ragged=(RaggedSize(4, 2, 128, 2, 512), RaggedSize(6, 1, 64, 6, 1024)),
    # 12, 20, 32 and 64 query rows per KV head: one size per variant.
    verification=(
        *(VerificationSize(8, 2, 128, 1, 256, queries, (0, 4, 8)) for queries in (3, 5, 8, 16)),
        VerificationSize(8, 2, 64, 1, 256, 5, (0, 4, 8)),
    ),
    linear_int4=_TINY_QUANTIZED,
    linear_int8=_TINY_QUANTIZED,
    linear_dense=(
        LinearSize(72, 576, ((1, 1.0), (5, 1.0), (16, 1.0))),
        LinearSize(2160, 256, ((1, 1.0), (5, 1.0), (16, 1.0))),
        LinearSize(4320, 256, ((1, 1.0), (5, 1.0), (16, 1.0))),
        LinearSize(16, 14336, ((8, 1.0),)),
        LinearSize(1000, 14336, ((5, 1.0), (8, 1.0))),
    ),
    gated_int4=_TINY_GATED,
    gated_int8=_TINY_GATED,
    gated_dense=(LinearSize(96, 576, ((1, 1.0), (5, 1.0), (9, 1.0))),),
    quantize=(QuantizeSize(2, 64, 256), QuantizeSize(1, 128, 128)),
    flush=(FlushSize(2, 4, 2, 64, 1e6, 512),),
    norm=_TINY_LAYERS,
    rope=_TINY_LAYERS,
    swiglu=_TINY_LAYERS,
    rejection_sample=_TINY_SAMPLINGS,
    draw=_TINY_SAMPLINGS,
    two_bit=_TINY_SPARSE,
    page_scores=_TINY_SPARSE,
    top_k=_TINY_SPARSE,
    sparse_attention=_TINY_SPARSE,
    progressive=_TINY_SPARSE,
    scores=_TINY_SPARSE,
    host_copy=_TINY_RESIDENCY,
    host_store=_TINY_RESIDENCY,
    host_gather=_TINY_RESIDENCY,
    take_slots=_TINY_RESIDENCY,
)
