"""Figures of a generation, from rounds that are counted by hand."""

import pytest
import torch

from ridgeplan.runtime.memory import PeakMemory
from ridgeplan.runtime.speculation.speculator import NOTHING, RowResult
from ridgeplan.runtime.statistics import Statistics, StatsCollector, Stopwatch

# Two drafts a round. The first sequence has three tokens from its first round and two from its second; the second
# one's draft is rejected, and then it is done.
ROUNDS = [
    [RowResult([1, 2, 3], accepted=2, verified=2), RowResult([4], accepted=0, verified=1)],
    [RowResult([5, 6], accepted=1, verified=2), NOTHING],
]


@pytest.fixture
def statistics() -> Statistics:
    collector, stopwatch = StatsCollector(2, (50, 70)), Stopwatch(torch.device("cpu"))
    for rows in ROUNDS:
        collector.add(2, rows)
    stopwatch.add({"draft": 0.004, "verify": 0.010, "flush": 0.001, "round": 0.020})
    stopwatch.add({"draft": 0.008, "verify": 0.030, "flush": 0.002, "round": 0.028, "idle": 0.0005})
    stopwatch.add({"prefill": 0.3, "capture": 0.7, "first use": 1.5})
    return collector.statistics(stopwatch, PeakMemory(12345, 23456, 789), generated=8, flushes=0)


def test_counts(statistics):
    assert (statistics.gamma, statistics.prompt_tokens) == (2, (50, 70))
    assert (statistics.rounds, statistics.sequence_rounds) == (2, 3)
    assert (statistics.generated, statistics.decoded) == (8, 6)
    assert statistics.verified_at == (3, 2)
    assert statistics.accepted_at == (2, 1)
    assert (statistics.drafted, statistics.num_draft_tokens_verified, statistics.accepted) == (6, 5, 3)
    peaks = statistics.peak_memory_bytes, statistics.peak_device_bytes, statistics.outside_bytes
    assert peaks == (12345, 23456, 789)


def test_acceptance_under_both_definitions(statistics):
    assert statistics.acceptance == 3 / 5  # of the drafts that were compared
    assert statistics.accepted_share == 3 / 6  # of all drafts
    assert statistics.acceptance_at == (2 / 3, 1 / 2)
    assert statistics.tokens_per_round == 6 / 3


def test_times(statistics):
    assert statistics.draft_s == pytest.approx(0.006 / 2)  # the median of two rounds, by draft
    assert statistics.verify_s == pytest.approx(0.020)
    assert statistics.flush_s == pytest.approx(0.003)
    assert statistics.decode_s == pytest.approx(0.048)
    assert (statistics.idle_s, statistics.capture_s, statistics.first_use_s) == (0.0005, 0.7, 1.5)
    # A round of 24 ms brings each unfinished sequence two tokens.
    assert statistics.tpot_ms == pytest.approx(12)
    assert statistics.ttft_ms == pytest.approx(300)


def test_without_rounds_every_figure_is_zero():
    stopwatch = Stopwatch(torch.device("cpu"))
    statistics = StatsCollector(0, (5,)).statistics(stopwatch, PeakMemory(None), generated=1, flushes=0)
    assert (statistics.acceptance, statistics.accepted_share, statistics.tokens_per_round) == (0.0, 0.0, 0.0)
    assert (statistics.tpot_ms, statistics.draft_s, statistics.verify_s) == (0.0, 0.0, 0.0)
