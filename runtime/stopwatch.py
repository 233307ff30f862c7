"""Times the phases of a generation without waiting for the device."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch


class Stopwatch:
    """Collects durations by name. On CUDA it records events, which are read once, at the end."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: defaultdict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)
        self._durations: defaultdict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Times the body."""
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._spans[name].append((begin, end))
        else:
            start = time.perf_counter()
            yield
            self._durations[name].append(time.perf_counter() - start)

    @contextlib.contextmanager
    def measure_wall(self, name: str) -> Iterator[None]:
        """Wall time of the body, for one that waits for the device itself."""
        start = time.perf_counter()
        yield
        self._durations[name].append(time.perf_counter() - start)

    def add(self, seconds: Mapping[str, float]) -> None:
        """Adds durations that were measured elsewhere."""
        for name, duration in seconds.items():
            self._durations[name].append(duration)

    def seconds(self, name: str) -> list[float]:
        """All durations under a name, in order; waits for the device."""
        if name in self._spans:
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) / 1e3 for begin, end in self._spans[name]]
        return list(self._durations[name])
