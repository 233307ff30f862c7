"""Cases of products of few rows with 4-bit and with 16-bit weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.int4_weight import Int4Weight
from ridgeplan.kernels.linear_dense import linear_dense, linear_dense_cost
from ridgeplan.kernels.linear_int4 import linear_int4, linear_int4_cost
from ridgeplan.validate.bench import Bench
from ridgeplan.validate.kernel_case import Call, Case, SpeedUp, fresh, relative_error
from ridgeplan.validate.kernel_peers import Product, tinygemm
from ridgeplan.validate.kernel_sizes import LinearSize

GROUP = 128
DENSE = "cuBLAS bf16"
STEP = 0.01  # of a code, so that weights are about as large as a model's


def int4_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[Case]:
    """4-bit weights against 16-bit weights in cuBLAS, and against torch's own 4-bit product.

    As packing takes long, variants are copies of one weight, each in memory of its own; x is the same.
    """
    for size in sizes:
        codes = torch.randint(16, (size.outputs, size.inputs), dtype=torch.int32, device=bench.device)
        scale, zero = STEP * fresh(bench, 2, size.outputs, size.inputs // GROUP)
        weight = Int4Weight.pack(codes, scale, zero)
        variants = bench.variants(weight.bytes)
        weights = [copy.deepcopy(weight) for _ in range(variants)]
        products: dict[str, Product] = {DENSE: _dense(weight.dequantize(bench.pool.dtype).repeat(variants, 1, 1))}
        if bench.device.type == "cuda":
            products["torch tinygemm"] = tinygemm(codes, scale, zero, variants)
        for rows, least in size.speedups:
            x = fresh(bench, rows, size.inputs)
            yield Case(
                "linear_int4",
                f"{rows} x {size.inputs} -> {size.outputs}",
                linear_int4_cost(x, weight),
                _int4(x, weights),
                {name: partial(product, x) for name, product in products.items()},
                partial(_int4_error, x, weight),
                SpeedUp(least),
                DENSE,
                variants,
            )


def dense_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[Case]:
    """16-bit weights against cuBLAS; variants are copies of one weight."""
    for size in sizes:
        weight = STEP * fresh(bench, size.outputs, size.inputs)
        weights = weight.repeat(bench.variants(weight.nbytes), 1, 1)
        peer = _dense(weights)
        for rows, least in size.speedups:
            x = fresh(bench, rows, size.inputs)
            yield Case(
                "linear_dense",
                f"{rows} x {size.inputs} -> {size.outputs}",
                linear_dense_cost(x, weight),
                _package_dense(x, weights),
                {DENSE: partial(peer, x)},
                partial(_dense_error, x, weight),
                SpeedUp(least),
                DENSE,
                len(weights),
            )


def _int4(x: Tensor, weights: Sequence[Int4Weight]) -> Call:
    return lambda i: linear_int4(x, weights[i])


def _package_dense(x: Tensor, weights: Tensor) -> Call:
    return lambda i: linear_dense(x, weights[i])


def _dense(weights: Tensor) -> Product:
    return lambda x, i: functional.linear(x, weights[i])


def _int4_error(x: Tensor, weight: Int4Weight) -> float:
    reference = x.float() @ weight.dequantize(torch.float32).t()
    return relative_error(linear_int4(x, weight), reference)


def _dense_error(x: Tensor, weight: Tensor) -> float:
    return relative_error(linear_dense(x, weight), x.float() @ weight.float().t())
