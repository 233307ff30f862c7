"""The sizes of a calibration's kernel calls, by device and thoroughness."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.latency import SCANS, WIDE, WIDE_SCANS, prefill_attention_kind, scan_kind
from ridgeplan.validate.kernel_calls.attention import DecodeSize, Heads
from ridgeplan.validate.random_model import llama_like_shape

Shapes = tuple[tuple[int, int], ...]
DRAFT_STEP = 5  # of the sizes of decode attention, those at which sparse drafts are measured, too
MAX_ELEMENT_BYTES = 4  # largest full-precision element of any device


@dataclass(frozen=True)
class Suite:
    """Sizes of all kernel calls. Shapes are (outputs, inputs); rows are tokens per call."""

    pool_bytes: int
    trial_s: float
    matmul_size: int
    linear_shapes: Shapes
    linear_rows: tuple[int, ...]
    quantized_rows: tuple[int, ...]
    head_shapes: Shapes
    head_rows: tuple[int, ...]
    heads: tuple[Heads, ...]
    batches: tuple[int, ...]
    tokens: tuple[int, ...]
    queries: tuple[int, ...]
    prefill_shapes: Shapes
    prefill_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    quantize_tokens: tuple[int, ...]
    gather_rows: tuple[int, ...]
    elementwise: tuple[ModelShape, ...]
    elementwise_rows: tuple[int, ...]
    dispatch_shape: ModelShape
    dispatch_layers: tuple[int, ...]
    gap_shapes: tuple[ModelShape, ...] = ()  # models whose rounds are timed as a whole
    portable: bool = False  # whether to measure the kernels that run on GPUs older than Hopper, too
    linear_steps: tuple[int, ...] | None = None  # rows at which time may step up; None fits one rate for all rows
    attention_steps: tuple[int, ...] | None = None
    row_steps: tuple[int, ...] | None = None  # of norms, RoPE and activations

    @property
    def draft_sizes(self) -> list[DecodeSize]:
        """Some of the sizes of 4-bit decode attention, at which sparse drafts are measured."""
        return self._draft_sizes[::DRAFT_STEP]

    def sparse_sizes(self, kinds: Iterable[str]) -> dict[str, list[DecodeSize]]:
        """Sizes at which classes of sparse drafts are measured, of those that have any."""
        return {kind: sizes for kind in kinds if (sizes := self._sizes_of(kind))}

    def _sizes_of(self, kind: str) -> list[DecodeSize]:
        """`draft_sizes` with as many query heads as the class takes; of scans for many, all that there are."""
        if kind not in (*SCANS, *WIDE_SCANS):
            return self.draft_sizes
        sizes = self._draft_sizes if kind in WIDE_SCANS else self.draft_sizes
        scan = kind.removesuffix(WIDE)
        return [size for size in sizes if scan_kind(scan, size.heads.q_heads, size.heads.kv_heads) == kind]

    @property
    def _draft_sizes(self) -> list[DecodeSize]:
        return [size for sizes in self.decode_sizes().values() for size in sizes if size.bits == 4]

    @property
    def vocabs(self) -> tuple[int, ...]:
        """Sizes of vocabularies to sample from."""
        return tuple(outputs for outputs, _ in self.head_shapes)

    def steps_of(self, kind: str) -> tuple[int, ...] | None:
        """Rows at which the time of a class may step up; None where it grows with bytes and FLOPs alone."""
        if kind in ("linear", "linear_int8", "linear_int4", "head"):
            return self.linear_steps
        if kind.startswith("attention"):
            return self.attention_steps
        if kind in ("elementwise", "rope"):
            return self.row_steps
        return SAMPLING_STEPS if kind == "sampling" and self.linear_steps else None

    def prefill_heads(self) -> dict[str, list[Heads]]:
        """Heads of prompts' attention, by kernel class."""
        by_kind: dict[str, list[Heads]] = {}
        for heads in self.heads:
            by_kind.setdefault(prefill_attention_kind(heads.head_dim), []).append(heads)
        return by_kind

    def decode_sizes(self) -> dict[str, list[DecodeSize]]:
        """Decode attention at every length, batch and number of queries that fits the pool, by kernel class.

        Only drafts read 4-bit codes, and a draft has one query.
        """
        sizes: dict[str, list[DecodeSize]] = {}
        for bits, heads, batch, tokens in product((0, 4, 8), self.heads, self.batches, self.tokens):
            for queries in (1,) if bits == 4 else self.queries:
                elements = 2 * batch * heads.kv_heads * (tokens + queries) * heads.head_dim  # all in full precision
                if elements * MAX_ELEMENT_BYTES <= self.pool_bytes:
                    size = DecodeSize.of_cache(heads, batch, tokens, queries, bits)
                    sizes.setdefault(size.kind, []).append(size)
        return sizes


