"""The bench that trials are timed on: a device, random data larger than its caches, and a clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.roofline.cost import Cost

WARM_CALLS = 1
LEAST_CALLS = 5
MOST_CALLS = 200
EVICT_BYTES = 8 << 20  # more than the cores' own caches hold
GRAPH_CALLS = 4  # timed together, in one CUDA graph
SHORTEST_S = 1e-7  # of the calls of a graph, where the noise of clearing the cache is larger than they are
SCRATCH_SHAPE = (1 << 16, 1 << 10)  # of float32: 256 MiB, more than any device's cache
RANDOM_PERIOD = 1 << 22  # elements of the pool that are drawn; the rest repeats them


@dataclass(frozen=True)
class Trial:
    """Something to time. `call(i)` runs it on variant i of `variants`; together these exceed the caches."""

    kind: str
    name: str
    cost: Cost
    call: Callable[[int], object]
    variants: int = 1


@dataclass(frozen=True, eq=False)
class Bench:
    """Where trials run.

    pool: flat random data that inputs are views of. rotate_bytes: more than the caches hold, what the variants of
    a trial amount to. budget_s: what one trial may take.
    """

    device: torch.device
    pool: Tensor
    rotate_bytes: int
    budget_s: float

    @classmethod
    def build(cls, device: torch.device, pool_bytes: int, rotate_bytes: int, budget_s: float) -> Bench:
        """A bench in the type that models run in on `device`: bfloat16 on CUDA, else float32."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        elements = pool_bytes // dtype.itemsize
        drawn = torch.randn(min(elements, RANDOM_PERIOD), device=device).to(dtype)
        return cls(device, drawn.repeat(math.ceil(elements / len(drawn)))[:elements], rotate_bytes, budget_s)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the machine's full precision."""
        return self.pool.element_size()

    def variants(self, nbytes: float) -> int:
        """How many inputs of `nbytes` a trial rotates over, at most as many as calls are timed."""
        fitting = int(self.pool.nbytes // nbytes)
        return max(1, min(MOST_CALLS, fitting, math.ceil(self.rotate_bytes / nbytes)))

    def random(self, *shape: int) -> Tensor:
        """A view of the pool. Raises RuntimeError when the pool is smaller."""
        return self.pool[: math.prod(shape)].view(shape)

    def randoms(self, *shape: int) -> Tensor:
        """Disjoint views of the pool, [variants, *shape]."""
        count = self.variants(math.prod(shape) * self.element_bytes)
        return self.random(count, *shape)

    def seconds(self, trial: Trial) -> float:
        """Seconds of a warm call on cold inputs: the lower quartile, as other work on the machine only adds."""
        return statistics.quantiles(self._times(trial), n=4, method="inclusive")[0]

    def median_s(self, trial: Trial) -> float:
        """Seconds of a warm call on cold inputs: the median, as published figures are."""
        return statistics.median(self._times(trial))

    def _times(self, trial: Trial) -> list[float]:
        for index in range(WARM_CALLS):
            trial.call(index % trial.variants)
        return self._cuda_times(trial) if self.device.type == "cuda" else self._host_times(trial)

    def _host_times(self, trial: Trial) -> list[float]:
        """A decode step streams a layer's weights between two calls of one operation: so does this, untimed.

        It pushes the operation's code and small data, the interpreter's too, out of the cores' own caches; calls
        in a tight loop look up to a third faster than the same calls in a step.
        """
        stream = self.pool[: EVICT_BYTES // self.element_bytes]
        times: list[float] = []
        deadline = time.perf_counter() + self.budget_s
        while len(times) < LEAST_CALLS or (time.perf_counter() < deadline and len(times) < MOST_CALLS):
            stream.sum()
            start = time.perf_counter()
            trial.call(len(times) % trial.variants)
            times.append(time.perf_counter() - start)
        return times

    def _cuda_times(self, trial: Trial) -> list[float]:
        """As a captured round runs it: calls in one graph, with only the device's own gaps between kernels.

        Reading much else before each call clears the cache, as a step's stream of weights does; that alone is timed
        apart and taken off. After a fill, calls would also wait for its lines to be written back: on an H200 that
        adds a quarter to a product with 50 MB of weights.
        """
        scratch = torch.zeros(SCRATCH_SHAPE, device=self.device)
        scratch.sum(1)  # loads its kernel, which a capture must not
        clearing_s = statistics.median(self._replays(lambda _: scratch.sum(1)))

        def call(index: int) -> None:
            scratch.sum(1)
            trial.call(index % trial.variants)

        return [max(seconds - clearing_s, SHORTEST_S) / GRAPH_CALLS for seconds in self._replays(call)]

    def _replays(self, call: Callable[[int], object]) -> list[float]:
        """Seconds of replays of a graph that holds `GRAPH_CALLS` calls."""
        graph = captured(lambda: [call(index) for index in range(GRAPH_CALLS)])
        times: list[float] = []
        deadline = time.perf_counter() + self.budget_s
        while len(times) < LEAST_CALLS or (time.perf_counter() < deadline and len(times) < MOST_CALLS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return times


def captured(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `body`, which must have run before, so that its kernels are compiled."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph
