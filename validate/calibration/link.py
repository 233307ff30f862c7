"""Rates of the host link: copies of layers, gathers of tokens, writes, and the streams of a cache."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ridgeplan.kernels.offload import KeysAndValues, SlotLoads, copy_prefix, gather_into_slots
from ridgeplan.roofline.catalog.profile import LINK_CLASSES, MAX_UTILIZATION, Rates
from ridgeplan.roofline.execution import HOST_PAGE_BYTES, HOST_PIECE_BYTES
from ridgeplan.runtime.buffers import HostMemory, available_bytes
from ridgeplan.validate.measure import spread_of
from ridgeplan.validate.timing import captured

SIZE = 1 << 29  # bytes of a copy
SPREAD = 1 << 34  # bytes that tokens are gathered from; from a few the device's page tables would stay in caches
HEADS, HEAD_DIM = 8, 128
LAYERS = 8  # that the bytes are of; a launch loads from one
SPACING = 640  # of how many tokens one is loaded: about a tenth of a budget of 2048 at 128k tokens
ALLOCATIONS = 3
REPEATS = 5
LAUNCHES = 100  # in a graph, so that its own launch is negligible


@dataclass(frozen=True)
class LinkTimes:
    """One kind of transfer. times: seconds of runs that each move `moved` bytes; empty_s: of one that moves none.

    pages: of the host's memory that single tokens are gathered from; 0 for other transfers.
    """

    moved: int
    times: tuple[float, ...]
    empty_s: float
    pages: int = 0

    @property
    def bytes_per_s(self) -> float:
        """The rate beyond the launch, of the median run."""
        return self.moved / max(statistics.median(self.times) - self.empty_s, 1e-9)

    def rates(self, link_bytes_per_s: float) -> Rates:
        """As a share of what copies of pinned memory reach; gathered pages count as a piece each (`load_seconds`)."""
        spread = spread_of(self.times) or 0.0
        counted = self.pages * HOST_PIECE_BYTES / self.moved if self.pages else 1
        return Rates(min(counted * self.bytes_per_s / link_bytes_per_s, MAX_UTILIZATION), 1.0, self.empty_s, spread)


def link_classes(device: torch.device, link_bytes_per_s: float) -> dict[str, Rates]:
    """Rates of `LINK_CLASSES`."""
    times = measured_link(device)
    return {kind: times[kind].rates(link_bytes_per_s) for kind in LINK_CLASSES}


@torch.inference_mode()
def measured_link(device: torch.device, size: int = SIZE, spread: int = SPREAD) -> dict[str, LinkTimes]:
    """Copies to the device by this package's kernel, gathers of tokens and of pages of 16, and writes to the host.

    spread: bytes that tokens are gathered from, or half of what the host has free.
    """
    tokens = size // (2 * HEADS * HEAD_DIM * 2)
    keys, values = torch.zeros(2, 1, HEADS, tokens, HEAD_DIM, dtype=torch.bfloat16, device=device)
    out = keys, values
    times_by_kind = _copies(size, out, device)
    spread = max(size, min(spread, (available_bytes() or 2 * spread) // 2))
    rows = spread // LAYERS // (2 * HEADS * HEAD_DIM * 2) // 16 * 16
    by_token = HostMemory.allocate(spread, device).split(
        [(torch.Size((1, rows, HEADS, 2, HEAD_DIM)), torch.bfloat16)] * LAYERS
    )
    layers = [(layer[:, :, :, 0].transpose(1, 2), layer[:, :, :, 1].transpose(1, 2)) for layer in by_token]
    loaded_tokens = min(tokens, max(16, rows // SPACING))
    for kind, page in (("host_gather", 1), ("host_gather_pages", 16)):
        loads = [random_loads(rows, loaded_tokens, page, device) for _ in layers]
        pages = sum(pages_with(layer, page) for layer in loads) // len(loads) if page == 1 else 0
        times = _gather_times(layers, out, loads, page, rows)
        times_by_kind[kind] = LinkTimes(2 * loads[0].units.numel() * page * HEAD_DIM * 2, *times, pages)
    return times_by_kind


def _copies(size: int, out: KeysAndValues, device: torch.device) -> dict[str, LinkTimes]:
    """Copies of `size` bytes both ways, of memory allocated anew a few times: some of it may be another socket's."""
    tokens = out[0].shape[2]
    every, none = (torch.full((1,), count, dtype=torch.int32, device=device) for count in (tokens, 0))
    times: defaultdict[str, list[float]] = defaultdict(list)
    empty_s = {}
    for _ in range(ALLOCATIONS):
        keys, values = HostMemory.allocate(size, device).split([(out[0].shape, out[0].dtype)] * 2)
        held = keys, values
        for kind, source, target in (("host_copy", held, out), ("host_store", out, held)):
            times[kind] += run_times(device, partial(_copy, source, target, every))
            empty_s[kind] = _launch_s(device, partial(_copy, source, target, none))
    return {kind: LinkTimes(size, tuple(runs), empty_s[kind]) for kind, runs in times.items()}


