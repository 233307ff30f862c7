"""Trials of linear layers in all weight formats, norms, rotary embedding, activation and sampling."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ridgeplan.kernels.layer import add_rms_norm_cost, rope_append, rope_append_cost, swiglu, swiglu_cost
from ridgeplan.kernels.linear import linear_dense, linear_quantized
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight
from ridgeplan.kernels.sampling import draw, draw_cost, filter_cost, rejection_sample, softmax_distribution
from ridgeplan.roofline import ops
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.latency import linear_kind
from ridgeplan.roofline.passes import weight_bytes
from ridgeplan.runtime.model.linear import Dense, Linear
from ridgeplan.runtime.model.weights import WeightFormat
from ridgeplan.runtime.quantization.calibration import fitting_group, quantized_linear
from ridgeplan.validate.random_model import RandomDecoder
from ridgeplan.validate.timing import Bench, Trial

WEIGHT_GROUP = 128

Shapes = Iterable[tuple[int, int]]  # outputs, inputs


def dense_trials(bench: Bench, kind: str, shapes: Shapes, rows: Iterable[int]) -> Iterator[Trial]:
    """Full-precision products of `rows` tokens."""
    for outputs, inputs in shapes:
        weights = [Dense(weight) for weight in bench.randoms(outputs, inputs)]
        for count in rows:
            yield _trial(bench, kind, weights, (count, inputs, outputs), bench.element_bytes)


def quantized_trials(bench: Bench, bits: int, shapes: Shapes, rows: Iterable[int]) -> Iterator[Trial]:
    """Products with 4-bit or 8-bit weights. Packing is slow, so variants are copies of one weight."""
    for outputs, inputs in shapes:
        packed = quantized_linear(Dense(bench.random(outputs, inputs)), WeightFormat(bits, WEIGHT_GROUP))
        weights: list[Linear] = [copy.deepcopy(packed) for _ in range(bench.variants(packed.bytes))]
        per_parameter = weight_bytes(bits, fitting_group(inputs, WEIGHT_GROUP), bench.element_bytes)
        for count in rows:
            yield _trial(bench, linear_kind(bits), weights, (count, inputs, outputs), per_parameter)


def portable_trials(bench: Bench, shapes: Shapes, rows: Iterable[int]) -> Iterator[Trial]:
    """4-bit and 8-bit products by Triton's kernel, and dense ones by the library's, as on GPUs older than Hopper."""
    for outputs, inputs in shapes:
        dense = [partial(linear_dense, weight=weight, backend="reference") for weight in bench.randoms(outputs, inputs)]
        for count in rows:
            yield _trial(bench, "linear", dense, (count, inputs, outputs), bench.element_bytes)
        for bits in (4, 8):
            yield from _portable_quantized_trials(bench, bits, outputs, inputs, rows)


def _portable_quantized_trials(
    bench: Bench, bits: int, outputs: int, inputs: int, rows: Iterable[int]
) -> Iterator[Trial]:
    packed = quantized_linear(Dense(bench.random(outputs, inputs)), WeightFormat(bits, WEIGHT_GROUP))
    assert isinstance(packed.weight, (Int4Weight, Int8Weight)), "the layouts of GPUs"
    copies = [copy.deepcopy(packed.weight) for _ in range(bench.variants(packed.bytes))]
    products = [partial(linear_quantized, weight=weight, backend="triton") for weight in copies]
    per_parameter = weight_bytes(bits, fitting_group(inputs, WEIGHT_GROUP), bench.element_bytes)
    for count in rows:
        yield _trial(bench, linear_kind(bits), products, (count, inputs, outputs), per_parameter)


def _trial(
    bench: Bench,
    kind: str,
    products: Sequence[Callable[[Tensor], Tensor]],
    sizes: tuple[int, int, int],
    per_parameter: float,
) -> Trial:
    rows, inputs, outputs = sizes
    x = bench.random(1, rows, inputs)
    cost = ops.linear(rows, inputs, outputs, per_parameter, bench.element_bytes)
    name = f"{rows} x {inputs} -> {outputs}"
    return Trial(kind, name, cost, lambda i: products[i](x), len(products), rows, outputs, inputs)


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
