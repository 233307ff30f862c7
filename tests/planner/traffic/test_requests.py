"""Arrivals, lengths and rounds of requests."""

from collections.abc import Callable

import numpy as np
import pytest

from ridgeplan.planner import PlanError
from ridgeplan.planner.traffic.requests import draw_rounds, generate_requests, parse_lengths, parse_rates
from ridgeplan.roofline.round import tokens_per_round


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("text", "mean", "variation"),
    [
        ("8k", 8192, 0.0),
        ("lognormal:8k", 8192, 1.0),
        ("lognormal:2000:0.5", 2000, 0.5),
        ("uniform:1000..3000", 2000, 0.29),
    ],
)
def test_lengths_have_the_mean_and_the_variation_that_were_asked_for(text: str, mean: float, variation: float) -> None:
    drawn = parse_lengths(text).draw(200_000, rng())
    assert drawn.mean() == pytest.approx(mean, rel=0.01)
    assert drawn.std() / drawn.mean() == pytest.approx(variation, abs=0.02)
    assert drawn.min() >= 1


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (
            parse_lengths,
            "normal:8k",
            "'normal:8k' is not a distribution of lengths; allowed: a number of tokens, lognormal",
        ),
        (parse_lengths, "lognormal:8k:0", "the CV of 'lognormal:8k:0' is '0'; allowed: above 0 up to 10"),
        (parse_lengths, "uniform:8k", "has no range; allowed: uniform:MIN..MAX"),
        (parse_lengths, "uniform:8k..1k", "is not a range"),
        (parse_lengths, "0", "'0' is out of range; allowed: 1 to"),
        (parse_rates, "0/s", "'0/s' is not a rate of requests; allowed: one such as 4/s"),
        (parse_rates, "4/day", "'4/day' is not a rate"),
        (parse_rates, "fast", "'fast' is not a rate"),
    ],
)
def test_a_wrong_text_is_named(parse: Callable[[str], object], text: str, words: str) -> None:
    with pytest.raises(PlanError) as raised:
        parse(text)
    assert words in str(raised.value)


def test_rates_have_units_of_time() -> None:
    assert parse_rates("240/min") == (4.0,)
    assert parse_rates("4,1,2/s") == parse_rates("4/s,1/s,2/s") == (1.0, 2.0, 4.0)
    assert parse_rates("3600/h") == parse_rates("1")


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_follow_the_burstiness(burstiness: float, variation: float) -> None:
    lengths = parse_lengths("lognormal:8k"), parse_lengths("lognormal:4k")
    requests = generate_requests(4.0, 200_000, *lengths, 16_384, burstiness, rng())
    gaps = np.diff(requests.arrival_s)
    assert gaps.mean() == pytest.approx(0.25, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.03)
    assert (requests.prompt_tokens + requests.output_tokens).max() == 16_384
    assert min(requests.prompt_tokens.min(), requests.output_tokens.min()) >= 1


@pytest.mark.parametrize(("gamma", "acceptance"), [(1, 0.5), (4, 0.8), (7, 0.95)])
def test_rounds_yield_the_expected_tokens(gamma: int, acceptance: float) -> None:
    tokens = np.full(2000, 5000)
    rounds = draw_rounds(tokens, gamma, acceptance, rng())
    assert tokens.sum() / rounds.sum() == pytest.approx(tokens_per_round(acceptance, gamma), rel=0.01)
    assert rounds.std() > 0
    short = draw_rounds(np.arange(50), gamma, acceptance, rng())
    assert (short >= np.ceil(np.arange(50) / (gamma + 1))).all()
    assert (short <= np.arange(50)).all()


def test_drafts_that_are_never_or_always_accepted() -> None:
    tokens = np.arange(40)
    assert (draw_rounds(tokens, 3, 0.0, rng()) == tokens).all()
    assert (draw_rounds(tokens, 3, 1.0, rng()) == np.ceil(tokens / 4)).all()


def test_the_share_of_short_ends_is_that_of_rounds_drawn_one_by_one() -> None:
    """Two tokens with one draft: one round where it is accepted, else two."""
    rounds = draw_rounds(np.full(100_000, 2), 1, 0.3, rng())
    assert (rounds == 1).mean() == pytest.approx(0.3, abs=0.01)


def test_requests_at_another_rate_keep_their_pattern() -> None:
    requests = generate_requests(2.0, 1000, parse_lengths("100"), parse_lengths("10"), 1000, 0.5, rng())
    faster = requests.at_rate(8.0)
    assert faster.rate == pytest.approx(8.0)
    ratio = faster.arrival_s[1:] / requests.arrival_s[1:]
    assert ratio == pytest.approx(np.full(999, requests.rate / 8.0))
