"""Calls of matrix products of few rows with 4-bit, 8-bit and 16-bit weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.layer import swiglu
from ridgeplan.kernels.linear import (
    QuantizedWeight,
    linear_dense,
    linear_dense_cost,
    linear_quantized,
    linear_quantized_cost,
)
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight
from ridgeplan.roofline.cost import Cost
from ridgeplan.validate.kernel_calls.case import Call, KernelCase, Product, SpeedUp, fresh, relative_error, tinygemm
from ridgeplan.validate.kernel_calls.sizes import GROUP, LinearSize
from ridgeplan.validate.timing import Bench

DENSE = "cuBLAS bf16"
APART = "ours, swiglu apart"
STEP = 0.01  # size of a code's step, so that weights are about as large as a model's


def int4_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[KernelCase]:
    """4-bit weights against 16-bit weights in cuBLAS, and against torch's own 4-bit product."""
    for size in sizes:
        codes, scale, zero = _codes(bench, size, 16)
        weight = Int4Weight.pack(codes, scale, zero)
        peers: dict[str, Product] = {}
        if bench.device.type == "cuda":
            peers["torch tinygemm"] = tinygemm(codes, scale, zero, bench.variants(weight.bytes))
        yield from _quantized(bench, "linear_int4", size, weight, peers)


def int8_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[KernelCase]:
    """8-bit weights, plain or hierarchical, against 16-bit weights in cuBLAS."""
    for size in sizes:
        yield from _quantized(bench, "linear_int8", size, Int8Weight.pack(*_codes(bench, size, 256)), {})


def _quantized(
    bench: Bench, kernel: str, size: LinearSize, weight: QuantizedWeight, peers: Mapping[str, Product]
) -> Iterator[KernelCase]:
    """Packing is slow, so variants are copies of one weight; x is shared."""
    variants = bench.variants(weight.bytes)
    weights = [copy.deepcopy(weight) for _ in range(variants)]
    products = {DENSE: _dense(weight.dequantize(bench.pool.dtype).repeat(variants, 1, 1)), **peers}
    for rows, least in size.speedups:
        x = fresh(bench, rows, size.inputs)
        yield KernelCase(
            kernel,
            f"{rows} x {size.inputs} -> {size.outputs}",
            linear_quantized_cost(x, weight),
            _package_quantized(x, weights),
            {name: partial(product, x) for name, product in products.items()},
            partial(_quantized_error, x, weight),
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
        yield from _gated_quantized(bench, "gated_int4", size, Int4Weight.pack(*_codes(bench, size, 16)))


def gated_int8_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[KernelCase]:
    """The same with 8-bit weights."""
    for size in sizes:
        yield from _gated_quantized(bench, "gated_int8", size, Int8Weight.pack(*_codes(bench, size, 256)))


def _gated_quantized(bench: Bench, kernel: str, size: LinearSize, weight: QuantizedWeight) -> Iterator[KernelCase]:
    weights = [copy.deepcopy(weight) for _ in range(bench.variants(weight.bytes))]
    products = [partial(linear_quantized, weight=each) for each in weights]
    for rows, least in size.speedups:
        x = fresh(bench, rows, size.inputs)
        cost = linear_quantized_cost(x, weight, gated=True)
        yield _gated(kernel, size, x, cost, products, weight.dequantize, least)


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


def _codes(bench: Bench, size: LinearSize, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes below `levels`, scale and zero, as the weights' `pack` takes them."""
    codes = torch.randint(levels, (size.outputs, size.inputs), dtype=torch.int32, device=bench.device)
    scale, zero = STEP * 16 / levels * fresh(bench, 2, size.outputs, size.inputs // GROUP)
    return codes, scale, zero


def _package_quantized(x: Tensor, weights: Sequence[QuantizedWeight]) -> Call:
    return lambda i: linear_quantized(x, weights[i])


def _package_dense(x: Tensor, weights: Tensor) -> Call:
    return lambda i: linear_dense(x, weights[i])


def _dense(weights: Tensor) -> Product:
    return lambda x, i: functional.linear(x, weights[i])


def _quantized_error(x: Tensor, weight: QuantizedWeight) -> float:
    reference = x.float() @ weight.dequantize(torch.float32).t()
    return relative_error(linear_quantized(x, weight), reference)


def _dense_error(x: Tensor, weight: Tensor) -> float:
    return relative_error(linear_dense(x, weight), x.float() @ weight.float().t())
