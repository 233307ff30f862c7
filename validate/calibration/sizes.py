"""The sizes of the kernel calls that a calibration and the suite measure; sizes.toml has them by device."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog.gguf_types import NESTED_GROUP
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.latency import (
    INTEGER,
    SCANS,
    STORED_LINEAR,
    WIDE,
    WIDE_SCANS,
    prefill_attention_kind,
    scan_kind,
)
from ridgeplan.validate.kernel_calls.attention import DecodeSize, Heads
from ridgeplan.validate.kernel_calls.sizes import ExpertSize, LatentSize, StateSize, as_tuples
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
    expert_sizes: tuple[ExpertSize, ...] = ()
    latent_sizes: tuple[LatentSize, ...] = ()
    state_sizes: tuple[StateSize, ...] = ()
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
        return [size for size in sizes if scan_kind(scan, *astuple(size.heads)) == kind]

    @property
    def _draft_sizes(self) -> list[DecodeSize]:
        return [size for sizes in self.decode_sizes().values() for size in sizes if size.bits == 4]

    @property
    def vocabs(self) -> tuple[int, ...]:
        """Sizes of vocabularies to sample from."""
        return tuple(outputs for outputs, _ in self.head_shapes)

    @property
    def stored_shapes(self) -> Shapes:
        """Every second shape of the linear layers whose rows are whole super-blocks of GGUF's K types."""
        return tuple(shape for shape in self.linear_shapes if shape[1] % NESTED_GROUP == 0)[::2]

    def steps_of(self, kind: str) -> tuple[int, ...] | None:
        """Rows at which the time of a class may step up; None where it grows with bytes and FLOPs alone."""
        product = kind.removeprefix("grouped_").removesuffix(INTEGER)
        if product in ("linear", "linear_int8", "linear_int4", STORED_LINEAR, "head"):
            return self.linear_steps
        if kind.startswith("attention") and kind != "attention_mla":
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


SAMPLING_STEPS = (1,)  # verification of drafts launches more kernels than a draw of one token


def suite_for(device: str, quick: bool) -> Suite:
    """The sizes for a device of type "cpu" or "cuda"."""
    return load_suite(f"{device}_{'quick' if quick else 'full'}")


@cache
def load_suite(name: str) -> Suite:
    """A table of sizes.toml."""
    values = _values(tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")), name)
    values["heads"] = [Heads(*each) for each in values["heads"]]
    values["state_sizes"] = [StateSize(*each) for each in values.get("state_sizes", ())]
    values["expert_sizes"] = [ExpertSize(*each) for each in values.get("expert_sizes", ())]
    values["latent_sizes"] = [LatentSize(*each) for each in values.get("latent_sizes", ())]
    for field in ("elementwise", "gap_shapes"):
        values[field] = [llama_like_shape(*each) for each in values.get(field, ())]
    return Suite(**as_tuples(values) | {"dispatch_shape": llama_like_shape(*values["dispatch_shape"])})


def _values(tables: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """The values of a table and those of its base. A key that ends in + extends a list of the base."""
    table = dict(tables[name])
    values = _values(tables, table.pop("base")) if "base" in table else {}
    for key, value in table.items():
        field = key.removesuffix("+")
        values[field] = values[field] + value if field != key else value
    return values
