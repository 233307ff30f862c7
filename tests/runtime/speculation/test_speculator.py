"""The parts of a round, on values that are known."""

import dataclasses

import pytest
import torch

from ridgeplan import runtime
from ridgeplan.kernels.sampling.reference import VerifyResult
from ridgeplan.runtime.sampling import SamplingParams, all_finite
from ridgeplan.runtime.speculation.speculator import DRAFT, FIRST, VERIFY, RowResult, VerifiedRound


@pytest.fixture
def speculator(tiny_model, make_plan):
    """Of an engine with three rows of 50, 60 and 70 tokens, the last of which has reached its end."""
    engine = runtime.load(make_plan("int4x2", 2, batch=3), tiny_model().folder, device="cpu")
    engine.cache.reset(3)
    engine.cache.lengths.copy_(torch.tensor([50, 60, 70]))
    engine.cache.limit(10)
    engine.cache.stop(2)
    return engine._speculator(engine.cache, SamplingParams(temperature=1.0))


def test_rows_keep_what_was_accepted_and_the_next_token_waits(speculator):
    tokens = torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33]])
    counts = torch.tensor([[2, 1, 2], [3, 2, 2], [1, 0, 1]])
    verified = VerifyResult(tokens, *counts.t())
    verification = VerifiedRound(verified, finite=torch.tensor([True, False, True]))
    pending, figures = speculator.keep(torch.tensor([1, 2, 3]), verification, speculator.cache.active())
    assert speculator.cache.lengths.tolist() == [52, 63, 70]
    assert pending.tolist() == [12, 23, 3]  # a row that is not active keeps its own
    assert figures.rows() == [RowResult([11, 12], 1, 2), RowResult([21, 22, 23], 2, 2, False), RowResult([], 0, 0)]


def test_a_row_is_finite_where_each_of_its_tokens_logits_are(speculator):
    def head(value):
        def logits(x):
            rows = torch.zeros(*x.shape[:-1], 128)
            rows[1, 2, 7] = value
            rows[2, 0, :100] = -torch.inf  # tokens that a model may rule out
            return rows

        return logits

    drafts = dataclasses.replace(
        speculator, drafter=dataclasses.replace(speculator.target, head=lambda x: torch.zeros(*x.shape[:-1], 128))
    ).draft(torch.tensor([1, 2, 3]), 2)
    for value in (torch.nan, torch.inf, 0.0):
        target = dataclasses.replace(speculator.target, head=head(value))
        verification = dataclasses.replace(speculator, target=target).verify(torch.tensor([1, 2, 3]), drafts)
        assert verification.finite.tolist() == [True, value == 0, True]
    assert all_finite(torch.tensor([[0.0, 1.0], [-torch.inf, 0.0], [-torch.inf, -torch.inf]])).tolist() == [
        True,
        True,
        False,
    ]


def test_drafts_come_from_the_drafter(speculator):
    pending = torch.tensor([1, 2, 3])
    silent = dataclasses.replace(speculator.target, head=lambda x: torch.zeros(*x.shape[:-1], 128))
    drafts = dataclasses.replace(speculator, drafter=silent).draft(pending, 2)
    assert drafts.tokens.shape == (3, 2)
    for choice in drafts.choices:
        torch.testing.assert_close(choice.probabilities(), torch.full((3, 128), 1 / 128))


def test_every_token_is_drawn_with_a_number_of_its_own(speculator, monkeypatch):
    """With the same distribution everywhere, equal numbers would draw equal tokens."""
    numbers = torch.arange(6, dtype=torch.float64).view(2, 3) / 6 + 0.01

    def uniform(self, stream, draws):
        return numbers[:draws].t()

    monkeypatch.setattr(type(speculator), "_uniform", uniform)
    flat = dataclasses.replace(speculator.target, head=lambda x: torch.zeros(*x.shape[:-1], 6))
    drafts = dataclasses.replace(speculator, drafter=flat).draft(torch.tensor([1, 2, 3]), 2)
    assert drafts.tokens.t().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert speculator.first(torch.zeros(3, 3)).tolist() == [0, 0, 1]  # 0.01, 0.18 and 0.34 of three equal parts


def test_rounds_end_with_their_rows_and_where_the_target_changes(tiny_model, make_plan):
    """Drafts that read what the target reads agree with it: only the limits keep a round from gamma + 1 tokens."""
    engine = runtime.load(make_plan("int8", 2, batch=4, codes="full"), tiny_model().folder, device="cpu")
    engine.cache.reset(4)
    engine.cache.lengths.copy_(torch.tensor([61, 62, 63, 100]))
    engine.cache.limit(10)
    engine.cache.ends[3] = 101
    speculator = engine._speculator(engine.cache, SamplingParams())
    pending = torch.tensor([1, 2, 3, 4])
    verified = speculator.verify(pending, speculator.draft(pending, 2)).result
    assert verified.advance.tolist() == [3, 2, 1, 1]  # groups of 32 tokens: codes change at 64


def test_random_numbers_reach_beyond_float32(speculator):
    """A float32 below 1 has 24 bits: tokens of a probability under 2^-24 would never or too often be drawn."""
    numbers = speculator._uniform(VERIFY, 1000)
    assert numbers.dtype == torch.float64
    assert (numbers != numbers.float().double()).any()


@pytest.mark.parametrize(("kv", "gamma"), [("bf16", 0), ("int4x2", 3)])
def test_what_a_row_samples_does_not_depend_on_the_other_rows(tiny_model, make_plan, prompts, kv, gamma):
    engine = runtime.load(make_plan(kv, gamma, batch=3), tiny_model().folder, device="cpu")
    first, second, third, other = prompts(40, 70, 55, 90)
    sampling = SamplingParams(temperature=1.0, seed=11)
    together = engine.generate([first, second, third], 24, sampling).tokens
    assert engine.generate([other, second, first], 24, sampling).tokens[1] == together[1]
    assert engine.generate([first], 24, sampling).tokens[0] == together[0]
    same = engine.generate([second, second, second], 24, sampling).tokens
    assert same[1] == together[1]
    assert len(set(map(tuple, same))) == 3  # rows of one prompt sample differently
    other_seed = SamplingParams(temperature=1.0, seed=12)
    assert engine.generate([first, second, third], 24, other_seed).tokens[1] != together[1]


def test_every_round_and_purpose_has_numbers_of_its_own(speculator):
    drawn = []
    for _ in range(3):
        drawn += [speculator._uniform(stream, 3) for stream in (FIRST, DRAFT, VERIFY)]
        speculator.cache.lengths += 1
    numbers = torch.stack(drawn)
    assert len(numbers.unique()) == numbers.numel()
