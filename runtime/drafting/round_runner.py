"""Execution of rounds: operation by operation, or on CUDA as replays of one captured graph."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from ridgeplan.kernels.device.clock import stamp
from ridgeplan.runtime.drafting.round_result import RoundFigures, RoundResult
from ridgeplan.runtime.drafting.speculator import Speculator

WARM_ROUNDS = 2  # before a capture, to compile kernels and let libraries allocate their workspaces
PHASES = ("draft", "verify", "flush")
STAMPS = len(PHASES) + 1  # timestamps per round


class Rounds(Protocol):
    """The rounds of a generation. All implementations leave the same cache and return the same results."""

    depth: int  # most rounds in flight

    def start(self, pending: Tensor) -> None:
        """Begins a generation after prefill; `pending` [rows] are the first tokens."""

    def launch(self) -> None:
        """Launches a round for the rows that have not reached their ends in the cache."""

    def collect(self) -> RoundResult:
        """Waits for the oldest round in flight and returns its result."""

    @property
    def in_flight(self) -> int:
        """Rounds launched but not collected."""


class EagerRounds:
    """`Rounds` whose operations the host launches one by one; `launch` waits for the result."""

    depth = 1

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator
        self._pending = torch.empty(0)
        self._results: deque[RoundResult] = deque()

    def start(self, pending: Tensor) -> None:
        self._pending = pending
        self._results.clear()

    def launch(self) -> None:
        speculator, times_ns = self._speculator, [time.perf_counter_ns()]
        drafts = speculator.draft(self._pending)
        times_ns.append(time.perf_counter_ns())
        verification = speculator.verify(self._pending, drafts)
        times_ns.append(time.perf_counter_ns())
        self._pending, figures = speculator.keep(self._pending, verification, speculator.cache.active())
        times_ns.append(time.perf_counter_ns())
        self._results.append(RoundResult(figures.rows(), _phases(times_ns)))

    def collect(self) -> RoundResult:
        return self._results.popleft()

    @property
    def in_flight(self) -> int:
        return len(self._results)


class GraphRounds:
    """`Rounds` as replays of one CUDA graph. The host reads results one round late, so the device never waits for it.

    The graph reads and writes fixed tensors. The number of rows and the sampling parameters are constants in it;
    lengths are not, as they are on the device. The first generation of each kind captures it, and the engine keeps
    those used last.
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
        # Results of an abandoned generation are dropped; the device finishes its rounds first.
        self._pending.copy_(pending)
        self._collected = self._launched
        self._ended_ns = None

    def launch(self) -> None:
        self._graph.replay()
        landing, arrived = self._landing[self._launched % self.depth]
        landing.copy_(self._out, non_blocking=True)
        arrived.record()
        self._launched += 1

    def collect(self) -> RoundResult:
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
        """Warm-up rounds without active rows, which change nothing.

        On the current stream, as cuBLAS keeps a workspace of 32 MiB for every stream that it was ever called on.
        """
        with speculator.cache.all_stopped():
            for _ in range(WARM_ROUNDS):
                self._round(speculator)


def _split(out: Tensor, rows: int) -> tuple[RoundFigures, Tensor]:
    """Views of one buffer: the figures of all rows, then the timestamps before the first phase and after each."""
    return RoundFigures(out[:-STAMPS].view(rows, -1)), out[-STAMPS:]


def _phases(times_ns: list[int]) -> dict[str, float]:
    """Seconds of each phase, from the times before and after it."""
    spans = zip(PHASES, times_ns[:-1], times_ns[1:], strict=True)
    return {name: (after - before) * 1e-9 for name, before, after in spans}