# SmolLM2-135M's layers, and those of a model with 1 to 2 billion parameters.
_CPU_QUICK = Suite(
    pool_bytes=288 << 20,
    trial_s=0.08,
    matmul_size=2048,
    linear_shapes=((960, 576), (576, 576), (3072, 576), (576, 1536), (2048, 2048), (8192, 2048)),
    linear_rows=(1, 2, 5, 8),
    quantized_rows=(1, 4),
    head_shapes=((49152, 576), (32000, 2048)),
    head_rows=(1, 5),
    heads=(Heads(9, 3, 64), Heads(16, 4, 128)),
    batches=(1,),
    tokens=(256, 1024, 4096),
    queries=(1, 5),
    prefill_shapes=((960, 576), (3072, 576), (576, 1536), (2048, 2048)),
    prefill_rows=(256, 1024),
    prefill_tokens=(256, 1024, 2048),
    quantize_tokens=(128, 1024),
    gather_rows=(256, 4096),
    elementwise=(llama_like_shape(1, 576, 1536, 9, 3, 64), llama_like_shape(1, 2048, 8192, 32, 8, 64)),
    elementwise_rows=(1, 5, 1024),
    dispatch_shape=llama_like_shape(1, 576, 1536, 9, 3, 64),
    dispatch_layers=(2, 6, 12),
)
_CPU_FULL = replace(
    _CPU_QUICK,
    trial_s=0.3,
    linear_shapes=(*_CPU_QUICK.linear_shapes, (4096, 4096), (2048, 8192)),
    batches=(1, 4),
    tokens=(256, 1024, 2048, 4096, 8192),
    queries=(1, 3, 5, 8),
    prefill_shapes=(*_CPU_QUICK.prefill_shapes, (8192, 2048)),
)
# Rows at which the time of products and of decode attention may step up: tiles of 8 rows, passes over the weights, and
# the library's or Triton's kernels beyond what this package's take.
LINEAR_STEPS = (1, 2, 4, 8, 16, 32, 48, 64, 128)
ATTENTION_STEPS = (4, 8, 16, 24, 32, 48, 64, 128)
ROW_STEPS = (4, 8, 16, 32, 64)
SAMPLING_STEPS = (1,)  # verification of drafts launches more kernels than a draw of one token

# Layers of four widths, and vocabularies, that are no well-known model's. Groups of 1, 4, 6, 7 and 8 query heads per KV
# head in both head sizes, and of 3 and 12.
_CUDA_QUICK = Suite(
    pool_bytes=6 << 30,
    trial_s=0.008,
    matmul_size=8192,
    linear_shapes=(
        (960, 640), (640, 1728), (1536, 1024), (1024, 2816), (5632, 1024), (2560, 2560), (13824, 2560), (2560, 6912),
        (7168, 5120), (5120, 5120), (27648, 5120), (5120, 13824),
    ),
    linear_rows=(1, 4, 8, 16, 24, 64),
    quantized_rows=(1, 4, 8, 16, 24, 64),
    head_shapes=((65536, 1024), (100352, 5120)),
    head_rows=(1, 4, 16, 64),
    heads=(
        Heads(24, 6, 128), Heads(16, 16, 128), Heads(18, 3, 128), Heads(64, 8, 128), Heads(16, 4, 64), Heads(21, 3, 64),
    ),
    batches=(1, 16),
    tokens=(700, 6500, 131_072),
    queries=(1, 5, 8),
    prefill_shapes=((7168, 5120), (27648, 5120), (2560, 6912), (3072, 2048)),
    prefill_rows=(160, 512, 2048),
    prefill_tokens=(1024, 4096, 16384),
    quantize_tokens=(128, 1024, 16384),
    gather_rows=(256, 4096, 65536),
    elementwise=(llama_like_shape(1, 5120, 13824, 40, 10, 128), llama_like_shape(1, 1024, 2816, 16, 4, 64)),
    elementwise_rows=(1, 6, 16, 32, 64, 80, 2048),
    dispatch_shape=llama_like_shape(1, 64, 128, 3, 1, 64),
    dispatch_layers=(2, 8, 16),
    linear_steps=LINEAR_STEPS,
    attention_steps=ATTENTION_STEPS,
    row_steps=ROW_STEPS,
    gap_shapes=(
        llama_like_shape(8, 1024, 2816, 16, 4, 64, vocab=65536),
        llama_like_shape(24, 1024, 2816, 16, 4, 64, vocab=65536),
        llama_like_shape(20, 2560, 6912, 18, 3, 128, vocab=100352),
    ),
)  # fmt: skip
_CUDA_FULL = replace(
    _CUDA_QUICK,
    trial_s=0.012,
    linear_shapes=(
        *_CUDA_QUICK.linear_shapes, (640, 640), (3456, 640), (1024, 1024), (3072, 2048), (2048, 8192), (16384, 2048),
        (20480, 1280), (1280, 10240), (10240, 8192),
    ),
    linear_rows=(1, 2, 4, 8, 9, 16, 24, 40, 64, 96),
    quantized_rows=(1, 2, 4, 8, 9, 16, 24, 40, 64, 96, 512),
    head_shapes=((65536, 1024), (100352, 5120), (131072, 2048), (32768, 3072)),
    head_rows=(1, 2, 5, 8, 9, 16, 24, 64, 96),
    heads=(
        *_CUDA_QUICK.heads, Heads(28, 4, 128), Heads(48, 4, 128), Heads(9, 3, 64), Heads(12, 12, 64), Heads(24, 3, 64),
    ),
    batches=(1, 4, 16),
    tokens=(700, 6500, 40_000, 131_072),
    queries=(1, 3, 5, 8, 16),
    portable=True,
)  # fmt: skip


def suite_for(device: str, quick: bool) -> Suite:
    """The sizes for a device of type "cpu" or "cuda"."""
    if device == "cuda":
        return _CUDA_QUICK if quick else _CUDA_FULL
    return _CPU_QUICK if quick else _CPU_FULL
