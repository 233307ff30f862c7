"""Trials of linear layers, with the runtime's own dense, 4-bit and 8-bit products."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from torch import Tensor

from ridgeplan.kernels.linear.dense import linear_dense
from ridgeplan.kernels.linear.quantized import linear_quantized
from ridgeplan.kernels.linear.quantized.int4_weight import Int4Weight
from ridgeplan.kernels.linear.quantized.int8_weight import Int8Weight
from ridgeplan.roofline import ops
from ridgeplan.roofline.latency import linear_kind
from ridgeplan.roofline.passes import weight_bytes
from ridgeplan.runtime.model.linear import Dense, Linear
from ridgeplan.runtime.model.weights import WeightFormat
from ridgeplan.runtime.quantization.pack import fitting_group, quantized_linear
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
