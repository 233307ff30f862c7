"""QuantSpec's ridge plane (Fig 2 and 5): arithmetic intensity over context and batch, against the ridge point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ridgeplan.roofline.catalog.hardware import Hardware
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.cost import Cost, Term, maximum
from ridgeplan.roofline.passes import Op, PassTerms, decode_pass, prefill_pass


@dataclass(frozen=True)
class Plane:
    """Intensities in FLOP/byte and attention's share of the roofline latency, each [contexts, batches]."""

    contexts: np.ndarray
    batches: np.ndarray
    linear: np.ndarray
    attention: np.ndarray
    aggregate: np.ndarray
    attention_share: np.ndarray
    ridge_point: float


def decode_plane(
    shape: ModelShape, hardware: Hardware, contexts: Sequence[int], batches: Sequence[int], new_tokens: int = 1000
) -> Plane:
    """Fig 2: generation of `new_tokens` tokens, priced at the mean context, as costs are linear in it."""
    context, batch = np.meshgrid(np.asarray(contexts, float), np.asarray(batches, float), indexing="ij")
    terms = PassTerms.plain(batch, context + new_tokens / 2, hardware.element_bytes)
    return _plane(decode_pass(shape, terms), hardware, context, batch)


def prefill_plane(shape: ModelShape, hardware: Hardware, contexts: Sequence[int], batches: Sequence[int]) -> Plane:
    """Fig 5: prefill of prompts of these lengths, a batch at once."""
    context, batch = np.meshgrid(np.asarray(contexts, float), np.asarray(batches, float), indexing="ij")
    return _plane(prefill_pass(shape, batch, context, hardware.element_bytes), hardware, context, batch)


def _plane(ops: Sequence[Op], hardware: Hardware, context: np.ndarray, batch: np.ndarray) -> Plane:
    groups: dict[str, list[Op]] = {"linear": [], "attention": [], "other": []}
    for op in ops:
        groups[op.category].append(op)
    seconds = {name: sum((_roofline_s(op, hardware) for op in members), 0.0) for name, members in groups.items()}
    total = sum(seconds.values())
    return Plane(
        contexts=context[:, 0],
        batches=batch[0],
        linear=_intensity(groups["linear"], context),
        attention=_intensity(groups["attention"], context),
        aggregate=_intensity(ops, context),
        attention_share=np.broadcast_to(seconds["attention"] / total, context.shape),
        ridge_point=hardware.ridge_point,
    )


def _intensity(ops: Sequence[Op], like: np.ndarray) -> np.ndarray:
    cost = sum((op.total for op in ops), Cost())
    return np.broadcast_to(cost.intensity, like.shape)


def _roofline_s(op: Op, hardware: Hardware) -> Term:
    """The textbook roofline: full bandwidth, full peak, no launch time."""
    total = op.total
    return maximum(total.bytes / hardware.bandwidth_bytes_per_s, total.flops / hardware.compute_flops)
