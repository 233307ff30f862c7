"""Calls of a state layer: the gated delta rule with its convolution, by token and in chunks, and the gated norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeplan.kernels import state as kernels
from ridgeplan.kernels.state import DeltaVectors, StateRows
from ridgeplan.roofline.execution import state_ring_rows
from ridgeplan.validate.kernel_calls.case import BenchCase, RoofShare, Within, fresh, relative_error
from ridgeplan.validate.kernel_calls.sizes import StateSize
from ridgeplan.validate.kernel_calls.vllm_peers import chunked_delta_rule, delta_rule, prepared
from ridgeplan.validate.kernel_calls.vllm_peers import gated_norm as vllm_norm
from ridgeplan.validate.timing import Bench, KernelCall

TAPS = 4
EPS = 1e-6


class _Step(NamedTuple):
    """Operands of one call of `delta_step`."""

    projected: Tensor
    rows: StateRows
    positions: Tensor
    vectors: DeltaVectors

    def widened(self) -> _Step:
        """Float32 copies, which a reference may change."""
        state, ring, *lengths = self.rows
        vectors = replace(self.vectors, taps=self.vectors.taps.float())
        return _Step(self.projected.float(), StateRows(state.clone(), ring.float(), *lengths), self.positions, vectors)


def _vectors(bench: Bench, size: StateSize) -> DeltaVectors:
    channels = 2 * size.key_heads * size.key_dim + size.value_heads * size.value_dim
    by_head = torch.zeros(size.value_heads, device=bench.device)
    return DeltaVectors(0.3 * fresh(bench, channels, TAPS), by_head, by_head, size.key_heads, size.key_dim)


def delta_step_call(bench: Bench, size: StateSize) -> KernelCall:
    """The update of each sequence's state for `queries` new tokens, as many replayed ones entering the state."""
    vectors, here = _vectors(bench, size), partial(torch.zeros, device=bench.device)
    committed = here(size.batch, dtype=torch.int32) + 64
    places = committed[:, None].long() + size.queries + torch.arange(size.queries, device=bench.device)
    sizes = size.batch, size.value_heads, size.key_dim, size.value_dim

    def step() -> _Step:
        ring = fresh(bench, size.batch, state_ring_rows(TAPS, size.queries), vectors.inputs)
        rows = StateRows(0.1 * torch.randn(sizes, device=bench.device), ring, committed, committed + size.queries)
        return _Step(fresh(bench, size.batch, size.queries, vectors.inputs), rows, places, vectors)

    state_bytes = 4 * size.batch * size.value_heads * size.key_dim * size.value_dim
    steps = [step() for _ in range(bench.variants(state_bytes))]
    cost = kernels.delta_step_cost(steps[0].projected, steps[0].rows, vectors, size.queries, 1)

    def error() -> float:
        step = steps[0].widened()
        exact = kernels.delta_step(*step, backend="reference")
        mine = steps[0].widened()  # in the model's dtype but for the state, whose copy the call may change
        rows = StateRows(mine.rows.state, steps[0].rows.ring, *mine.rows[2:])
        return relative_error(kernels.delta_step(steps[0].projected, rows, *steps[0][2:]), exact)

    return KernelCall(
        "state",
        size.name,
        cost,
        lambda i: kernels.delta_step(*steps[i]),
        variants=len(steps),
        rows=size.batch * size.queries,
        error=error,
        peers={"vLLM, without convolution": prepared(delta_rule, bench, size)},
    )


def delta_chunks_call(bench: Bench, size: StateSize) -> KernelCall:
    """The rule over `queries` tokens of a prompt, whose state every call carries on."""
    vectors = _vectors(bench, size)
    projected, earlier = (fresh(bench, tokens, vectors.inputs) for tokens in (size.queries, TAPS - 1))
    state = 0.1 * torch.randn(vectors.state_sizes, device=bench.device)

    def error() -> float:
        widened = projected.float(), earlier.float(), state.clone(), replace(vectors, taps=vectors.taps.float())
        exact = kernels.delta_chunks(*widened, backend="reference")
        return relative_error(kernels.delta_chunks(projected, earlier, state.clone(), vectors), exact)

    def call(_: int) -> Tensor:
        return kernels.delta_chunks(projected, earlier, state, vectors)

    cost = kernels.delta_chunks_cost(projected, state, vectors)
    peers = {"vLLM, without convolution": prepared(chunked_delta_rule, bench, size)}
    return KernelCall("elementwise", size.name, cost, call, rows=size.queries, error=error, peers=peers)


def gated_norm_call(bench: Bench, size: StateSize) -> KernelCall:
    """The norm of each head's output, times the activated gate."""
    rows = size.batch * size.queries
    x, weight = fresh(bench, rows, size.value_heads, size.value_dim), fresh(bench, size.value_dim)
    gate = fresh(bench, rows, size.value_heads * size.value_dim)
    norm: Callable[..., Tensor] = kernels.gated_rms_norm

    def error() -> float:
        exact = norm(x.float(), gate.float(), weight.float(), EPS, backend="reference")
        return relative_error(norm(x, gate, weight, EPS), exact)

    return KernelCall(
        "elementwise",
        size.name,
        kernels.gated_rms_norm_cost(x),
        lambda _: norm(x, gate, weight, EPS),
        rows=rows,
        error=error,
        peers={
            "eager torch": lambda _: norm(x, gate, weight, EPS, backend="reference"),
            "vLLM": prepared(vllm_norm, x.flatten(0, 1), gate.view(-1, size.value_dim), weight, EPS),
        },
    )


def delta_step_cases(bench: Bench, sizes: Iterable[StateSize]) -> Iterator[BenchCase]:
    """The gated delta rule over the states of a batch."""
    return (BenchCase("delta_step", delta_step_call(bench, size), RoofShare(0.5)) for size in sizes)


def delta_chunks_cases(bench: Bench, sizes: Iterable[StateSize]) -> Iterator[BenchCase]:
    """The gated delta rule over a chunk of a prompt."""
    return (BenchCase("delta_chunks", delta_chunks_call(bench, size), RoofShare(0.4)) for size in sizes)


def gated_norm_cases(bench: Bench, sizes: Iterable[StateSize]) -> Iterator[BenchCase]:
    """The gated norm of a step's outputs."""
    return (BenchCase("gated_norm", gated_norm_call(bench, size), Within(4e-6)) for size in sizes)
