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
from ridgeplan.kernels.norm import Norm, add_rms_norm, add_rms_norm_cost
from ridgeplan.kernels.normed_linear import normed_linear, normed_linear_cost
from ridgeplan.kernels.swiglu import swiglu
from ridgeplan.roofline.cost import Cost
from ridgeplan.validate.bench import Bench
from ridgeplan.validate.kernel_case import Call, Case, SpeedUp, fresh, relative_error
from ridgeplan.validate.kernel_peers import Product, tinygemm
from ridgeplan.validate.kernel_sizes import LinearSize

GROUP = 128
DENSE = "cuBLAS bf16"
APART = "ours, one by one"
EPS = 1e-5
STEP = 0.01  # of a code, so that weights are about as large as a model's


def int4_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[Case]:
    """4-bit weights against 16-bit weights in cuBLAS, and against torch's own 4-bit product.

    As packing takes long, variants are copies of one weight, each in memory of its own; x is the same.
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


def fused_int4_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[Case]:
    """4-bit weights of gate and up with the norm before them and the activation after them in the same kernel, as far
    as the package fuses them, against one kernel after the other."""
    for size in sizes:
        weight = Int4Weight.pack(*_int4_parts(bench, size))
        weights = [copy.deepcopy(weight) for _ in range(bench.variants(weight.bytes))]
        yield from _fused_cases(bench, "fused_int4", size, weights, weight.dequantize(torch.float32))


def fused_dense_cases(bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[Case]:
    """The same of 16-bit weights."""
    for size in sizes:
        weight = STEP * fresh(bench, size.outputs, size.inputs)
        weights = weight.repeat(bench.variants(weight.nbytes), 1, 1)
        yield from _fused_cases(bench, "fused_dense", size, list(weights), weight.float())


def _fused_cases(
    bench: Bench, kernel: str, size: LinearSize, weights: Sequence[Tensor | Int4Weight], exact: Tensor
) -> Iterator[Case]:
    for rows, least in size.speedups:
        hidden, update = fresh(bench, 2, rows, size.inputs)
        norm = Norm(update, fresh(bench, size.inputs), EPS)
        yield Case(
            kernel,
            f"{rows} x {size.inputs} -> {size.outputs // 2}",
            _fused_cost(hidden, norm, weights[0]),
            _fused(hidden, norm, weights),
            {APART: _apart(hidden, norm, weights)},
            partial(_fused_error, hidden, norm, weights[0], exact),
            SpeedUp(least),
            APART,
            len(weights),
        )


def _fused(hidden: Tensor, norm: Norm, weights: Sequence[Tensor | Int4Weight]) -> Call:
    return lambda i: normed_linear(hidden, norm, weights[i], gated=True)


def _apart(hidden: Tensor, norm: Norm, weights: Sequence[Tensor | Int4Weight]) -> Call:
    def call(i: int) -> Tensor:
        weight, normed = weights[i], add_rms_norm(hidden, norm.update, norm.weight, norm.eps)[1]
        return swiglu(linear_int4(normed, weight) if isinstance(weight, Int4Weight) else linear_dense(normed, weight))

    return call


def _fused_cost(hidden: Tensor, norm: Norm, weight: Tensor | Int4Weight) -> Cost:
    """Of one row all is inside; of more the norm is a kernel of its own."""
    if len(hidden) == 1:
        return normed_linear_cost(hidden, norm, weight, gated=True)
    product = linear_int4_cost if isinstance(weight, Int4Weight) else linear_dense_cost
    return add_rms_norm_cost(hidden, norm.update, norm.weight) + product(hidden, weight, gated=True)


def _fused_error(hidden: Tensor, norm: Norm, weight: Tensor | Int4Weight, exact: Tensor) -> float:
    update = None if norm.update is None else norm.update.float()
    _, normed = add_rms_norm(hidden.float(), update, norm.weight.float(), norm.eps, backend="twin")
    reference = swiglu(normed @ exact.t(), backend="twin")
    return relative_error(normed_linear(hidden, norm, weight, gated=True)[1], reference)


def _int4_parts(bench: Bench, size: LinearSize) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero, as `Int4Weight.pack` takes them."""
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
