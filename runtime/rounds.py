"""Rounds of a generation: run operation by operation, or on CUDA as replays of captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ridgeplan.runtime.sampling import Verdict
from ridgeplan.runtime.speculative import Speculator
from ridgeplan.runtime.stopwatch import Stopwatch

WARM_ROUNDS = 2  # before a capture: compiles kernels and lets libraries allocate their workspaces
Out = TypeVar("Out")


class Rounds(Protocol):
    """A generation's rounds; both ways of running them leave the same cache and return the same figures."""

    def start(self, pending: Tensor) -> None:
        """Begins after prefill, whose next tokens are `pending` [rows]."""

    def run(self, active: list[bool], stopwatch: Stopwatch) -> Tensor:
        """One round; on the device per row: gamma + 1 tokens, then how many of them are kept, accepted, judged."""


class EagerRounds:
    """Every operation is launched from the host."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator
        self._pending = torch.empty(0)

    def start(self, pending: Tensor) -> None:
        """See `Rounds`."""
        self._pending = pending

    def run(self, active: list[bool], stopwatch: Stopwatch) -> Tensor:
        """See `Rounds`."""
        speculator, pending = self._speculator, self._pending
        with stopwatch.measure("draft"):
            drafts = speculator.draft(pending)
        with stopwatch.measure("verify"):
            verdict = speculator.verify(pending, drafts)
        with stopwatch.measure("flush"):
            self._pending, figures = speculator.keep(pending, verdict, torch.tensor(active, device=pending.device))
        return figures


class GraphRounds:
    """Drafting, verification and keeping are one CUDA graph each: three replays a round, and no other host work.

    Graphs read and write fixed tensors. They depend on the number of rows and on the sampling, whose numbers are
    baked in, but not on lengths, which live on the device. Captured at the first generation of their kind.
    """

    def __init__(self, speculator: Speculator) -> None:
        device = speculator.cache.lengths.device
        self._generator, self._pool = speculator.generator, torch.cuda.graph_pool_handle()
        self._pending = torch.zeros(speculator.cache.rows, dtype=torch.int64, device=device)
        self._active = torch.zeros(speculator.cache.rows, dtype=torch.bool, device=device)
        self._sent: list[bool] = []
        self._warm(speculator)
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        # Without drafts there is nothing to launch, and an empty graph is no graph.
        draft = partial(speculator.draft, self._pending)
        drafting = speculator.cache.gamma > 0
        drafts = self._capture("draft", draft) if drafting else draft()
        verdict = self._capture("verify", lambda: speculator.verify(self._pending, drafts))
        self._figures = self._capture("flush", lambda: self._kept(speculator, verdict))

    def start(self, pending: Tensor) -> None:
        """See `Rounds`."""
        self._pending.copy_(pending)

    def run(self, active: list[bool], stopwatch: Stopwatch) -> Tensor:
        """See `Rounds`."""
        if active != self._sent:
            self._active.copy_(torch.tensor(active))
            self._sent = list(active)
        for name, graph in self._graphs.items():
            with stopwatch.measure(name):
                graph.replay()
        return self._figures

    def _kept(self, speculator: Speculator, verdict: Verdict) -> Tensor:
        pending, figures = speculator.keep(self._pending, verdict, self._active)
        self._pending.copy_(pending)
        return figures

    def _warm(self, speculator: Speculator) -> None:
        """Rounds in which no row is active: they write only to slots that the next round overwrites."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_ROUNDS):
                self._kept(speculator, speculator.verify(self._pending, speculator.draft(self._pending)))
        torch.cuda.current_stream().wait_stream(stream)

    def _capture(self, name: str, body: Callable[[], Out]) -> Out:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        with torch.cuda.graph(graph, pool=self._pool):
            result = body()
        self._graphs[name] = graph
        return result
