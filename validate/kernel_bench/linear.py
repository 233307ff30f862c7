"""Cases of matrix products of few rows with 4-bit and 16-bit weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.layer.swiglu import swiglu
from ridgeplan.kernels.linear.dense import linear_dense, linear_dense_cost
from ridgeplan.kernels.linear.int4 import linear_int4, linear_int4_cost
from ridgeplan.kernels.linear.int4_weight import Int4Weight
from ridgeplan.roofline.cost import Cost
from ridgeplan.validate.kernel_bench.baselines import Product, tinygemm
from ridgeplan.validate.kernel_bench.case import Call, KernelCase, SpeedUp, fresh, relative_error
from ridgeplan.validate.kernel_bench.sizes import GROUP, LinearSize
from ridgeplan.validate.timing import Bench

DENSE = "cuBLAS bf16"
APART = "ours, swiglu apart"
STEP = 0.01  # size of a code's step, so that weights are about as large as a model's


def int4_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[KernelCase]:
    """4-bit weights against 16-bit weights in cuBLAS, and against torch's own 4-bit product.

    Packing is slow, so variants are copies of one weight; x is shared.
    """
    for size in sizes:
        codes, scale, zero = _int4_parts(bench, size)
        weight = Int4Weight.pack(codes, scale, zero)
        variants = bench.variants(weight.bytes)
        weights = [copy.deepcopy(weight) for _ in range(variants)]
        products: dict[str, Product] = {DENSE: _dense(weight.dequantize(bench.pool.dtype).repeat(variants, 1, 1))}
        if bench.device.type == "cuda":
            products["torch tinygemm"] = tinygemm(codes, scale, zero, variants)
        for rows, least in size.speedups:
            x = fresh(bench, rows, size.inputs)
            yield KernelCase(
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


def dense_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[KernelCase]:
    """16-bit weights against cuBLAS; variants are copies of one weight."""
    for size in sizes:
        weight = STEP * fresh(bench, size.outputs, size.inputs)
        weights = weight.repeat(bench.variants(weight.nbytes), 1, 1)
        peer = _dense(weights)
        for rows, least in size.speedups:
            x = fresh(bench, rows, size.inputs)
            yield KernelCase(
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


def gated_int4_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[KernelCase]:
    """4-bit gate and up weights with fused SwiGLU, against the same product followed by `swiglu`."""
    for size in sizes:
        weight = Int4Weight.pack(*_int4_parts(bench, size))
        weights = [copy.deepcopy(weight) for _ in range(bench.variants(weight.bytes))]
        products = [partial(linear_int4, weight=each) for each in weights]
        for rows, least in size.speedups:
            x = fresh(bench, rows, size.inputs)
            cost = linear_int4_cost(x, weight, gated=True)
            yield _gated("gated_int4", size, x, cost, products, weight.dequantize, least)


def gated_dense_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[KernelCase]:
    """The same with 16-bit weights."""
    for size in sizes:
        weight = STEP * fresh(bench, size.outputs, size.inputs)
        weights = weight.repeat(bench.variants(weight.nbytes), 1, 1)
        products = [partial(linear_dense, weight=each) for each in weights]
        for rows, least in size.speedups:
            x = fresh(bench, rows, size.inputs)
            cost = linear_dense_cost(x, weight, gated=True)
            yield _gated("gated_dense", size, x, cost, products, weight.float, least)


def _gated(
    kernel: str,
    size: LinearSize,
    x: Tensor,
    cost: Cost,
    products: Sequence[Callable[..., Tensor]],
    exact: Callable[[], Tensor],
    least: float,
) -> KernelCase:
    def error() -> float:
        reference = swiglu(x.float() @ exact().t(), backend="reference")
        return relative_error(products[0](x, gated=True), reference)

    return KernelCase(
        kernel,
        f"{len(x)} x {size.inputs} -> {size.outputs // 2}",
        cost,
        lambda i: products[i](x, gated=True),
        {APART: lambda i: swiglu(products[i](x))},
        error,
        SpeedUp(least),
        APART,
        len(products),
    )


def _int4_parts(bench: Bench, size: LinearSize) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero, the arguments of `Int4Weight.pack`."""
    codes = torch.randint(16, (size.outputs, size.inputs), dtype=torch.int32, device=bench.device)
    scale, zero = STEP * fresh(bench, 2, size.outputs, size.inputs // GROUP)
    return codes, scale, zero


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
