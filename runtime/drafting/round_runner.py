"""Rounds of a generation: run operation by operation, or on CUDA as replays of one captured graph."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from ridgeplan.kernels.device.clock import stamp
from ridgeplan.runtime.drafting.round_result import RoundFigures, RoundResult
from ridgeplan.runtime.drafting.speculator import Speculator

WARM_ROUNDS = 2  # before a capture: compiles kernels and lets libraries allocate their workspaces
PHASES = ("draft", "verify", "flush")
STAMPS = len(PHASES) + 1  # readings of the clock in a round


class Rounds(Protocol):
    """A generation's rounds; both ways of running them leave the same cache and return the same results."""

    depth: int  # rounds that may be launched before the first of them is collected

    def start(self, pending: Tensor) -> None:
        """Begins after prefill, whose next tokens are `pending` [rows]."""

    def launch(self) -> None:
        """One round of the rows that have not reached their ends in the cache."""

    def collect(self) -> RoundResult:
        """The oldest round that was launched and not collected; waits for it."""

    @property
    def in_flight(self) -> int:
        """Rounds launched and not collected."""


class EagerRounds:
    """Every operation is launched from the host, which has the result when `launch` returns."""

    depth = 1

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator
        self._pending = torch.empty(0)
        self._results: deque[RoundResult] = deque()

    def start(self, pending: Tensor) -> None:
        """See `Rounds`."""
        self._pending = pending
        self._results.clear()

    def launch(self) -> None:
        """See `Rounds`."""
        speculator, times_ns = self._speculator, [time.perf_counter_ns()]
        drafts = speculator.draft(self._pending)
        times_ns.append(time.perf_counter_ns())
        verification = speculator.verify(self._pending, drafts)
        times_ns.append(time.perf_counter_ns())
        self._pending, figures = speculator.keep(self._pending, verification, speculator.cache.active())
        times_ns.append(time.perf_counter_ns())
        self._results.append(RoundResult(figures.rows(), _phases(times_ns)))

    def collect(self) -> RoundResult:
        """See `Rounds`."""
        return self._results.popleft()

    @property
    def in_flight(self) -> int:
        """See `Rounds`."""
        return len(self._results)


class GraphRounds:
    """A round is one replay of one CUDA graph; the host reads it a round late, so that the device never waits for it.

    The graph reads and writes fixed tensors. It depends on the number of rows and on the sampling, whose numbers are
    constants in it, but not on lengths, which live on the device. It is captured at the first generation of its kind;
    the engine keeps those that were used last.
    """

    depth = 2

    def __init__(self, speculator: Speculator) -> None:
        rows, device = speculator.cache.rows, speculator.cache.lengths.device
        self._pending = torch.zeros(rows, dtype=torch.int64, device=device)
        size = rows * RoundFigures.width(speculator.cache.config.gamma) + STAMPS
        self._out = torch.zeros(size, dtype=torch.int64, device=device)
        self._figures, self._stamps = _split(self._out, rows)
        self._landing = [(torch.empty_like(self._out, device="cpu", pin_memory=True), torch.cuda.Event()) for _ in "ab"]
        self._launched = self._collected = 0
        self._ended_ns: int | None = None
        self._graph = self._capture(speculator)

    def start(self, pending: Tensor) -> None:
        """See `Rounds`. Rounds of an abandoned generation are forgotten; the device finishes them first."""
        self._pending.copy_(pending)
        self._collected = self._launched
        self._ended_ns = None

    def launch(self) -> None:
        """See `Rounds`."""
        self._graph.replay()
        landing, arrived = self._landing[self._launched % self.depth]
        landing.copy_(self._out, non_blocking=True)
        arrived.record()
        self._launched += 1

    def collect(self) -> RoundResult:
        """See `Rounds`."""
        landing, arrived = self._landing[self._collected % self.depth]
        arrived.synchronize()
        self._collected += 1
        figures, stamps = _split(landing, len(self._pending))
        times_ns = stamps.tolist()
        idle = {} if self._ended_ns is None else {"idle": (times_ns[0] - self._ended_ns) * 1e-9}
        self._ended_ns = times_ns[-1]
        return RoundResult(figures.rows(), _phases(times_ns) | idle)

    @property
    def in_flight(self) -> int:
        """See `Rounds`."""
        return self._launched - self._collected

    def _round(self, speculator: Speculator) -> None:
        stamp(self._stamps, 0)
        drafts = speculator.draft(self._pending)
        stamp(self._stamps, 1)
        verification = speculator.verify(self._pending, drafts)
        stamp(self._stamps, 2)
        pending, figures = speculator.keep(self._pending, verification, speculator.cache.active())
        self._pending.copy_(pending)
        self._figures.values.copy_(figures.values)
        stamp(self._stamps, 3)

    def _capture(self, speculator: Speculator) -> torch.cuda.CUDAGraph:
        self._warm(speculator)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(speculator.generator)
        with torch.cuda.graph(graph):
            self._round(speculator)
        return graph

    def _warm(self, speculator: Speculator) -> None:
        """Rounds that change nothing, as no row is active.

        On the current stream: cuBLAS keeps a workspace of 32 MiB for every stream that it was ever called on.
        """
        with speculator.cache.all_stopped():
            for _ in range(WARM_ROUNDS):
                self._round(speculator)


def _split(out: Tensor, rows: int) -> tuple[RoundFigures, Tensor]:
    """Views of one buffer: the figures of all rows, then the clock before the first phase and after each."""
    return RoundFigures(out[:-STAMPS].view(rows, -1)), out[-STAMPS:]


def _phases(times_ns: list[int]) -> dict[str, float]:
    """Seconds of each phase between the times before and after it."""
    spans = zip(PHASES, times_ns[:-1], times_ns[1:], strict=True)
    return {name: (after - before) * 1e-9 for name, before, after in spans}
