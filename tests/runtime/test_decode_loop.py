"""How many rounds a generation has in flight."""

from types import SimpleNamespace

import pytest
import torch

from ridgeplan.runtime.decode_loop import DecodeLoop
from ridgeplan.runtime.request import Request
from ridgeplan.runtime.speculation.gamma_control import FixedGamma
from ridgeplan.runtime.speculation.speculator import RoundResult, RowResult
from ridgeplan.runtime.statistics import Stopwatch

GAMMA = 3


class QueuedRounds:
    """Rounds of one row that keep one token each, up to four in flight, as a GPU has them."""

    depth = 4

    def __init__(self, seconds=None):
        self.in_flight, self.most_in_flight, self.seconds = 0, 0, seconds or {}

    def start(self, pending):
        self.pending = pending

    def launch(self, gamma):
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def collect(self):
        self.in_flight -= 1
        return RoundResult([RowResult([1], 0, GAMMA)], self.seconds, GAMMA)


def made_loop(rounds, room=1000, new_tokens=100):
    """A generation of one sequence after a prompt of 10 tokens, where `room` tokens fit."""
    cache = SimpleNamespace(config=SimpleNamespace(gamma=GAMMA), limit=lambda tokens: None)
    return DecodeLoop(
        Request.build([1] * 10, new_tokens, None),
        SimpleNamespace(cache=cache),
        FixedGamma(GAMMA),
        SimpleNamespace(has_room=lambda longest: longest < room),
        lambda speculator, stopwatch: rounds,
        Stopwatch(torch.device("cpu")),
    )


def most_in_flight(room, new_tokens=100):
    """The most rounds in flight in the first step."""
    rounds = QueuedRounds()
    steps = made_loop(rounds, room, new_tokens).steps(torch.tensor([1]))
    next(steps)
    next(steps)
    return rounds.most_in_flight


@pytest.mark.parametrize("room, rounds", [(11, 1), (14, 1), (15, 2), (19, 3), (23, 4), (1000, 4)])
def test_every_round_in_flight_may_add_all_its_drafts_and_a_token(room, rounds):
    assert most_in_flight(room) == rounds


def test_no_more_rounds_are_in_flight_than_tokens_are_left():
    assert most_in_flight(1000, new_tokens=3) == 2


def test_a_round_takes_the_devices_time_if_the_host_waited_less():
    """Of 2 s, as the host was elsewhere meanwhile; waits between rounds are no part of them."""
    loop = made_loop(QueuedRounds({"draft": 0.5, "verify": 1.25, "flush": 0.25, "idle": 9.0}), new_tokens=4)
    assert len(list(loop.steps(torch.tensor([1])))) == 4
    assert loop.stopwatch.seconds("round") == pytest.approx([2.0] * 3, abs=0.05)


def test_a_round_takes_the_hosts_wait_if_it_is_longer():
    loop = made_loop(QueuedRounds({"draft": 0.0, "verify": 1e-9, "flush": 0.0}), new_tokens=4)
    list(loop.steps(torch.tensor([1])))
    assert all(1e-9 < seconds < 1.0 for seconds in loop.stopwatch.seconds("round"))