def _gather_times(
    layers: Sequence[KeysAndValues], out: KeysAndValues, loads: Sequence[SlotLoads], page: int, tokens: int
) -> tuple[tuple[float, ...], float]:
    """Seconds of a launch that loads from one layer after another, of some runs, and of one that loads nothing.

    As in a step, each launch loads little, by the few programs that leave room for kernels beside them, and other
    units than the one before: entries of page tables that are still cached would halve its time.
    """
    device = out[0].device
    gather = partial(gather_into_slots, page=page, concurrent=True)

    def step() -> None:
        for layer, load in zip(layers, loads, strict=True):
            gather(layer, out, load)

    def draw_anew() -> None:
        for load in loads:
            load.units.copy_(_random_units(tokens, load.units.shape[2], page, device))

    times = run_times(device, _replay(device, step), draw_anew)
    nothing = replace(loads[0], count=torch.zeros_like(loads[0].count))
    launch_s = _launch_s(device, partial(gather, layers[0], out, nothing))
    return tuple(seconds / len(layers) for seconds in times), launch_s


def _copy(source: KeysAndValues, out: KeysAndValues, count: Tensor) -> None:
    for held, copied in zip(source, out, strict=True):
        copy_prefix(held, copied, count)


def random_loads(tokens: int, token_count: int, page: int, device: torch.device) -> SlotLoads:
    """Loads of some of the tokens, in random units, other ones for each KV head."""
    units = token_count // page
    into = torch.arange(units, dtype=torch.int32, device=device).expand(1, HEADS, units).contiguous()
    count = torch.full((1, HEADS), units, dtype=torch.int32, device=device)
    return SlotLoads(into, _random_units(tokens, units, page, device), into, count)


def _random_units(tokens: int, count: int, page: int, device: torch.device) -> Tensor:
    """`count` units of each KV head in ascending order, as choices are, so that heads share pages."""
    drawn = [torch.randperm(tokens // page, device=device)[:count].sort().values for _ in range(HEADS)]
    return torch.stack(drawn)[None].int()


def pages_with(loads: SlotLoads, page: int) -> int:
    """Pages of the host's memory that the units of all heads lie in; a token's heads adjoin."""
    starts = loads.units.long() * page * 2 * HEADS * HEAD_DIM * 2
    return len((starts // HOST_PAGE_BYTES).unique())


def _launch_s(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds of a run that moves nothing, of many in a row."""
    replay = _replay(device, lambda: [run() for _ in range(LAUNCHES)])
    return statistics.median(run_times(device, replay)) / LAUNCHES


def _replay(device: torch.device, run: Callable[[], object]) -> Callable[[], object]:
    """A function that repeats a run. On a GPU it replays a graph, as a decode step does, after a run that compiles."""
    if device.type != "cuda":
        return run
    run()
    return captured(run).replay


def run_times(
    device: torch.device, run: Callable[[], object], before: Callable[[], object] = lambda: None
) -> tuple[float, ...]:
    """Seconds of some runs, after one that compiles kernels. before: called ahead of each, not timed."""
    times = []
    for _ in range(REPEATS + 1):
        before()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return tuple(times[1:])
