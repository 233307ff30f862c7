"""The bench that calls run on: chains of calls in one graph over cold inputs, and what is taken of their times."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from ridgeplan.roofline.cost import Cost
from ridgeplan.validate import timing as module
from ridgeplan.validate.timing import CUDA_ROTATE_BYTES, MAX_CALLS, MIN_CALLS, MIN_CHAIN, Bench, KernelCall


def test_the_median_is_above_the_quartile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "_host_times", lambda *_: [1.0, 2.0, 3.0, 4.0, 50.0])
    bench = Bench(torch.device("cpu"), torch.empty(0), 0, 0.0)
    call = KernelCall("test", "any", Cost(), lambda _: None)
    assert (bench.seconds(call), bench.median_s(call)) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("variants", "nbytes", "calls"),
    [
        (1, 0, MAX_CALLS), (1, 1e5, MAX_CALLS), (1, 1e10, MIN_CHAIN), (3, 1e10, 21), (19, 1e10, 38),
        (68, 9e6, 136), (120, 5e6, 120), (MAX_CALLS, 1e5, MAX_CALLS),
    ],
)  # fmt: skip
def test_a_chain_turns_over_all_variants_and_is_long_where_calls_are_short(
    variants: int, nbytes: float, calls: int
) -> None:
    assert KernelCall("test", "any", Cost(read_bytes=nbytes), lambda _: None, variants).chain == calls


@dataclass
class FakeDevice:
    """Runs a replay in `replay_ms`, the first one `launch_ms` after it was asked for; `log` holds what the host did."""

    replay_ms: float
    launch_ms: float
    log: list[str] = field(default_factory=list)
    replays: int = 0

    def replay(self) -> None:
        self.log.append("replay")
        self.replays += 1

    def mark(self) -> "FakeMark":
        late = self.launch_ms if self.replays else 0.0
        return FakeMark(self, self.replays, late + self.replay_ms * self.replays)


@dataclass
class FakeMark:
    device: FakeDevice
    replays: int
    at_ms: float

    def synchronize(self) -> None:
        self.device.log.append(f"wait for {self.replays}")

    def elapsed_time(self, end: "FakeMark") -> float:
        return end.at_ms - self.at_ms


def test_replays_queue_up_and_the_first_that_waited_for_its_launch_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, called = FakeDevice(replay_ms=4.0, launch_ms=50.0), []

    def captured(body: Callable[[], object]) -> FakeDevice:
        called.append("capture")
        body()
        return device

    monkeypatch.setattr(module, "captured", captured)
    monkeypatch.setattr(module, "_mark", device.mark)
    there = Bench(torch.device("cuda"), torch.empty(0), 0, 0.0)
    call = KernelCall("test", "any", Cost(read_bytes=1e10), called.append, variants=3)
    assert there.median_s(call) == pytest.approx(4e-3 / 21)
    assert called == [0, 1, 2, "capture", *(7 * [0, 1, 2])]
    assert device.log[:5] == ["replay", "wait for 0", "replay", "wait for 1", "replay"]
    assert device.replays == MIN_CALLS + 1


@pytest.mark.gpu
def test_a_chain_on_cuda_reads_cold_weights() -> None:
    """32 MB fit into an H200's cache: read again and again they take much less than in turns with others."""
    bench = Bench.build(torch.device("cuda"), 1 << 30, CUDA_ROTATE_BYTES, 0.05)
    weights, calls = bench.randoms(4096, 4096), []
    x, cost = bench.random(1, 4096), Cost(read_bytes=weights[0].nbytes)
    assert len(weights) == 18

    def call(index: int) -> None:
        calls.append(index)
        torch.nn.functional.linear(x, weights[index])

    cold = KernelCall("test", "cold", cost, call, len(weights))
    cold_s = bench.median_s(cold)
    assert calls == [*range(18), *(index % 18 for index in range(cold.chain))]
    assert cold_s > weights[0].nbytes / 6e12
    assert bench.median_s(KernelCall("test", "warm", cost, call)) < 0.9 * cold_s


def test_calls_on_a_cpu_rotate_over_their_variants() -> None:
    """After the warm calls, each of which takes the next variant, timed calls begin with the first again."""
    run: list[int] = []
    bench = Bench(torch.device("cpu"), torch.zeros(8), 0, 0.0)
    bench.readings(KernelCall("test", "any", Cost(), run.append, variants=3))
    timed = run[module.WARM_CALLS :]
    assert timed == [index % 3 for index in range(MIN_CALLS)]


def test_the_two_readings_are_of_both_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "_host_times", lambda *_: [1.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    bench = Bench(torch.device("cpu"), torch.empty(0), 0, 0.0)
    assert bench.readings(KernelCall("test", "any", Cost(), lambda _: None)) == [1.0, 2.0]
