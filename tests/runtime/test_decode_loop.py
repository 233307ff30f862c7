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

    def __init__(self):
        self.in_flight, self.most_in_flight = 0, 0

    def start(self, pending):
        self.pending = pending

    def launch(self, gamma):
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def collect(self):
        self.in_flight -= 1
        return RoundResult([RowResult([1], 0, GAMMA)], {}, GAMMA)


def most_in_flight(room, new_tokens=100):
    """The most rounds in flight in the first step after a prompt of 10 tokens, where `room` tokens fit."""
    rounds = QueuedRounds()
    cache = SimpleNamespace(config=SimpleNamespace(gamma=GAMMA), limit=lambda tokens: None)
    loop = DecodeLoop(
        Request.build([1] * 10, new_tokens, None),
        SimpleNamespace(cache=cache),
        FixedGamma(GAMMA),
        SimpleNamespace(has_room=lambda longest: longest < room),
        lambda speculator, stopwatch: rounds,
        Stopwatch(torch.device("cpu")),
    )
    steps = loop.steps(torch.tensor([1]))
    next(steps)
    next(steps)
    return rounds.most_in_flight


@pytest.mark.parametrize("room, rounds", [(11, 1), (14, 1), (15, 2), (19, 3), (23, 4), (1000, 4)])
def test_every_round_in_flight_may_add_all_its_drafts_and_a_token(room, rounds):
    assert most_in_flight(room) == rounds


def test_no_more_rounds_are_in_flight_than_tokens_are_left():
    assert most_in_flight(1000, new_tokens=3) == 2
