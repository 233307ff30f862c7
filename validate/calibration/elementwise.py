"""Trials of the small operations of a step: norms, rotary embedding, activation, sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product

import torch
from torch import Tensor

from ridgeplan.kernels.layer.norm import add_rms_norm_cost
from ridgeplan.kernels.layer.rope import rope_append, rope_append_cost
from ridgeplan.kernels.layer.swiglu import swiglu, swiglu_cost
from ridgeplan.kernels.sampling import draw, rejection_sample, softmax_distribution
from ridgeplan.kernels.sampling.cost import draw_cost, filter_cost
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.validate.random_decoder import RandomDecoder
from ridgeplan.validate.timing import Bench, Trial


def elementwise_trials(bench: Bench, shape: ModelShape, rows: Iterable[int]) -> Iterator[Trial]:
    """Norm and activation of one layer on `rows` tokens of one sequence."""
    for count in rows:
        model = RandomDecoder.build(bench, shape, count, 1)
        yield _norm_trial(model, count)
        yield _swiglu_trial(model, count)


def rope_trials(bench: Bench, shape: ModelShape, rows: Iterable[int]) -> Iterator[Trial]:
    """Rotary embedding and cache append of one layer on `rows` tokens of one sequence."""
    for count in rows:
        yield _rope_trial(RandomDecoder.build(bench, shape, count, 1), count)


def sampling_trials(
    bench: Bench, vocabs: Iterable[int], batches: Iterable[int], queries: Iterable[int]
) -> Iterator[Trial]:
    """A draft step's draw from logits, and a verification's rejection sampling."""
    for vocab, batch in product(vocabs, batches):
        for count in queries:
            logits = bench.random(batch, count, vocab)
            uniform = torch.rand(batch, count, dtype=torch.float64, device=bench.device)
            if count == 1:
                yield _draw_trial(logits[:, 0], uniform[:, 0])
            else:
                yield _rejection_trial(logits, uniform)


def _draw_trial(logits: Tensor, uniform: Tensor) -> Trial:
    rows, vocab = logits.shape
    cost = filter_cost(logits) + draw_cost(logits)
    return Trial("sampling", f"{rows} draws from {vocab}", cost, _drawing(logits, uniform), width=rows, depth=1)


def _rejection_trial(logits: Tensor, uniform: Tensor) -> Trial:
    batch, queries, vocab = logits.shape
    cost = filter_cost(logits) + draw_cost(logits[:, 0], logits[:, 0])
    name = f"rejection sampling of {batch} x {queries} x {vocab}"
    return Trial("sampling", name, cost, _rejecting(logits, uniform), 1, queries, batch * queries, queries)


def _norm_trial(model: RandomDecoder, rows: int) -> Trial:
    bench, hidden = model.bench, model.shape.hidden
    stream, update = bench.random(2, 1, rows, hidden)
    weight = bench.random(hidden)
    cost = add_rms_norm_cost(stream, update, weight)
    return Trial(
        "elementwise", f"norm, {rows} rows", cost, lambda _: model.decoder.norm(stream, update, weight), rows=rows
    )


def _rope_trial(model: RandomDecoder, rows: int) -> Trial:
    shape, cache, bench = model.shape, model.cache, model.bench
    qkv = bench.random(1, rows, shape.q_width + 2 * shape.kv_width)
    slots = cache.target_metadata(rows).slots
    tables = model.decoder.rotary(slots)
    cost = rope_append_cost(qkv, tables, slots, None)
    return Trial(
        "rope",
        f"rope, {rows} rows",
        cost,
        lambda _: rope_append(qkv, tables, *cache.full(0), slots, shape.q_heads),
        rows=rows,
    )


def _swiglu_trial(model: RandomDecoder, rows: int) -> Trial:
    both = model.bench.random(1, rows, 2 * model.shape.intermediate)
    return Trial("elementwise", f"swiglu, {rows} rows", swiglu_cost(both), lambda _: swiglu(both), rows=rows)


def _drawing(logits: Tensor, uniform: Tensor) -> Callable[[int], Tensor]:
    return lambda _: draw(softmax_distribution(logits, 1.0), uniform)


def _rejecting(logits: Tensor, uniform: Tensor) -> Callable[[int], object]:
    """Rejection sampling of the target's own likeliest tokens, most of which are accepted."""
    batch, queries, _ = logits.shape
    drafts = [softmax_distribution(row.contiguous(), 1.0) for row in logits[:, :-1].unbind(1)]
    drafted = logits[:, :-1].argmax(-1)
    max_tokens = torch.full((batch,), queries, dtype=torch.int32, device=logits.device)
    return lambda _: rejection_sample(softmax_distribution(logits, 1.0), drafts, drafted, max_tokens, uniform)
