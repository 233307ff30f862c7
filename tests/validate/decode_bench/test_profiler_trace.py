"""Launches as the profiler lists them: only the device's, of decoding alone, and the time in which any of them runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.runtime.speculation.rounds import EagerRounds
from ridgeplan.validate.decode_bench import breakdown as trace
from ridgeplan.validate.decode_bench.breakdown import Launch, busy_us
from ridgeplan.validate.decode_bench.inflated_model import InflatedModel
from ridgeplan.validate.decode_bench.report import DecodeCase
from ridgeplan.validate.random_model import llama_like_shape


def test_time_in_which_several_kernels_run_counts_once() -> None:
    spans = [(0, 10), (8, 12), (9, 11), (20, 21)]
    assert busy_us(Launch("any", *span) for span in spans) == 13
    assert busy_us([]) == 0


class FakeProfiler:
    """Finds one kernel and one call of the host; `log` holds what was asked of it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def start(self) -> None:
        self.log.append("start")

    def stop(self) -> None:
        self.log.append("stop")

    def events(self) -> list[Any]:
        device, host = DeviceType.CUDA, DeviceType.CPU
        kinds = (("second", device, 5.0), ("cudaGraphLaunch", host, 0.0), ("first", device, 1.0))
        return [
            SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=start, end=start + 2))
            for name, kind, start in kinds
        ]


@pytest.mark.model
def test_the_profiler_runs_from_the_end_of_prefill_to_that_of_decoding(
    smollm2: Path, h200_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = InflatedModel.load(str(smollm2), llama_like_shape(30, 640, 1600, 9, 3, 64, vocab=49_200), "cpu")
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(trace.profiler, "profile", lambda activities: FakeProfiler(log))
    engine = model.engine(DecodeCase("quantspec-kv", 64, 1, 2).plan(model, h200_profile, 6))
    launch = EagerRounds.launch
    monkeypatch.setattr(EagerRounds, "launch", lambda rounds, gamma: (log.append("round"), launch(rounds, gamma)))
    launches = trace.traced(engine, [list(range(100, 164))], 0.0)
    warm, decoding = log[: log.index("start") - 1], log[log.index("start") - 1 :]
    assert set(warm) == {"round"}
    assert decoding[:2] == ["synchronize", "start"]
    assert decoding[-2:] == ["synchronize", "stop"]
    assert 2 <= len(decoding[2:-2]) <= 5
    assert set(decoding[2:-2]) == {"round"}
    assert launches == (Launch("first", 1.0, 3.0), Launch("second", 5.0, 7.0))
