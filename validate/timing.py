"""Kernel calls, and the bench that times them: a device, random data larger than its caches, and a clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.passes import tiles

WARM_CALLS = 1
MIN_CALLS = 5
MAX_CALLS = 200
EVICT_BYTES = 8 << 20  # larger than the cores' private caches
CUDA_ROTATE_BYTES = 600_000_000  # several times any device's cache
MIN_CHAIN = 20  # fewest calls per CUDA graph
CHAIN_BYTES = 2 << 30  # traffic per graph, with at most MAX_CALLS calls: half a millisecond at 4 TB/s
RANDOM_PERIOD = 1 << 22  # elements of the pool that are random; the rest repeats them


def _no_reference() -> float:
    raise NotImplementedError("this call has no reference")


@dataclass(frozen=True)
class KernelCall:
    """A kernel with its inputs at one size: what calibration, the kernel bench and the suite time.

    kind: the kernel class whose rates predict it. name: its size, as tables show it. cost: of all launches of a call.
    run: `run(i)` executes it on variant i of `variants`. Data that a decode step reads from memory (weights, KV cache)
    differs between variants, which together exceed the caches; data that is already cached (activations, just written)
    is shared. rows, width, depth: as in `ridgeplan.roofline.catalog.profile.Rates`.
    error: executes a call and compares it with a float32 reference. peers: other implementations on the same inputs,
    executed as `run` is.
    """

    kind: str
    name: str
    cost: Cost
    run: Callable[[int], object]
    variants: int = 1
    rows: int = 1
    width: float = 0.0
    depth: float = 0.0
    error: Callable[[], float] = _no_reference
    peers: Mapping[str, Callable[[int], object]] = field(default_factory=dict)

    @property
    def tiles(self) -> float:
        """Tiles of a call on all SMs, as the cost model counts them."""
        return float(tiles(self.kind, self.width, self.depth))

    @property
    def chain(self) -> int:
        """Calls per CUDA graph: whole cycles over the variants, so that each call's inputs are cold.

        Enough to make a replay's launch time negligible: at least MIN_CHAIN, and up to MAX_CALLS short ones.
        """
        calls = min(MAX_CALLS, int(CHAIN_BYTES / max(self.cost.bytes, 1)))
        return self.variants * max(math.ceil(MIN_CHAIN / self.variants), calls // self.variants)


@dataclass(frozen=True, eq=False)
class Bench:
    """The device and the data for kernel calls.

    pool: flat random data; inputs are views of it. rotate_bytes: total size of a call's variants, larger than the
    caches. budget_s: time limit of a call. max_variants: of any call.
    """

    device: torch.device
    pool: Tensor
    rotate_bytes: int
    budget_s: float
    max_variants: int = MAX_CALLS

    @classmethod
    def build(cls, device: torch.device, pool_bytes: int, rotate_bytes: int, budget_s: float) -> Bench:
        """A bench with the models' dtype on `device`: bfloat16 on CUDA, else float32."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        elements = pool_bytes // dtype.itemsize
        drawn = torch.randn(min(elements, RANDOM_PERIOD), device=device).to(dtype)
        return cls(device, drawn.repeat(math.ceil(elements / len(drawn)))[:elements], rotate_bytes, budget_s)

    @property
    def element_bytes(self) -> int:
        """Bytes of a full-precision element."""
        return self.pool.element_size()

    def variants(self, nbytes: float) -> int:
        """Number of inputs of `nbytes` that a call rotates over."""
        fitting = int(self.pool.nbytes // nbytes)
        return max(1, min(self.max_variants, fitting, math.ceil(self.rotate_bytes / nbytes)))

    def random(self, *shape: int) -> Tensor:
        """A random view of the pool. Raises RuntimeError if the pool is too small."""
        return self.pool[: math.prod(shape)].view(shape)

    def randoms(self, *shape: int) -> Tensor:
        """Disjoint views of the pool, [variants, *shape]."""
        count = self.variants(math.prod(shape) * self.element_bytes)
        return self.random(count, *shape)

    def seconds(self, call: KernelCall) -> float:
        """Seconds of a warm call on cold inputs: the lower quartile, as other work on the machine only adds time."""
        return statistics.quantiles(self._times(call), n=4, method="inclusive")[0]

    def readings(self, call: KernelCall) -> list[float]:
        """`seconds` of the first half of the calls, and of the second."""
        times = self._times(call)
        half = len(times) // 2
        return [statistics.quantiles(part, n=4, method="inclusive")[0] for part in (times[:half], times[half:])]

    def median_s(self, call: KernelCall) -> float:
        """Seconds of a warm call on cold inputs: the median, for published figures."""
        return statistics.median(self._times(call))

    def _times(self, call: KernelCall) -> list[float]:
        return self._cuda_times(call) if self.device.type == "cuda" else self._host_times(call)

    def _host_times(self, call: KernelCall) -> list[float]:
        """Times calls on a CPU, with untimed reads of as much memory as a step reads between two calls.

        These evict the operation's code and small data, and the interpreter's, from the cores' private caches. In a
        tight loop, calls appear up to a third faster than in a step.
        """
        for index in range(WARM_CALLS):
            call.run(index % call.variants)
        stream = self.pool[: EVICT_BYTES // self.element_bytes]
        times: list[float] = []
        deadline = time.perf_counter() + self.budget_s
        while len(times) < MIN_CALLS or (time.perf_counter() < deadline and len(times) < MAX_CALLS):
            stream.sum()
            start = time.perf_counter()
            call.run(len(times) % call.variants)
            times.append(time.perf_counter() - start)
        return times

    def _cuda_times(self, call: KernelCall) -> list[float]:
        """Seconds per call, for each replay of a CUDA graph with a chain of calls that cycles over the variants.

        As in a decode step, kernels follow each other without gaps, and each may start while the previous one ends
        (`ridgeplan.kernels.device.cuda`). The host is one replay ahead, so the device never waits for it.
        """
        for index in range(call.variants):
            call.run(index)
        graph, marks = captured(lambda: _run_chain(call)), [_mark()]
        deadline = time.perf_counter() + self.budget_s
        while len(marks) < MIN_CALLS + 2 or (time.perf_counter() < deadline and len(marks) < MAX_CALLS):
            graph.replay()
            marks.append(_mark())
            marks[-2].synchronize()
        marks[-1].synchronize()
        # The first replay includes the wait for its launch.
        return [begin.elapsed_time(end) / 1e3 / call.chain for begin, end in pairwise(marks[1:])]


def _run_chain(call: KernelCall) -> None:
    """Runs a chain's calls without keeping results, so that each reuses the previous one's memory, as in a step."""
    for index in range(call.chain):
        call.run(index % call.variants)


def _mark() -> torch.cuda.Event:
    """A recorded event after all work launched so far."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def captured(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A captured graph of `body`, which must have run before, so that its kernels are compiled."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph
