"""How rounds run: what a launch leaves to be collected, and the times of its parts."""

import pytest
import torch

from ridgeplan import runtime
from ridgeplan.runtime.sampling import SamplingParams
from ridgeplan.runtime.speculation import rounds as round_runner
from ridgeplan.runtime.speculation.rounds import STAMPS, EagerRounds
from ridgeplan.runtime.speculation.speculator import RoundFigures, RowResult


@pytest.fixture
def rounds(tiny_model, make_plan):
    """Rounds of two rows of 50 and 60 tokens."""
    engine = runtime.load(make_plan("int4x2", 2, batch=2), tiny_model().folder, device="cpu")
    engine.cache.reset(2)
    engine.cache.lengths.copy_(torch.tensor([50, 60]))
    engine.cache.limit(20)
    return EagerRounds(engine._speculator(engine.cache, SamplingParams()))


def test_phases_last_from_one_reading_of_the_clock_to_the_next(rounds, monkeypatch):
    readings = iter([1_000_000_000, 1_000_000_003, 1_000_000_020, 1_000_000_100])
    monkeypatch.setattr(round_runner.time, "perf_counter_ns", lambda: next(readings))
    rounds.start(torch.tensor([1, 2]))
    rounds.launch(2)
    seconds = rounds.collect().seconds
    assert seconds == pytest.approx({"draft": 3e-9, "verify": 17e-9, "flush": 80e-9})


def test_rounds_that_nobody_collected_are_forgotten(rounds):
    rounds.start(torch.tensor([1, 2]))
    rounds.launch(2)
    assert rounds.in_flight == 1
    rounds.start(torch.tensor([1, 2]))
    assert rounds.in_flight == 0


def test_one_buffer_holds_figures_and_clock():
    """As a CUDA graph writes it and the host reads its copy."""
    out = torch.arange(2 * RoundFigures.width(gamma=1) + STAMPS)
    out[STAMPS:] = torch.tensor([5, 6, 2, 1, 1, 1, 0, 0, 0, 0, 7, 8, 1, 0, 1, 0, 4, 3, 2, 1])
    figures, stamps = round_runner._split(out, rows=2, gamma=1)
    assert figures.rows() == [RowResult([5, 6], 1, 1), RowResult([7], 0, 1, False, 4, 3, 2, 1)]
    assert stamps.tolist() == [0, 1, 2, 3]
    stamps[0] = 99
    assert out[0] == 99  # views: the graph writes through them


# A round's figures and what is read from them on the host.


def test_rows_read_what_was_packed():
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    kept, accepted, verified = torch.tensor([[2, 0], [1, 0], [2, 0]])
    figures = RoundFigures.of(tokens, kept, accepted, verified, finite=torch.tensor([True, False]))
    assert figures.values.shape == (2, RoundFigures.width(gamma=2))
    assert figures.rows() == [RowResult([5, 6], accepted=1, verified=2), RowResult([], 0, 0, finite=False)]
