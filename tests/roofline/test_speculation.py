"""Tokens per round, and acceptance as papers report it."""

import numpy as np
import pytest
import sympy

from ridgeplan.roofline.drafters import capped_cascade_tokens, cascade_tokens, pass_tokens
from ridgeplan.roofline.execution import MAX_GAMMA
from ridgeplan.roofline.round import conditional_acceptance, flush_capped, tokens_at, tokens_per_round


def simulated(acceptance, gamma, rounds=200_000):
    accepted = np.cumprod(np.random.default_rng(0).random((rounds, gamma)) < acceptance, axis=1)
    return 1 + accepted.sum(axis=1).mean()


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.93, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 4, 15])
def test_tokens_per_round_against_simulation(acceptance, gamma):
    assert tokens_per_round(acceptance, gamma) == pytest.approx(simulated(acceptance, gamma), rel=0.01)


def test_tokens_per_round_takes_arrays_and_symbols():
    alpha, gamma = sympy.symbols("alpha gamma", positive=True)
    formula = tokens_per_round(alpha, gamma)
    grid = tokens_per_round(np.array([0.5, 0.9]), np.array([3, 7]))
    assert [float(formula.subs({alpha: a, gamma: g})) for a, g in ((0.5, 3), (0.9, 7))] == pytest.approx(grid)


def test_quantspecs_own_acceptance_falls_with_gamma_at_constant_conditional_acceptance():
    """QuantSpec-6. Table 6, first block: 91.88% at gamma 1 and 77.07% at gamma 6 are one conditional acceptance."""
    assert conditional_acceptance(0.7707, 6) == pytest.approx(0.9188, abs=0.02)


@pytest.mark.parametrize(("acceptance", "gamma"), [(0.5, 4), (0.93, 6)])
def test_conditional_acceptance_against_simulation(acceptance, gamma):
    accepted = simulated(acceptance, gamma) - 1
    assert conditional_acceptance(accepted / gamma, gamma) == pytest.approx(acceptance, rel=0.01)


def test_rounds_that_end_at_boundaries_against_simulation():
    """5,000 groups of 128 tokens, each round cut where the group ends."""
    random = np.random.default_rng(0)
    rounds, acceptance, gamma = 0, 0.9, 4
    for _ in range(5000):
        tokens = 0
        while tokens < 128:
            tokens += 1 + int(np.cumprod(random.random(gamma) < acceptance).sum())
            rounds += 1
    capped = flush_capped(tokens_per_round(acceptance, gamma), 128)
    assert capped == pytest.approx(5000 * 128 / rounds, rel=0.003)


def test_a_flush_boundary_costs_half_a_rounds_gain_per_group():
    # rounds of exactly 5 tokens in groups of 128: 26 rounds per group instead of 25.6
    assert flush_capped(5.0, 128) == pytest.approx(128 / 26, rel=0.002)
    assert flush_capped(1.0, 128) == 1


@pytest.mark.parametrize(
    ("share", "gamma", "acceptance"),
    [(0.9, 1, 0.9), ((0.75 + 0.75**2) / 2, 2, 0.75), (0, 3, 0), (1, 6, 1)],
)
def test_conditional_acceptance_of_a_share(share, gamma, acceptance):
    assert conditional_acceptance(share, gamma) == pytest.approx(acceptance, abs=1e-7)


def test_conditional_acceptance_inverts_the_share():
    for gamma in range(1, MAX_GAMMA + 1):
        for acceptance in np.linspace(0.01, 0.99, 9):
            share = (tokens_per_round(acceptance, gamma) - 1) / gamma
            assert conditional_acceptance(share, gamma) == pytest.approx(acceptance)


def test_tokens_of_a_round_by_hand():
    assert tokens_at([0.5, 0.2, 0.9], 2) == pytest.approx(1 + 0.5 + 0.5 * 0.2)


@pytest.mark.parametrize(
    "acceptance, hit, proposal_acceptance, depth, passes, gamma",
    [(0.9, 0.6, 0.7, 4, 3, 15), (0.8, 1.0, 0.9, 3, 2, 5), (0.95, 0.2, 0.5, 2, 4, 6)],
)
def test_tokens_of_a_cascade_are_those_of_simulated_rounds(acceptance, hit, proposal_acceptance, depth, passes, gamma):
    generator, rounds = np.random.default_rng(1), 50_000
    drafts = np.zeros(rounds, dtype=int)
    for _ in range(passes):
        accepted = (generator.random((rounds, depth)) < proposal_acceptance).cumprod(1).sum(1)
        drafts += 1 + accepted * (generator.random(rounds) < hit)
    judged = np.arange(gamma) < np.minimum(drafts, gamma)[:, None]
    tokens = 1 + ((generator.random((rounds, gamma)) < acceptance) & judged).cumprod(1).sum(1)
    terms = acceptance, hit, proposal_acceptance, depth, passes
    assert capped_cascade_tokens(*terms, gamma) == pytest.approx(tokens.mean(), rel=0.01)
    uncapped = capped_cascade_tokens(*terms, passes * (depth + 1))
    assert cascade_tokens(*terms) == pytest.approx(uncapped)
    symbols = sympy.symbols("a h b", positive=True)
    formula = cascade_tokens(*symbols, depth, passes)
    assert float(formula.subs(dict(zip(symbols, terms, strict=False)))) == pytest.approx(float(uncapped))


def test_a_cascade_has_simpler_rounds_as_its_ends():
    # Without proposals it is Leviathan's round, and with a target that accepts all drafts it has all of them.
    assert capped_cascade_tokens(0.8, 0.0, 0.5, 3, 4, 4) == pytest.approx(tokens_per_round(0.8, 4))
    assert cascade_tokens(1.0, 0.5, 0.6, 3, 4) == pytest.approx(1 + 4 * pass_tokens(0.5, 0.6, 3))
    assert pass_tokens(1.0, 0.6, 3) == pytest.approx(tokens_per_round(0.6, 3))
    # Many plans at once.
    grid = capped_cascade_tokens(np.array([0.8, 0.9]), 0.3, 0.5, np.array([[2], [4]]), 2, 6)
    assert grid.shape == (2, 2)
    assert grid[1, 0] == pytest.approx(float(capped_cascade_tokens(0.8, 0.3, 0.5, 4, 2, 6)))
