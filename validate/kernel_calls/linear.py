"""Calls of matrix products of few rows with 4-bit, 8-bit and 16-bit weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.layer import swiglu
from ridgeplan.kernels.linear import QuantizedWeight, linear_dense, linear_quantized
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight
from ridgeplan.roofline import ops
from ridgeplan.validate.kernel_calls.case import BenchCase, Product, SpeedUp, fresh, relative_error, tinygemm
from ridgeplan.validate.kernel_calls.sizes import GROUP, LinearSize
from ridgeplan.validate.timing import Bench, KernelCall

DENSE = "cuBLAS bf16"
APART = "ours, swiglu apart"
STEP = 0.01  # size of a code's step, so that weights are about as large as a model's
Products = Sequence[Callable[..., Tensor]]  # x, and optionally gated -> product, one for each variant of the weight


def linear_call(
    kind: str,
    x: Tensor,
    products: Products,
    outputs: int,
    weight_bytes: float,
    exact: Callable[[], Tensor] | None = None,
    peers: Mapping[str, Product] | None = None,
) -> KernelCall:
    """Products of x [..., rows, inputs] with variants of one weight.

    weight_bytes: per parameter. exact: makes the weight in float32 [outputs, inputs], for the error. peers: products
    of x and a variant's number.
    """
    rows, inputs = x.shape[-2:]
    cost = ops.linear(rows, inputs, outputs, weight_bytes, x.element_size())

    def error() -> float:
        assert exact is not None, "the bench has the weight at hand"
        return relative_error(products[0](x), x.float() @ exact().t())

    return KernelCall(
        kind, f"{rows} x {inputs} -> {outputs}", cost, lambda i: products[i](x), len(products), rows, outputs, inputs,
        error, {name: partial(product, x) for name, product in (peers or {}).items()},
    )  # fmt: skip


def gated_call(
    kind: str, x: Tensor, products: Products, outputs: int, weight_bytes: float, exact: Callable[[], Tensor]
) -> KernelCall:
    """The same with fused SwiGLU of gate and up products, against both products followed by `swiglu`."""
    rows, inputs = x.shape
    cost = ops.gated_linear(rows, inputs, outputs // 2, weight_bytes, x.element_size())

    def error() -> float:
        reference = swiglu(x.float() @ exact().t(), backend="reference")
        return relative_error(products[0](x, gated=True), reference)

    return KernelCall(
        kind, f"{rows} x {inputs} -> {outputs // 2}", cost, lambda i: products[i](x, gated=True), len(products), rows,
        outputs, inputs, error, {APART: lambda i: swiglu(products[i](x))},
    )  # fmt: skip


def _random_codes(bench: Bench, size: LinearSize, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes below `levels`, scale and zero, as the weights' `pack` takes them."""
    codes = torch.randint(levels, (size.outputs, size.inputs), dtype=torch.int32, device=bench.device)
    scale, zero = STEP * 16 / levels * fresh(bench, 2, size.outputs, size.inputs // GROUP)
    return codes, scale, zero


def _quantized_products(bench: Bench, weight: QuantizedWeight) -> Products:
    """Packing is slow, so variants are copies of one weight."""
    return [partial(linear_quantized, weight=copy.deepcopy(weight)) for _ in range(bench.variants(weight.bytes))]


def _dense_products(weights: Tensor) -> Product:
    return lambda x, i: functional.linear(x, weights[i])


def _weight_bytes(weight: QuantizedWeight) -> float:
    return weight.bytes / (weight.outputs * weight.inputs)


def int4_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[BenchCase]:
    """4-bit weights against 16-bit weights in cuBLAS, and against torch's own 4-bit product."""
    for size in sizes:
        codes, scale, zero = _random_codes(bench, size, 16)
        weight = Int4Weight.pack(codes, scale, zero)
        peers: dict[str, Product] = {}
        if bench.device.type == "cuda":
            peers["torch tinygemm"] = tinygemm(codes, scale, zero, bench.variants(weight.bytes))
        yield from _quantized_cases(bench, "linear_int4", size, weight, peers)


def int8_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[BenchCase]:
    """8-bit weights, plain or hierarchical, against 16-bit weights in cuBLAS."""
    for size in sizes:
        yield from _quantized_cases(bench, "linear_int8", size, Int8Weight.pack(*_random_codes(bench, size, 256)), {})


def _quantized_cases(
    bench: Bench, kernel: str, size: LinearSize, weight: QuantizedWeight, peers: Mapping[str, Product]
) -> Iterator[BenchCase]:
    products = _quantized_products(bench, weight)
    dense = _dense_products(weight.dequantize(bench.pool.dtype).repeat(len(products), 1, 1))
    for rows, speedup in size.speedups:
        x = fresh(bench, rows, size.inputs)
        call = linear_call(
            kernel, x, products, size.outputs, _weight_bytes(weight), weight.dequantize, {DENSE: dense, **peers}
        )
        yield BenchCase(kernel, call, SpeedUp(speedup), DENSE)


def dense_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[BenchCase]:
    """16-bit weights against cuBLAS; variants are copies of one weight."""
    for size in sizes:
        weight, weights, products = _dense_weights(bench, size)
        for rows, speedup in size.speedups:
            x = fresh(bench, rows, size.inputs)
            peers = {DENSE: _dense_products(weights)}
            call = linear_call("linear", x, products, size.outputs, bench.element_bytes, weight.float, peers)
            yield BenchCase("linear_dense", call, SpeedUp(speedup), DENSE)


def _dense_weights(bench: Bench, size: LinearSize) -> tuple[Tensor, Tensor, Products]:
    """A weight, copies of it [variants, outputs, inputs], and their products."""
    weight = STEP * fresh(bench, size.outputs, size.inputs)
    weights = weight.repeat(bench.variants(weight.nbytes), 1, 1)
    return weight, weights, [partial(linear_dense, weight=each) for each in weights]


def gated_int4_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[BenchCase]:
    """4-bit gate and up weights with fused SwiGLU, against the same product followed by `swiglu`."""
    for size in sizes:
        yield from _gated_cases(bench, "int4", size, Int4Weight.pack(*_random_codes(bench, size, 16)))


def gated_int8_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[BenchCase]:
    """The same with 8-bit weights."""
    for size in sizes:
        yield from _gated_cases(bench, "int8", size, Int8Weight.pack(*_random_codes(bench, size, 256)))


def _gated_cases(bench: Bench, bits: str, size: LinearSize, weight: QuantizedWeight) -> Iterator[BenchCase]:
    products = _quantized_products(bench, weight)
    for rows, speedup in size.speedups:
        x = fresh(bench, rows, size.inputs)
        call = gated_call(f"linear_{bits}", x, products, size.outputs, _weight_bytes(weight), weight.dequantize)
        yield BenchCase(f"gated_{bits}", call, SpeedUp(speedup), APART)


def gated_dense_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[BenchCase]:
    """The same with 16-bit weights."""
    for size in sizes:
        weight, _, products = _dense_weights(bench, size)
        for rows, speedup in size.speedups:
            x = fresh(bench, rows, size.inputs)
            call = gated_call("linear", x, products, size.outputs, bench.element_bytes, weight.float)
            yield BenchCase("gated_dense", call, SpeedUp(speedup), APART)
