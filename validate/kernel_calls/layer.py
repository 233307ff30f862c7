"""Calls of a layer's small operations: norm, rotary embedding with append, activation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.layer import (
    add_rms_norm,
    add_rms_norm_cost,
    rope_append,
    rope_append_cost,
    rotary_tables,
    swiglu,
    swiglu_cost,
)
from ridgeplan.roofline.cost import Cost
from ridgeplan.validate.kernel_calls.case import H200_BYTES_PER_S, KernelCase, Within, fresh, relative_error
from ridgeplan.validate.kernel_calls.sizes import LayerSize
from ridgeplan.validate.timing import Bench

EAGER = "eager torch"
EPS = 1e-5
PROMPT_ROWS = 256  # with this many rows it is a prompt, whose activations do not stay in the GPU's caches
Results = Tensor | tuple[Tensor, ...]
Variants = Callable[[int], Results]


def norm_cases(bench: Bench, sizes: Iterable[LayerSize]) -> Iterator[KernelCase]:
    """Residual addition and RMSNorm."""
    for size in sizes:
        inputs = _activations(bench, 2, size.rows, size.hidden)
        hidden, update = inputs[0]
        weight = fresh(bench, size.hidden)
        exact = partial(add_rms_norm, hidden.float(), update.float(), weight.float(), EPS, backend="reference")
        cost = add_rms_norm_cost(hidden, update, weight)
        calls = _norm(inputs, weight, "auto"), _norm(inputs, weight, "reference")
        yield _case("norm", f"{size.rows} x {size.hidden}", cost, *calls, exact, len(inputs))


def swiglu_cases(bench: Bench, sizes: Iterable[LayerSize]) -> Iterator[KernelCase]:
    """The gated activation."""
    for size in sizes:
        inputs = _activations(bench, size.rows, 2 * size.intermediate)
        exact = partial(swiglu, inputs[0].float(), backend="reference")
        calls = _swiglu(inputs, "auto"), _swiglu(inputs, "reference")
        shape = f"{size.rows} x {size.intermediate}"
        yield _case("swiglu", shape, swiglu_cost(inputs[0]), *calls, exact, len(inputs))


def rope_cases(bench: Bench, sizes: Iterable[LayerSize]) -> Iterator[KernelCase]:
    """Rotary embedding and cache append of one sequence, with and without QK-norm."""
    for size in sizes:
        qk_norm = fresh(bench, size.q_heads + size.kv_heads, size.head_dim)
        for norm in (None, qk_norm):
            yield _rope_case(bench, size, norm)


def _activations(bench: Bench, *shape: int) -> Tensor:
    """[variants, *shape]: a single variant, as the previous kernel has just written it, except for whole prompts."""
    variants = bench.variants(math.prod(shape) * bench.element_bytes) if shape[-2] >= PROMPT_ROWS else 1
    return fresh(bench, variants, *shape)


def _norm(inputs: Tensor, weight: Tensor, backend: Backend) -> Variants:
    return lambda i: add_rms_norm(inputs[i, 0], inputs[i, 1], weight, EPS, backend=backend)


def _swiglu(inputs: Tensor, backend: Backend) -> Variants:
    return lambda i: swiglu(inputs[i], backend=backend)


def _rope_case(bench: Bench, size: LayerSize, qk_norm: Tensor | None) -> KernelCase:
    inputs = _activations(bench, 1, size.rows, (size.q_heads + 2 * size.kv_heads) * size.head_dim)
    slots = torch.arange(size.rows, device=bench.device)[None]
    frequencies = 1e-4 ** torch.linspace(0, 1, size.head_dim // 2, device=bench.device)
    tables = rotary_tables(slots, frequencies, 1.0)

    def append(dtype: torch.dtype, backend: Backend, variants: int) -> Variants:
        """Returns queries and the updated cache. Every call has a cache of its own, so results are never shared."""
        shape = (2, variants, 1, size.kv_heads, size.rows, size.head_dim)
        keys, values = torch.zeros(shape, dtype=dtype, device=bench.device)
        norm = None if qk_norm is None else qk_norm.to(dtype)

        def call(i: int) -> Results:
            new, cache = inputs[i].to(dtype), (keys[i], values[i])
            q = rope_append(new, tables, *cache, slots, size.q_heads, qk_norm=norm, eps=EPS, backend=backend)
            return q, *cache

        return call

    shape = f"{size.rows} x {size.q_heads}/{size.kv_heads} x {size.head_dim}{'' if qk_norm is None else ', QK-norm'}"
    ours, eager = append(inputs.dtype, "auto", len(inputs)), append(inputs.dtype, "reference", len(inputs))
    exact = partial(append(torch.float32, "reference", 1), 0)
    cost = rope_append_cost(inputs[0], tables, slots, qk_norm)
    return _case("rope", shape, cost, ours, eager, exact, len(inputs))


def _case(
    kernel: str,
    shape: str,
    cost: Cost,
    ours: Variants,
    eager: Variants,
    exact: Callable[[], Results],
    variants: int,
) -> KernelCase:
    """The peer is the reference in the model's dtype; errors are measured against the reference in float32."""
    target = Within(1.5 * cost.bytes / H200_BYTES_PER_S + 2e-6)
    error = partial(_error, ours, exact)
    return KernelCase(kernel, shape, cost, ours, {EAGER: eager}, error, target, variants=variants)


def _error(ours: Variants, exact: Callable[[], Results]) -> float:
    """The largest relative error of the results."""
    pairs = zip(*(found if isinstance(found, tuple) else (found,) for found in (ours(0), exact())), strict=True)
    return max(relative_error(result, reference) for result, reference in pairs)
