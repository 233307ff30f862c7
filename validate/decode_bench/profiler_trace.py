"""The kernel launches of a few rounds from torch's profiler, which also sees those inside a captured graph."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import profiler
from torch.autograd import DeviceType

from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.sampling import SamplingParams
from ridgeplan.validate.measure import WARM_TOKENS

TRACED_ROUNDS = 4  # minimum


@dataclass(frozen=True)
class Launch:
    """One kernel launch or copy, in microseconds of the device's clock."""

    name: str
    begin_us: float
    end_us: float

    @property
    def duration_us(self) -> float:
        """From start to end."""
        return self.end_us - self.begin_us


def attach() -> None:
    """Attaches the profiler for good, as graphs captured before, or between two uses, may crash or hang it.

    Source: pytorch issues 75504 and pull request 112507.
    """
    os.environ.update(TEARDOWN_CUPTI="0", DISABLE_CUPTI_LAZY_REINIT="1")
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]):
        torch.cuda.synchronize()


def traced(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> tuple[Launch, ...]:
    """All launches of some rounds after prefill, ordered by start."""
    new_tokens = min(engine.plan.workload.new_tokens, TRACED_ROUNDS * (engine.plan.speculation.gamma + 1) + 1)
    engine.generate([prompt[:WARM_TOKENS] for prompt in prompts], min(2, new_tokens), sampling)
    recording = KernelRecording()
    engine.generate(prompts, new_tokens, sampling, on_progress=recording.begin)
    return recording.launches()


class KernelRecording:
    """The profiler, recording a generation after its prefill."""

    def __init__(self) -> None:
        self._profiler: profiler.profile | None = None

    def begin(self, tokens: int) -> None:
        """Starts recording at the first call, which comes after prefill."""
        if self._profiler is None:
            torch.cuda.synchronize()
            self._profiler = profiler.profile(activities=[profiler.ProfilerActivity.CUDA])
            self._profiler.start()

    def launches(self) -> tuple[Launch, ...]:
        """Stops recording and returns the launches, ordered by start."""
        assert self._profiler is not None, "nothing was generated"
        torch.cuda.synchronize()
        self._profiler.stop()
        events = (event for event in self._profiler.events() or () if event.device_type == DeviceType.CUDA)
        found = (Launch(event.name, event.time_range.start, event.time_range.end) for event in events)
        return tuple(sorted(found, key=lambda launch: launch.begin_us))


def busy_us(launches: Iterable[Launch]) -> float:
    """Time in which at least one of `launches`, ordered by start, ran."""
    busy, until = 0.0, float("-inf")
    for launch in launches:
        busy += max(0.0, launch.end_us - max(launch.begin_us, until))
        until = max(until, launch.end_us)
    return busy
