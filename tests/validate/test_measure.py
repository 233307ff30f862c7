"""Generations measured segment by segment, alone and in turns, on engines and a clock that are made up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from ridgeplan.runtime.statistics import Statistics
from ridgeplan.validate.measure import (
    Run,
    Segment,
    is_busy,
    measure,
    median_round_s,
    segment_tokens,
    spread_of,
    take_turns,
    widest,
)


@dataclass
class Clock:
    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class FakeEngine:
    """Each round takes the next of `round_s` and yields `per_round` tokens for each prompt."""

    name: str
    clock: Clock
    log: list[str]
    round_s: list[float]
    per_round: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    peak_memory_bytes: int | None = 1000

    def stream_batch(self, prompts: list[list[int]], max_new_tokens: int, sampling: Any) -> Iterator[list[list[int]]]:
        self.clock.now += 5.0
        yield [[0] for _ in prompts]
        left = max_new_tokens - 1
        while left:
            self.log.append(self.name)
            self.clock.now += self.round_s.pop(0)
            count = min(left, self.per_round)
            left -= count
            yield [[7] * count for _ in prompts]

    @property
    def statistics(self) -> Statistics:
        return Statistics(
            gamma=0, prompt_tokens=(3,), rounds=40, sequence_rounds=40, generated=41, decoded=80, verified_at=(),
            accepted_at=(), flushes=0, prefill_s=5.0, draft_s=0.0, verify_s=0.0, flush_s=0.0, decode_s=99.0,
            idle_s=3.0, capture_s=0.0, peak_memory_bytes=5000,
        )  # fmt: skip


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setitem(Run.advance.__globals__, "time", clock)  # the package exports a function of the module's name
    return clock


def test_a_round_is_the_median_of_the_segments_and_not_the_mean(clock: Clock) -> None:
    # 41 tokens: one from prefill, one round before the first segment, then segments of five rounds.
    engine = FakeEngine("a", clock, [], [1.0] * 11 + [9.0] * 5 + [1.0] * 24)
    measured = measure(engine, [[1, 2, 3]], 41)  # type: ignore[arg-type]
    assert [segment.rounds for segment in measured.segments] == [5] * 7  # the last is left out
    assert [segment.round_s for segment in measured.segments] == [1, 1, 9, 1, 1, 1, 1]
    assert measured.tpot_ms == pytest.approx(1000 * 1.0 / 2)  # the statistics have 2 tokens a round
    assert measured.spread == 0
    assert len(measured.tokens[0]) == 41


def test_a_lone_runs_statistics_are_the_engines(clock: Clock) -> None:
    engine = FakeEngine("a", clock, [], [1.0] * 40)
    assert measure(engine, [[1]], 41).statistics == engine.statistics  # type: ignore[arg-type]


def test_rounds_of_several_gammas_are_measured_by_their_mean(clock: Clock) -> None:
    """Some segments have long rounds of many tokens, others short ones of few: neither is a disturbance."""
    engine = FakeEngine("a", clock, [], [1.0] * 21 + [10.0] * 19)
    measured = measure(engine, [[1]], 41)  # type: ignore[arg-type]
    mixed = replace(measured, statistics=replace(engine.statistics, gamma=4, rounds_at=(21, 0, 0, 0, 19)))
    single_gamma = replace(measured, statistics=replace(engine.statistics, gamma=4, rounds_at=(0, 0, 0, 0, 40)))
    assert mixed.spread is None
    assert mixed.tpot_ms == pytest.approx(1e3 * (99.0 / 40) / (80 / 40))  # decode_s over rounds, over tokens a round
    assert (single_gamma.spread, single_gamma.tpot_ms) == (measured.spread, measured.tpot_ms)


def test_half_of_the_segments_slowed_shows(clock: Clock) -> None:
    engine = FakeEngine("a", clock, [], [1.0] * 21 + [10.0] * 19)
    measured = measure(engine, [[1]], 41)  # type: ignore[arg-type]
    assert measured.spread is not None
    assert measured.spread > 1


def test_runs_take_turns_segment_by_segment(clock: Clock) -> None:
    log: list[str] = []
    slow, fast = FakeEngine("s", clock, log, [1.0] * 40), FakeEngine("f", clock, log, [2.0] * 20, per_round=2)
    runs = [Run(engine, [[1]], 41) for engine in (slow, fast)]  # type: ignore[arg-type]
    del log[:]
    take_turns(runs)
    assert "".join(log).startswith("sssssfff" * 3)
    # Each pays for its own rounds only, although the other ran between them.
    assert runs[0].measured(exclusive=False).tpot_ms == pytest.approx(1000 * 1.0 / 2)
    assert runs[1].measured(exclusive=False).tpot_ms == pytest.approx(1000 * 2.0 / 2)


def test_in_turns_times_and_peak_are_the_runs_own(clock: Clock) -> None:
    engine = FakeEngine("a", clock, [], [0.5] * 40)
    run = Run(engine, [[1]], 41, others_bytes=400)  # type: ignore[arg-type]
    engine.peak_memory_bytes = 9000  # what others allocated later
    take_turns([run])
    statistics = run.measured(exclusive=False).statistics
    assert statistics.peak_memory_bytes == 600
    assert statistics.decode_s == pytest.approx(40 * 0.5)
    assert statistics.idle_s == 0
    assert run.measured(exclusive=False, freed_bytes=250).statistics.peak_memory_bytes == 350


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_the_shortest_generations_can_be_measured(clock: Clock, tokens: int) -> None:
    measured = measure(FakeEngine("a", clock, [], [1.0] * 2), [[1]], tokens)  # type: ignore[arg-type]
    assert len(measured.tokens[0]) == tokens
    assert measured.spread is None
    assert measured.tpot_ms > 0


# What is typical of a generation's segments, and when they say that the machine was busy. All times are made up.


def test_a_segments_round_is_its_share_and_the_median_ignores_a_minority() -> None:
    quiet = [Segment(0.08, 8)] * 6  # 10 ms a round
    slowed = [Segment(0.4, 4)] * 4  # 100 ms a round
    assert median_round_s(quiet + slowed) == pytest.approx(0.01)


def test_the_spread_is_the_interquartile_range_over_the_median() -> None:
    assert spread_of([8, 9, 10, 11, 12]) == pytest.approx((11 - 9) / 10)
    assert spread_of([5, 5, 5, 5]) == 0


def test_too_few_values_have_no_spread() -> None:
    assert spread_of([1, 100, 1]) is None
    assert not is_busy(None)
    assert widest([None, None]) is None
    assert widest([0.1, None, 0.3]) == 0.3


def test_a_quiet_machine_with_one_slow_segment_is_not_busy_and_a_third_of_slow_ones_is() -> None:
    def spread(slow: int) -> float | None:
        return spread_of([1.0 + 0.01 * index for index in range(12 - slow)] + [10.0] * slow)

    assert not is_busy(spread(1))
    assert is_busy(spread(4))
    assert is_busy(spread(6))


def test_a_context_that_grows_by_a_tenth_is_not_noise() -> None:
    assert not is_busy(spread_of([1 + 0.1 * index / 9 for index in range(10)]))


@pytest.mark.parametrize(("new_tokens", "expected"), [(1, 1), (10, 1), (64, 7), (256, 26), (1000, 100)])
def test_a_generation_has_about_ten_segments(new_tokens: int, expected: int) -> None:
    assert segment_tokens(new_tokens) == expected
