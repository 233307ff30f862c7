"""Trials of what stands between the matrix products of a step: norms, rotary embedding, activation, sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.roofline import ops
from ridgeplan.roofline.shapes import ModelShape
from ridgeplan.runtime.decoder import rotate
from ridgeplan.runtime.sampling import Sampling, draw, judge
from ridgeplan.validate.bench import Bench, Trial
from ridgeplan.validate.toy import Toy


def elementwise_trials(bench: Bench, shape: ModelShape, rows: Iterable[int]) -> Iterator[Trial]:
    """Norm and activation of one layer on `rows` tokens of one sequence."""
    for count in rows:
        toy = Toy.build(bench, shape, count, 1)
        yield _norm_trial(toy, count)
        yield _swiglu_trial(toy, count)


def rope_trials(bench: Bench, shape: ModelShape, rows: Iterable[int]) -> Iterator[Trial]:
    """Rotary embedding and cache append of one layer on `rows` tokens of one sequence."""
    for count in rows:
        yield _rope_trial(Toy.build(bench, shape, count, 1), count)


def sampling_trials(bench: Bench, vocabs: Iterable[int], queries: int) -> Iterator[Trial]:
    """One draw from logits as a draft step makes it, and the verdict on `queries` rows of a verification."""
    for vocab in vocabs:
        logits = bench.random(1, queries, vocab).float()
        uniform = torch.rand(1, queries, dtype=torch.float64, device=bench.device)
        yield Trial("sampling", f"a draw from {vocab}", ops.sampling(1, vocab), _drawing(logits[:, 0], uniform[:, 0]))
        judging = _judging(logits, uniform)
        yield Trial("sampling", f"a verdict on {queries} x {vocab}", ops.sampling(queries, vocab), judging)


def _norm_trial(toy: Toy, rows: int) -> Trial:
    bench, hidden = toy.bench, toy.shape.hidden
    stream, update = bench.random(2, 1, rows, hidden)
    weight = bench.random(hidden)
    cost = ops.elementwise(rows, 2 * hidden, 2 * hidden, bench.element_bytes)
    return Trial("elementwise", f"norm, {rows} rows", cost, lambda _: toy.decoder.norm(stream + update, weight))


def _rope_trial(toy: Toy, rows: int) -> Trial:
    shape, cache, bench = toy.shape, toy.cache, toy.bench
    turned_heads = shape.q_heads + shape.kv_heads
    heads = bench.random(1, rows, turned_heads + shape.kv_heads, shape.head_dim)
    reader = cache.target_reader(rows)
    rotary = toy.decoder.rotary(reader.positions, bench.pool.dtype)

    def call(_: int) -> None:
        turned, values = heads.split((turned_heads, shape.kv_heads), dim=-2)
        _, keys = rotate(turned, *rotary).split((shape.q_heads, shape.kv_heads), dim=-2)
        cache.write(0, reader, keys, values)

    width = shape.q_width + 2 * shape.kv_width
    return Trial("rope", f"rope, {rows} rows", ops.elementwise(rows, width, width, bench.element_bytes), call)


def _swiglu_trial(toy: Toy, rows: int) -> Trial:
    width = toy.shape.intermediate
    both = toy.bench.random(1, rows, 2 * width)

    def call(_: int) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate) * up

    cost = ops.elementwise(rows, 2 * width, width, toy.bench.element_bytes)
    return Trial("elementwise", f"swiglu, {rows} rows", cost, call)


def _drawing(logits: Tensor, uniform: Tensor) -> Callable[[int], Tensor]:
    return lambda _: draw(Sampling().probabilities(logits), uniform)


def _judging(logits: Tensor, uniform: Tensor) -> Callable[[int], object]:
    """All drafts agree with the target, so nothing ends the verdict early."""
    queries = logits.shape[1]
    drafts = Sampling().probabilities(logits[:, :-1])
    drafted = drafts.argmax(-1)
    room = torch.full((1,), queries, dtype=torch.int32, device=logits.device)
    return lambda _: judge(Sampling().probabilities(logits), drafts, drafted, room, uniform)
