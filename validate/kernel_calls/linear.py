"""Calls of matrix products of few rows with 4-bit, 8-bit and 16-bit weights, and with those of GGUF files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.layer import swiglu
from ridgeplan.kernels.linear import QuantizedWeight, linear_cost, linear_dense, linear_gguf, linear_quantized
from ridgeplan.kernels.linear.gguf import gguf_weight
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight
from ridgeplan.roofline.catalog.gguf import gguf_bits
from ridgeplan.roofline.catalog.gguf_types import BLOCK_FORMATS, NESTED_GROUP
from ridgeplan.roofline.latency import STORED_LINEAR
from ridgeplan.validate.kernel_calls.case import BenchCase, Product, SpeedUp, fresh, relative_error, tinygemm
from ridgeplan.validate.kernel_calls.sizes import LinearSize
from ridgeplan.validate.kernel_calls.vllm_peers import vllm_products
from ridgeplan.validate.timing import Bench, KernelCall

DENSE = "cuBLAS bf16"
APART = "ours, swiglu apart"
STORED_TYPES = {"linear_q4_k": 12, "linear_q6_k": 14}  # GGUF's numbers of the types
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
    cost = linear_cost(x, outputs, weight_bytes)

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
    """Gate and up products with fused SwiGLU, against both products followed by `swiglu`; see `linear_call`."""
    rows, inputs = x.shape
    cost = linear_cost(x, outputs, weight_bytes, gated=True)

    def error() -> float:
        reference = swiglu(x.float() @ exact().t(), backend="reference")
        return relative_error(products[0](x, gated=True), reference)

    return KernelCall(
        kind, f"{rows} x {inputs} -> {outputs // 2}", cost, lambda i: products[i](x, gated=True), len(products), rows,
        outputs, inputs, error, {APART: lambda i: swiglu(products[i](x))},
    )  # fmt: skip


@dataclass(frozen=True)
class LinearVariants:
    """Copies of one weight, so that a call does not find its weight in the L2 cache.

    products: a product by each copy. weight_bytes: per parameter. exact: makes the weight in float32 [outputs, inputs].
    dense: makes copies in full precision [variants, outputs, inputs]. peers: other projects' products of the weight.
    """

    products: Products
    weight_bytes: float
    exact: Callable[[], Tensor]
    dense: Callable[[], Tensor]
    peers: Mapping[str, Product] = field(default_factory=dict)

    @classmethod
    def draw(cls, bench: Bench, kind: str, size: LinearSize) -> LinearVariants:
        """Random weights of a kernel class. Packing is slow, so variants are copies of one weight."""
        if kind == "linear":
            weight = STEP * fresh(bench, size.outputs, size.inputs)
            copies = weight.repeat(bench.variants(weight.nbytes), 1, 1)
            products = [partial(linear_dense, weight=each) for each in copies]
            return cls(products, bench.element_bytes, weight.float, lambda: copies)
        if kind in STORED_TYPES:
            return cls._stored(bench, STORED_TYPES[kind], size)
        levels = {"linear_int4": 16, "linear_int8": 256}[kind]
        codes = torch.randint(levels, (size.outputs, size.inputs), dtype=torch.int32, device=bench.device)
        scale, zero = STEP * 16 / levels * fresh(bench, 2, size.outputs, size.inputs // size.group)
        pack = Int4Weight.pack if levels == 16 else Int8Weight.pack
        packed: QuantizedWeight = pack(codes, scale, zero)
        variants = bench.variants(packed.bytes)
        peers: dict[str, Product] = {}
        if bench.device.type == "cuda":
            peers = vllm_products(codes, scale, 4 if levels == 16 else 8, variants)
            if levels == 16:
                peers = {"torch tinygemm": tinygemm(codes, scale, zero, variants), **peers}
        return cls(
            [partial(linear_quantized, weight=copy.deepcopy(packed)) for _ in range(variants)],
            packed.bytes / (size.outputs * size.inputs),
            packed.dequantize,
            lambda: packed.dequantize(bench.pool.dtype).repeat(variants, 1, 1),
            peers,
        )

    @classmethod
    def _stored(cls, bench: Bench, kind: int, size: LinearSize) -> LinearVariants:
        """Random blocks of a GGUF type, whose super-blocks of 256 weights have a scale and a minimum of STEP / 32."""
        block_bytes = round(gguf_bits(kind) / 8 * NESTED_GROUP)
        blocks = torch.randint(256, (size.outputs, size.inputs // NESTED_GROUP, block_bytes), dtype=torch.uint8)
        factors = torch.full((2,), STEP / 32, dtype=torch.float16).view(torch.uint8)
        if BLOCK_FORMATS[kind].has_minima:
            blocks[..., :4] = factors
        else:
            blocks[..., -2:] = factors[:2]
        weight = gguf_weight(kind, blocks.flatten(1)).with_parts(lambda part: part.to(bench.device))
        variants = bench.variants(weight.bytes)
        return cls(
            [partial(linear_gguf, weight=copy.deepcopy(weight)) for _ in range(variants)],
            weight.bytes / (size.outputs * size.inputs),
            weight.dequantize,
            lambda: weight.dequantize(bench.pool.dtype).repeat(variants, 1, 1),
        )


def _linear_cases(kernel: str, kind: str, bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[BenchCase]:
    """Products against 16-bit weights in cuBLAS and, of codes, against torch's and vLLM's products of as many bits."""
    for size in sizes:
        weights = LinearVariants.draw(bench, kind, size)
        peers = {DENSE: _dense_product(weights.dense()), **weights.peers}
        for rows, speedup in size.speedups:
            x = fresh(bench, rows, size.inputs)
            rates = STORED_LINEAR if kind in STORED_TYPES else kind
            call = linear_call(rates, x, weights.products, size.outputs, weights.weight_bytes, weights.exact, peers)
            yield BenchCase(kernel, call, SpeedUp(speedup), (DENSE,))


def _dense_product(weights: Tensor) -> Product:
    return lambda x, i: functional.linear(x, weights[i])


def _gated_cases(kernel: str, kind: str, bench: Bench, sizes: Iterable[LinearSize]) -> Iterator[BenchCase]:
    """Gate and up weights with fused SwiGLU, against the same product followed by `swiglu`."""
    for size in sizes:
        weights = LinearVariants.draw(bench, kind, size)
        for rows, speedup in size.speedups:
            x = fresh(bench, rows, size.inputs)
            call = gated_call(kind, x, weights.products, size.outputs, weights.weight_bytes, weights.exact)
            yield BenchCase(kernel, call, SpeedUp(speedup), (APART,))


linear_int4_cases = partial(_linear_cases, "linear_int4", "linear_int4")
linear_int8_cases = partial(_linear_cases, "linear_int8", "linear_int8")
linear_q4_k_cases = partial(_linear_cases, "linear_q4_k", "linear_q4_k")
linear_q6_k_cases = partial(_linear_cases, "linear_q6_k", "linear_q6_k")
linear_dense_cases = partial(_linear_cases, "linear_dense", "linear")
gated_int4_cases = partial(_gated_cases, "gated_int4", "linear_int4")
gated_int8_cases = partial(_gated_cases, "gated_int8", "linear_int8")
gated_dense_cases = partial(_gated_cases, "gated_dense", "linear")
