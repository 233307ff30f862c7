"""Rounds run eagerly or replayed as CUDA graphs, and the teacher-forced step captured alike."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgeplan.kernels.device.clock import record_timestamp
from ridgeplan.roofline.execution import RoundKind, round_shape
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.speculation.speculator import RoundFigures, RoundResult, Speculator

WARM_ROUNDS = 2  # before a capture, to compile kernels and let libraries allocate their workspaces
PHASES = ("draft", "verify", "flush")
STAMPS = len(PHASES) + 1  # timestamps per round


class Rounds(Protocol):
    """The rounds of a generation. All implementations leave the same cache and return the same results."""

    depth: int  # most rounds in flight

    @property
    def pending(self) -> Tensor:
        """The tokens [rows] that the next round starts from; its values are only valid in the order of the device."""

    def start(self, pending: Tensor) -> None:
        """Begins a generation after prefill; `pending` [rows] are the first tokens."""

    def launch(self, kind: RoundKind) -> None:
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

    @property
    def pending(self) -> Tensor:
        return self._pending

    def start(self, pending: Tensor) -> None:
        self._pending = pending
        self._results.clear()

    def launch(self, kind: RoundKind) -> None:
        speculator, times_ns = self._speculator, [time.perf_counter_ns()]
        drafts = speculator.draft(self._pending, kind)
        times_ns.append(time.perf_counter_ns())
        verification = speculator.verify(self._pending, drafts)
        times_ns.append(time.perf_counter_ns())
        self._pending, figures = speculator.keep(self._pending, verification, speculator.cache.active())
        times_ns.append(time.perf_counter_ns())
        self._results.append(RoundResult(figures.rows(), _phases(times_ns), kind))

    def collect(self) -> RoundResult:
        return self._results.popleft()

    @property
    def in_flight(self) -> int:
        return len(self._results)


class GraphRounds:
    """`Rounds` as replays of CUDA graphs. The host reads results one round late, so the device never waits for it.

    A graph reads and writes fixed tensors. The number of rows, tiers and sampling parameters are constants in it;
    lengths are not, as they are on the device. The first generation of each kind captures it, and the engine keeps
    those used last. The graphs of several kinds share one pool of memory, as rounds run one at a time and all that
    outlives them is in tensors outside it.
    """

    depth = 2

    def __init__(self, speculator: Speculator, kinds: Sequence[RoundKind]) -> None:
        """kinds: of the rounds that there may be."""
        rows, device = speculator.cache.rows, speculator.cache.lengths.device
        self._pending = torch.zeros(rows, dtype=torch.int64, device=device)
        by_size = sorted(kinds, key=lambda kind: round_shape(kind).gamma, reverse=True)
        size = rows * RoundFigures.width(round_shape(by_size[0]).gamma) + STAMPS
        self._out = torch.zeros(size, dtype=torch.int64, device=device)
        self._landing = [(torch.empty_like(self._out, device="cpu", pin_memory=True), torch.cuda.Event()) for _ in "ab"]
        self._kinds: deque[RoundKind] = deque()  # of the rounds in flight
        self._launched = self._collected = 0
        self._ended_ns: int | None = None
        # The largest first: the others then fit into its memory.
        pool = torch.cuda.graph_pool_handle()
        self._graphs = {kind: self._capture(speculator, kind, pool) for kind in by_size}

    @property
    def pending(self) -> Tensor:
        return self._pending

    def start(self, pending: Tensor) -> None:
        # Results of an abandoned generation are dropped; the device finishes its rounds first.
        self._pending.copy_(pending)
        self._collected = self._launched
        self._kinds.clear()
        self._ended_ns = None

    def launch(self, kind: RoundKind) -> None:
        self._graphs[kind].replay()
        landing, arrived = self._landing[self._launched % self.depth]
        landing.copy_(self._out, non_blocking=True)
        arrived.record()
        self._kinds.append(kind)
        self._launched += 1

    def collect(self) -> RoundResult:
        landing, arrived = self._landing[self._collected % self.depth]
        arrived.synchronize()
        self._collected += 1
        kind = self._kinds.popleft()
        figures, stamps = _split(landing, len(self._pending), round_shape(kind).gamma)
        times_ns = stamps.tolist()
        idle = {} if self._ended_ns is None else {"idle": (times_ns[0] - self._ended_ns) * 1e-9}
        self._ended_ns = times_ns[-1]
        return RoundResult(figures.rows(), _phases(times_ns) | idle, kind)

    @property
    def in_flight(self) -> int:
        return self._launched - self._collected

    def _round(self, speculator: Speculator, kind: RoundKind) -> None:
        out, stamps = _split(self._out, len(self._pending), round_shape(kind).gamma)
        record_timestamp(stamps, 0)
        drafts = speculator.draft(self._pending, kind)
        record_timestamp(stamps, 1)
        verification = speculator.verify(self._pending, drafts)
        record_timestamp(stamps, 2)
        pending, figures = speculator.keep(self._pending, verification, speculator.cache.active())
        self._pending.copy_(pending)
        out.values.copy_(figures.values)
        record_timestamp(stamps, 3)

    def _capture(self, speculator: Speculator, kind: RoundKind, pool: Any) -> torch.cuda.CUDAGraph:
        self._warm(speculator, kind)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._round(speculator, kind)
        return graph

    def _warm(self, speculator: Speculator, kind: RoundKind) -> None:
        """Warm-up rounds without active rows, which change nothing.

        On the current stream, as cuBLAS keeps a workspace of 32 MiB for every stream that it was ever called on.
        """
        with speculator.cache.all_stopped():
            for _ in range(WARM_ROUNDS):
                self._round(speculator, kind)


def _split(out: Tensor, rows: int, gamma: int) -> tuple[RoundFigures, Tensor]:
    """Views of one buffer: all rows' figures of a round of gamma drafts, and the timestamps around its phases."""
    width = RoundFigures.width(gamma)
    return RoundFigures(out[STAMPS : STAMPS + rows * width].view(rows, width)), out[:STAMPS]


def _phases(times_ns: list[int]) -> dict[str, float]:
    """Seconds of each phase, from the times before and after it."""
    spans = zip(PHASES, times_ns[:-1], times_ns[1:], strict=True)
    return {name: (after - before) * 1e-9 for name, before, after in spans}


class GraphedStep:
    """A step over one token of each row. The step may advance the cache; while it is captured no row is active."""

    def __init__(self, step: Callable[[Tensor], Tensor], cache: Cache) -> None:
        """step: makes logits [rows, 1, vocab] of tokens int64 [rows, 1], without waiting for the device."""
        self._tokens = torch.zeros(cache.rows, 1, dtype=torch.int64, device=cache.lengths.device)
        with cache.all_stopped():
            for _ in range(WARM_ROUNDS):
                step(self._tokens)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = step(self._tokens)

    def __call__(self, tokens: Tensor) -> Tensor:
        """The step's logits of the next tokens [rows, 1]."""
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._logits.clone()
