"""Cases of what stands between the matrix products of a layer: norm, rotary embedding with append, activation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from ridgeplan.kernels.backend import Backend
from ridgeplan.kernels.norm import add_rms_norm, add_rms_norm_cost
from ridgeplan.kernels.rope import rope_append, rope_append_cost, rotary_tables
from ridgeplan.kernels.swiglu import swiglu, swiglu_cost
from ridgeplan.roofline.cost import Cost
from ridgeplan.validate.bench import Bench
from ridgeplan.validate.kernel_case import H200_BYTES_PER_S, Case, Within, fresh, relative_error
from ridgeplan.validate.kernel_sizes import LayerSize

EAGER = "eager torch"
EPS = 1e-5
Results = Tensor | tuple[Tensor, ...]


def norm_cases(bench: Bench, sizes: Iterable[LayerSize]) -> Iterator[Case]:
    """Residual addition and RMSNorm."""
    for size in sizes:
        hidden, update = fresh(bench, 2, size.rows, size.hidden)
        weight = fresh(bench, size.hidden)
        call = partial(add_rms_norm, hidden, update, weight, EPS)
        exact = partial(add_rms_norm, hidden.float(), update.float(), weight.float(), EPS, backend="twin")
        eager = partial(call, backend="twin")
        cost = add_rms_norm_cost(hidden, update, weight)
        yield _case("norm", f"{size.rows} x {size.hidden}", cost, call, eager, exact)


def swiglu_cases(bench: Bench, sizes: Iterable[LayerSize]) -> Iterator[Case]:
    """The gated activation."""
    for size in sizes:
        gate_up = fresh(bench, size.rows, 2 * size.intermediate)
        eager, exact = (partial(swiglu, x, backend="twin") for x in (gate_up, gate_up.float()))
        shape = f"{size.rows} x {size.intermediate}"
        yield _case("swiglu", shape, swiglu_cost(gate_up), partial(swiglu, gate_up), eager, exact)


def rope_cases(bench: Bench, sizes: Iterable[LayerSize]) -> Iterator[Case]:
    """Rotary embedding and cache append of one sequence, without and with a norm of queries and keys."""
    for size in sizes:
        qk_norm = fresh(bench, size.q_heads + size.kv_heads, size.head_dim)
        for norm in (None, qk_norm):
            yield _rope_case(bench, size, norm)


def _rope_case(bench: Bench, size: LayerSize, qk_norm: Tensor | None) -> Case:
    qkv = fresh(bench, 1, size.rows, (size.q_heads + 2 * size.kv_heads) * size.head_dim)
    slots = torch.arange(size.rows, device=bench.device)[None]
    frequencies = 1e-4 ** torch.linspace(0, 1, size.head_dim // 2, device=bench.device)
    tables = rotary_tables(slots, frequencies, 1.0)

    def append(dtype: torch.dtype, backend: Backend) -> Callable[[], Results]:
        """Gives queries, and what the cache then holds; each has its own, so that none shows another's results."""
        keys, values = torch.zeros(2, 1, size.kv_heads, size.rows, size.head_dim, dtype=dtype, device=bench.device)
        norm = None if qk_norm is None else qk_norm.to(dtype)

        def call() -> Results:
            new = qkv.to(dtype)
            q = rope_append(new, tables, keys, values, slots, size.q_heads, qk_norm=norm, eps=EPS, backend=backend)
            return q, keys, values

        return call

    shape = f"{size.rows} x {size.q_heads}/{size.kv_heads} x {size.head_dim}{'' if qk_norm is None else ', QK-norm'}"
    ours, eager, exact = append(qkv.dtype, "auto"), append(qkv.dtype, "twin"), append(torch.float32, "twin")
    return _case("rope", shape, rope_append_cost(qkv, tables, slots, qk_norm), ours, eager, exact)


def _case(
    kernel: str,
    shape: str,
    cost: Cost,
    ours: Callable[[], Results],
    eager: Callable[[], Results],
    exact: Callable[[], Results],
) -> Case:
    """The twin in the model's type is how eager torch does it; in float32 it is the reference."""
    target = Within(1.5 * cost.bytes / H200_BYTES_PER_S + 2e-6)
    return Case(kernel, shape, cost, ours, {EAGER: eager}, partial(_error, ours, exact), target)


def _error(ours: Callable[[], Results], exact: Callable[[], Results]) -> float:
    """The largest among the results."""
    pairs = zip(*(found if isinstance(found, tuple) else (found,) for found in (ours(), exact())), strict=True)
    return max(relative_error(result, reference) for result, reference in pairs)
