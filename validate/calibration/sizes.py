"""The sizes of a calibration's trials, by device and thoroughness."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.validate.calibration.attention import DecodeSize, Heads
from ridgeplan.validate.random_decoder import llama_like_shape

Shapes = tuple[tuple[int, int], ...]
MOST_ELEMENT_BYTES = 4  # largest full-precision element of any device


@dataclass(frozen=True)
class Suite:
    """Sizes of all trials. Shapes are (outputs, inputs); rows are tokens per call."""

    pool_bytes: int
    trial_s: float
    matmul_size: int
    linear_shapes: Shapes
    linear_rows: tuple[int, ...]
    int4_rows: tuple[int, ...]
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

    @property
    def vocabs(self) -> tuple[int, ...]:
        """Sizes of vocabularies to sample from."""
        return tuple(outputs for outputs, _ in self.head_shapes)

    def decode_sizes(self) -> dict[str, list[DecodeSize]]:
        """Decode attention at every length, batch and number of queries that fits the pool, by kernel class.

        Only drafts read 4-bit codes, and a draft has one query.
        """
        found: dict[str, list[DecodeSize]] = {}
        for bits, heads, batch, tokens in product((0, 4, 8), self.heads, self.batches, self.tokens):
            for queries in (1,) if bits == 4 else self.queries:
                size = DecodeSize(heads, batch, tokens, queries, bits)
                if size.full_kv_elements * MOST_ELEMENT_BYTES <= self.pool_bytes:
                    found.setdefault(size.kind, []).append(size)
        return found


# SmolLM2-135M's layers, and those of a model with 1 to 2 billion parameters.
_CPU_QUICK = Suite(
    pool_bytes=288 << 20,
    trial_s=0.08,
    matmul_size=2048,
    linear_shapes=((960, 576), (576, 576), (3072, 576), (576, 1536), (2048, 2048), (8192, 2048)),
    linear_rows=(1, 2, 5, 8),
    int4_rows=(1, 4),
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
# Layers of Llama-3.1-8B, of a model of about 1 billion parameters, and SmolLM2-135M's.
_CUDA_QUICK = Suite(
    pool_bytes=6 << 30,
    trial_s=0.05,
    matmul_size=8192,
    linear_shapes=((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (3072, 2048), (16384, 2048), (960, 576)),
    linear_rows=(1, 5, 16),
    int4_rows=(1, 4, 16),
    head_shapes=((128256, 4096), (49152, 576)),
    head_rows=(1, 5),
    heads=(Heads(32, 8, 128), Heads(9, 3, 64)),
    batches=(1, 4),
    tokens=(1024, 16384, 131072),
    queries=(1, 5),
    prefill_shapes=((6144, 4096), (28672, 4096), (4096, 14336), (3072, 2048)),
    prefill_rows=(32, 64, 256, 2048),
    prefill_tokens=(1024, 4096, 16384),
    quantize_tokens=(128, 1024, 16384),
    gather_rows=(256, 4096, 65536),
    elementwise=(llama_like_shape(1, 4096, 14336, 32, 8, 128), llama_like_shape(1, 576, 1536, 9, 3, 64)),
    elementwise_rows=(1, 5, 2048),
    dispatch_shape=llama_like_shape(1, 64, 128, 3, 1, 64),
    dispatch_layers=(2, 8, 16),
)
_CUDA_FULL = replace(
    _CUDA_QUICK,
    trial_s=0.1,
    heads=(Heads(32, 8, 128), Heads(32, 32, 128), Heads(9, 3, 64)),
    batches=(1, 4, 16),
    tokens=(1024, 4096, 16384, 65536, 131072),
    queries=(1, 2, 5, 8),
)


def suite_for(device: str, quick: bool) -> Suite:
    """The trials for a device of type "cpu" or "cuda"."""
    if device == "cuda":
        return _CUDA_QUICK if quick else _CUDA_FULL
    return _CPU_QUICK if quick else _CPU_FULL
