"""Trials of linear layers, with the runtime's own dense and 4-bit products."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

from ridgeplan.roofline import ops
from ridgeplan.roofline.passes import weight_bytes
from ridgeplan.runtime.model.linear import Dense, Linear
from ridgeplan.runtime.quantization.pack import fitting_group, int4_linear
from ridgeplan.validate.timing import Bench, Trial

WEIGHT_GROUP = 128

Shapes = Iterable[tuple[int, int]]  # outputs, inputs


def dense_trials(bench: Bench, kind: str, shapes: Shapes, rows: Iterable[int]) -> Iterator[Trial]:
    """Full-precision products of `rows` tokens."""
    for outputs, inputs in shapes:
        weights = [Dense(weight) for weight in bench.randoms(outputs, inputs)]
        for count in rows:
            yield _trial(bench, kind, weights, (count, inputs, outputs), bench.element_bytes)


def int4_trials(bench: Bench, shapes: Shapes, rows: Iterable[int]) -> Iterator[Trial]:
    """Products with 4-bit weights. Packing is slow, so variants are copies of one weight."""
    for outputs, inputs in shapes:
        packed = int4_linear(Dense(bench.random(outputs, inputs)), WEIGHT_GROUP)
        weights: list[Linear] = [copy.deepcopy(packed) for _ in range(bench.variants(packed.bytes))]
        per_parameter = weight_bytes(4, fitting_group(inputs, WEIGHT_GROUP), bench.element_bytes)
        for count in rows:
            yield _trial(bench, "linear_int4", weights, (count, inputs, outputs), per_parameter)


def _trial(
    bench: Bench, kind: str, weights: list[Dense] | list[Linear], sizes: tuple[int, int, int], per_parameter: float
) -> Trial:
    rows, inputs, outputs = sizes
    x = bench.random(1, rows, inputs)
    cost = ops.linear(rows, inputs, outputs, per_parameter, bench.element_bytes)
    return Trial(kind, f"{rows} x {inputs} -> {outputs}", cost, lambda i: weights[i](x), len(weights))
