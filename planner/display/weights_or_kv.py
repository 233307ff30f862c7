"""Whether weights or KV bind plain decoding, and the context up to which fewer bits of weights gain more."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeplan.planner.plan import Workload
from ridgeplan.planner.prediction import OpTime, Prediction
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.passes import WINDOWED_ATTENTION, category

BALANCED_WITHIN = 0.1  # neither side of a step is called the bottleneck if attention takes 40% to 60% of it


def weights_or_kv(plain: Prediction, shape: ModelShape, workload: Workload) -> Iterator[str]:
    """Two sentences on a prediction of plain decoding."""
    share = attention_share(plain)
    yield f"plain decoding spends {100 * share:.0f}% of a step on attention: {_bottleneck(share)}"
    crossover = crossover_context(plain, shape, workload)
    gain = f"at batch {workload.batch}, fewer bits of weights gain more than of KV"
    yield (
        f"{gain} at any context" if crossover is None else f"{gain} up to about {_rounded(crossover)} tokens of context"
    )


def attention_share(plain: Prediction) -> float:
    """The share of a step's time that attention takes."""
    ops = _step(plain)
    return sum(op.seconds for op in ops if category(op.kind) == "attention") / sum(op.seconds for op in ops)


def crossover_context(plain: Prediction, shape: ModelShape, workload: Workload) -> float | None:
    """Tokens of context at which a step of plain decoding reads as many bytes of weights as of KV; None if never.

    Up to there fewer bits of weights save more bytes, beyond it fewer bits of KV: what products read is the same at
    every context, and what attention reads grows with it, in layers with a sliding window up to that.
    """
    read = {"linear": 0.0, "attention": 0.0, "window": 0.0, "other": 0.0}
    for op in _step(plain):
        read["window" if op.op == WINDOWED_ATTENTION else category(op.kind)] += op.bytes
    tokens = workload.context + workload.new_tokens / 2  # on average, during the generation
    window = shape.window_tokens or tokens
    per_token, per_window_token = read["attention"] / tokens, read["window"] / min(tokens, window)
    inside = read["linear"] / (per_token + per_window_token)
    if shape.window_tokens is None or inside <= window:
        return inside
    return (read["linear"] - per_window_token * window) / per_token if per_token else None


def _step(plain: Prediction) -> list[OpTime]:
    return [op for op in plain.breakdown if op.part == "target"]


def _bottleneck(attention_share: float) -> str:
    if abs(attention_share - 0.5) <= BALANCED_WITHIN:
        return "the weights and the KV cache weigh about the same"
    return "the KV cache is the bottleneck" if attention_share > 0.5 else "the weights are the bottleneck"


def _rounded(tokens: float) -> str:
    """Three digits, as a whole number."""
    return f"{float(f'{tokens:.3g}'):,.0f}"
