"""Calls of a layer's small operations: norm, rotary embedding with append, activation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import torch
from torch import Tensor

from ridgeplan.kernels import layer
from ridgeplan.kernels.device.backend import Backend
from ridgeplan.roofline.cost import Cost
from ridgeplan.validate.kernel_calls.attention import Heads
from ridgeplan.validate.kernel_calls.case import H200_BYTES_PER_S, BenchCase, Within, fresh, relative_error
from ridgeplan.validate.kernel_calls.sizes import LayerSize
from ridgeplan.validate.timing import Bench, KernelCall

EAGER = "eager torch"
EPS = 1e-5
PROMPT_ROWS = 256  # with this many rows it is a prompt, whose activations do not stay in the GPU's caches
Results = Tensor | tuple[Tensor, ...]


def norm_call(name: str, inputs: Tensor, weight: Tensor) -> KernelCall:
    """Residual addition and RMSNorm of inputs [variants, 2, ..., hidden]: the stream and its update."""

    def norm(hidden: Tensor, update: Tensor, weight: Tensor, backend: Backend) -> Results:
        return layer.add_rms_norm(hidden, update, weight, EPS, backend=backend)

    cost = layer.add_rms_norm_cost(inputs[0, 0], inputs[0, 1], weight)
    return _call("elementwise", name, cost, norm, inputs, weight, lambda pairs: [tuple(pair) for pair in pairs])


def swiglu_call(name: str, inputs: Tensor) -> KernelCall:
    """The gated activation of inputs [variants, ..., 2 * intermediate]."""

    def activation(gate_up: Tensor, _: None, backend: Backend) -> Results:
        return layer.swiglu(gate_up, backend=backend)

    cost = layer.swiglu_cost(inputs[0])
    return _call("elementwise", name, cost, activation, inputs, None, lambda several: [(each,) for each in several])


def rope_call(name: str, inputs: Tensor, heads: Heads, qk_norm: Tensor | None = None) -> KernelCall:
    """Rotary embedding and cache append of one sequence's projections, inputs [variants, 1, rows, width].

    Results are the queries and the updated cache.
    """
    rows, device = inputs.shape[2], inputs.device
    slots = torch.arange(rows, device=device)[None]
    tables = layer.rotary_tables(slots, 1e-4 ** torch.linspace(0, 1, heads.head_dim // 2, device=device), 1.0)

    def append(qkv: Tensor, keys: Tensor, values: Tensor, qk_norm: Tensor | None, backend: Backend) -> Results:
        q = layer.rope_append(
            qkv, tables, keys, values, slots, heads.q_heads, qk_norm=qk_norm, eps=EPS, backend=backend
        )
        return q, keys, values

    def with_caches(qkv: Tensor) -> list[tuple[Tensor, ...]]:
        caches = torch.zeros(2, len(qkv), 1, heads.kv_heads, rows, heads.head_dim, dtype=qkv.dtype, device=device)
        return list(zip(qkv, *caches, strict=True))

    return _call(
        "rope", name, layer.rope_append_cost(inputs[0], tables, slots, qk_norm), append, inputs, qk_norm, with_caches
    )


def _call(
    kind: str,
    name: str,
    cost: Cost,
    operation: Callable[..., Results],
    inputs: Tensor,
    weight: Tensor | None,
    operands: Callable[[Tensor], list[tuple[Tensor, ...]]],
) -> KernelCall:
    """`operation(*operands, weight, backend)` for each variant of the inputs.

    The peer is the reference in the model's dtype; the error is measured against the reference in float32. Each gets
    separate operands, which are created on first use, so that they never share results.
    """
    ours, eager = operands(inputs), cache(lambda: operands(inputs))

    def error() -> float:
        exact_weight = None if weight is None else weight.float()
        exact = operation(*operands(inputs[:1].float())[0], exact_weight, "reference")
        result = operation(*ours[0], weight, "auto")
        pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (result, exact)), strict=True)
        return max(relative_error(*pair) for pair in pairs)

    return KernelCall(
        kind,
        name,
        cost,
        lambda i: operation(*ours[i], weight, "auto"),
        variants=len(inputs),
        rows=inputs.shape[-2],
        error=error,
        peers={EAGER: lambda i: operation(*eager()[i], weight, "reference")},
    )


def norm_cases(bench: Bench, sizes: Iterable[LayerSize]) -> Iterator[BenchCase]:
    """Residual addition and RMSNorm."""
    for size in sizes:
        inputs = _activations(bench, 2, size.rows, size.hidden)
        yield _case("norm", norm_call(f"{size.rows} x {size.hidden}", inputs, fresh(bench, size.hidden)))


def swiglu_cases(bench: Bench, sizes: Iterable[LayerSize]) -> Iterator[BenchCase]:
    """The gated activation."""
    for size in sizes:
        inputs = _activations(bench, size.rows, 2 * size.intermediate)
        yield _case("swiglu", swiglu_call(f"{size.rows} x {size.intermediate}", inputs))


def rope_cases(bench: Bench, sizes: Iterable[LayerSize]) -> Iterator[BenchCase]:
    """Rotary embedding and cache append of one sequence, with and without QK-norm."""
    for size in sizes:
        heads = Heads(size.q_heads, size.kv_heads, size.head_dim)
        qk_norm = fresh(bench, size.q_heads + size.kv_heads, size.head_dim)
        name = f"{size.rows} x {size.q_heads}/{size.kv_heads} x {size.head_dim}"
        for norm, suffix in ((None, ""), (qk_norm, ", QK-norm")):
            inputs = _activations(bench, 1, size.rows, (size.q_heads + 2 * size.kv_heads) * size.head_dim)
            yield _case("rope", rope_call(f"{name}{suffix}", inputs, heads, norm))


def _activations(bench: Bench, *shape: int) -> Tensor:
    """[variants, *shape]. Only whole prompts have several variants: other activations are still cached when read."""
    variants = bench.variants(math.prod(shape) * bench.element_bytes) if shape[-2] >= PROMPT_ROWS else 1
    return fresh(bench, variants, *shape)


def _case(kernel: str, call: KernelCall) -> BenchCase:
    return BenchCase(kernel, call, Within(1.5 * call.cost.bytes / H200_BYTES_PER_S + 2e-6))
