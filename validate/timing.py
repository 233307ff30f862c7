"""The bench that trials are timed on: a device, random data larger than its caches, and a clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ridgeplan.roofline.cost import Cost

WARM_CALLS = 1
LEAST_CALLS = 5
MOST_CALLS = 200
EVICT_BYTES = 8 << 20  # more than the cores' own caches hold
CUDA_ROTATE_BYTES = 600_000_000  # several times what any device's cache holds
LEAST_CHAIN = 20  # calls of a CUDA graph
CHAIN_BYTES = 2 << 30  # that the calls of a graph move, if at most MOST_CALLS do: half a millisecond at 4 TB/s
RANDOM_PERIOD = 1 << 22  # elements of the pool that are drawn; the rest repeats them


@dataclass(frozen=True)
class Trial:
    """Something to time. `call(i)` runs it on variant i of `variants`.

    What a decode step reads from memory (weights, caches) differs between variants, which together exceed the caches;
    what it finds in the cache (activations, just written) is the same in all.
    """

    kind: str
    name: str
    cost: Cost
    call: Callable[[int], object]
    variants: int = 1

    @property
    def chain(self) -> int:
        """Calls that one CUDA graph holds: whole turns over the variants, so that each call's inputs are cold.

        So many that a replay's launch is little beside them: at least LEAST_CHAIN, up to MOST_CALLS of short ones.
        """
        calls = min(MOST_CALLS, int(CHAIN_BYTES / max(self.cost.bytes, 1)))
        return self.variants * max(math.ceil(LEAST_CHAIN / self.variants), calls // self.variants)


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
        return self._cuda_times(trial) if self.device.type == "cuda" else self._host_times(trial)

    def _host_times(self, trial: Trial) -> list[float]:
        """A decode step streams a layer's weights between two calls of one operation: so does this, untimed.

        It pushes the operation's code and small data, the interpreter's too, out of the cores' own caches; calls
        in a tight loop look up to a third faster than the same calls in a step.
        """
        for index in range(WARM_CALLS):
            trial.call(index % trial.variants)
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
        """Seconds of a call, of each replay of one CUDA graph: a chain of calls that turns over the variants.

        So a decode step runs: nothing stands between its kernels, and each may start while the one before ends
        (`ridgeplan.kernels.device.launch`). The host is one replay ahead, so that the device never waits for it.
        """
        for index in range(trial.variants):
            trial.call(index)
        graph, marks = captured(lambda: _run(trial)), [_mark()]
        deadline = time.perf_counter() + self.budget_s
        while len(marks) < LEAST_CALLS + 2 or (time.perf_counter() < deadline and len(marks) < MOST_CALLS):
            graph.replay()
            marks.append(_mark())
            marks[-2].synchronize()
        marks[-1].synchronize()
        # The first replay waited for its launch.
        return [begin.elapsed_time(end) / 1e3 / trial.chain for begin, end in pairwise(marks[1:])]


def _run(trial: Trial) -> None:
    """The calls of a chain; none's results are kept, so each writes where the one before it wrote, as in a step."""
    for index in range(trial.chain):
        trial.call(index % trial.variants)


def _mark() -> torch.cuda.Event:
    """The device's time when it has done what was asked for so far."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def captured(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `body`, which must have run before, so that its kernels are compiled."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph
