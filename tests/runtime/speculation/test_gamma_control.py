"""Adaptive gamma, by simulation: drafts are accepted with known probabilities, or as an adversary likes."""

import random
from collections import Counter, deque
from functools import partial
from itertools import cycle, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeplan.roofline.execution import RUNNING_LOSS, STARTING_LOSS, RoundShape, round_shape
from ridgeplan.roofline.round import RoundCosts, tokens_at, tokens_of
from ridgeplan.runtime.speculation.gamma_control import (
    HYSTERESIS,
    AdaptiveGamma,
    Evidence,
    FixedGamma,
    LossBudget,
    chosen_gamma,
)
from ridgeplan.runtime.speculation.speculator import NOTHING, RowResult

GAMMAS = (0, 1, 2, 4, 6)
LATE = 2  # rounds in flight on a GPU
PLAIN_S = 0.005


def costs_of(draft=0.35, query=0.02, acceptance=0.9, gammas=GAMMAS):
    """Rounds whose drafts cost `draft` plain steps, and each more query of the target `query`."""
    return RoundCosts({gamma: PLAIN_S * (1 + gamma * (draft + query)) for gamma in gammas}, acceptance)


def row(accepted, gamma):
    return RowResult([0] * (accepted + 1), accepted, min(accepted + 1, gamma))


def simulate(costs, new_tokens, accepted_of, depth=LATE, batch=1, row_of=row):
    """Seconds, tokens of a sequence, and rounds by gamma; accepted_of(token, gamma) says what a round accepts."""
    schedule, flight, used = AdaptiveGamma(costs, new_tokens), deque(), Counter()
    seconds, tokens = 0.0, 0.0
    while tokens < new_tokens:
        while len(flight) < depth:
            flight.append(schedule.next())
        gamma = flight.popleft()
        rows = [row_of(accepted_of(int(tokens), gamma), gamma) for _ in range(batch)]
        seconds += costs.seconds[gamma]
        tokens += sum(len(row.tokens) for row in rows) / batch
        used[gamma] += 1
        schedule.add(gamma, rows)
    return seconds, tokens, used


def drawn(acceptance_at, seed=0):
    """Drafts that are accepted with these conditional probabilities by position."""
    generator = random.Random(seed)

    def accepted(token, gamma):
        count = 0
        while count < gamma and generator.random() < acceptance_at[count]:
            count += 1
        return count

    return accepted


def fastest(costs, acceptance_at):
    """The gamma with the most tokens per second, and its seconds per token."""
    paces = {gamma: seconds / tokens_at(acceptance_at, gamma) for gamma, seconds in costs.seconds.items()}
    gamma = min(paces, key=paces.__getitem__)
    return gamma, paces[gamma]


@pytest.mark.parametrize("predicted", [0.3, 0.9])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    "acceptance_at, draft",
    [
        ([0.0] * 6, 0.35),
        ([0.2] * 6, 0.35),
        ([0.6] * 6, 0.35),
        ([0.8] * 6, 0.35),
        ([0.9] * 6, 0.35),
        ([0.97] * 6, 0.35),
        ([0.7] * 6, 0.1),
        ([0.95, 0.9, 0.1, 0.1, 0.1, 0.1], 0.2),  # a selection that is stale after two tokens
    ],
    ids=lambda value: str(value),
)
def test_it_finds_the_best_gamma(acceptance_at, draft, predicted, batch):
    """Within the gap between neighbours and what learning costs, whatever was predicted."""
    costs = costs_of(draft, acceptance=predicted)
    best, pace_s = fastest(costs, acceptance_at)
    seconds, tokens, used = simulate(costs, 4000, drawn(acceptance_at), batch=batch)
    assert seconds / tokens < 1.035 * pace_s
    if best == 0:
        assert used[0] > 0.9 * used.total()
    common = used.most_common(1)[0][0]
    assert costs.seconds[common] / tokens_at(acceptance_at, common) < 1.035 * pace_s


def test_it_follows_a_text_that_changes():
    costs = costs_of()
    good, bad = drawn([0.95] * 6), drawn([0.05] * 6)
    seconds, tokens, used = simulate(
        costs, 8000, lambda token, gamma: (bad if token // 2000 % 2 else good)(token, gamma)
    )
    halves_s = fastest(costs, [0.95] * 6)[1], fastest(costs, [0.05] * 6)[1]
    assert seconds / tokens < 1.06 * sum(halves_s) / 2
    assert used[6] > 400
    assert used[0] > 3500


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=60),
    st.integers(1, 2000),
    st.floats(0.02, 1.0),
    st.floats(0.0, 0.2),
    st.floats(0.05, 0.99),
    st.integers(1, 3),
)
def test_no_text_makes_it_lose_more_than_it_may(pattern, new_tokens, draft, query, predicted, depth):
    """Acceptances in any order, repeated for as long as it takes."""
    costs, rounds = costs_of(draft, query, predicted), iter(range(1 << 30))
    seconds, tokens, _ = simulate(
        costs, new_tokens, lambda token, gamma: min(gamma, pattern[next(rounds) % len(pattern)]), depth
    )
    # Rounds in flight at the end had been granted what a plain step may lose.
    granted_s = RUNNING_LOSS * PLAIN_S * depth
    assert seconds <= (1 + RUNNING_LOSS) * tokens * PLAIN_S + STARTING_LOSS * new_tokens * PLAIN_S + granted_s + 1e-9


@settings(deadline=None)
@given(st.integers(50, 3000), st.floats(0.02, 1.0), st.integers(0, 1 << 30))
def test_an_adversary_who_sees_gamma_gains_nothing(new_tokens, draft, seed):
    """It accepts all while little is drafted, and nothing once much is."""
    costs, generator = costs_of(draft), random.Random(seed)

    def spiteful(token, gamma):
        return 0 if gamma > 1 or generator.random() < 0.3 else gamma

    seconds, tokens, _ = simulate(costs, new_tokens, spiteful)
    assert seconds <= 1.03 * max(tokens, new_tokens) * PLAIN_S


def test_probes_become_rare_where_drafts_are_never_accepted():
    """After 16, 32, 64 and then 128 plain steps."""
    _, _, used = simulate(costs_of(acceptance=0.05), 128 * 20, lambda token, gamma: 0)
    assert used[1] <= 24
    assert used[2] == used[4] == used[6] == 0


def test_a_gamma_is_kept_unless_another_is_faster_beyond_noise():
    speeds = {0: 1.0, 2: 1.3, 4: 1.3 * (1 + 0.9 * HYSTERESIS)}
    assert chosen_gamma(speeds, 2) == 2
    assert chosen_gamma(speeds, 4) == 4
    assert chosen_gamma(speeds | {4: 1.3 * (1 + 1.1 * HYSTERESIS)}, 2) == 4
    assert chosen_gamma({0: 1.0, 2: 0.99, 4: 0.9}, 2) == 0  # one that loses is left at once
    assert chosen_gamma({0: 1.0, 2: 1.0 + 0.9 * HYSTERESIS}, 0) == 0


def test_it_does_not_swing_between_gammas_that_are_as_good():
    """Two and four drafts are as fast where these are accepted so often."""
    acceptance_at = [0.827] * 6
    costs = costs_of(0.33, 0.02)
    two, four = (costs.seconds[gamma] / tokens_at(acceptance_at, gamma) for gamma in (2, 4))
    assert two == pytest.approx(four, rel=0.001)
    schedule, accepted, chosen = AdaptiveGamma(costs, 10_000), drawn(acceptance_at), []
    for _ in range(2000):
        gamma = schedule.next()
        schedule.add(gamma, [row(accepted(0, gamma), gamma)])
        chosen.append(schedule.gamma)
    changes = sum(before != after for before, after in pairwise(chosen))
    assert changes < 2000 / 20


def test_evidence_is_counted_by_position_and_shared_by_rows():
    evidence = Evidence.none(3).add([row(2, 3), row(0, 3), RowResult([1], 0, 0)], memory=32)
    assert evidence.verified == (2, 1, 1)
    assert evidence.accepted == (1, 1, 0)
    later = evidence.add([row(3, 3)], memory=4)  # earlier rounds keep three quarters
    assert later.verified == (2.5, 1.75, 1.75)
    assert later.accepted == (1.75, 1.75, 1)


def test_untried_positions_are_expected_to_do_as_the_one_before():
    evidence = Evidence((98.0, 0.0, 0.0), (49.0, 0.0, 0.0)).acceptance_at(0.5)
    assert evidence == [0.5, 0.5, 0.5]
    # 8 of 10, and two drafts' worth of what was expected: (8 + 2 x 0.5) / 12.
    assert Evidence((10.0,), (8.0,)).acceptance_at(0.5) == [0.75]


def test_old_evidence_fades_without_changing_what_it_says():
    evidence = Evidence((40.0, 4.0), (30.0, 1.0)).faded(8)
    assert evidence.verified == (8.0, 4.0)
    assert evidence.accepted == (6.0, 1.0)


def test_it_is_a_function_of_what_was_accepted():
    runs = [simulate(costs_of(), 500, drawn([0.8] * 6, seed=3)) for _ in range(2)]
    assert runs[0] == runs[1]


def test_rows_that_have_ended_say_nothing():
    first, second = AdaptiveGamma(costs_of(), 500), AdaptiveGamma(costs_of(), 500)
    for schedule, rows in ((first, [row(0, 4), NOTHING, NOTHING]), (second, [row(0, 4)])):
        for _ in range(5):
            schedule.add(schedule.next(), rows)
    assert first.gamma == second.gamma
    assert [first.next() for _ in range(30)] == [second.next() for _ in range(30)]


def test_a_fixed_gamma_stays():
    schedule = FixedGamma(3)
    schedule.add(3, [row(0, 3)])
    assert schedule.next() == 3


def test_gains_are_saved_for_four_of_the_worst_rounds():
    """Whatever a good text has gained, a bad one after it loses no more than that."""
    costs = costs_of()
    budget = LossBudget.of(costs, 1000)
    worst_s = costs.seconds[6] - PLAIN_S
    assert budget.left_s == pytest.approx(min(STARTING_LOSS * 1000 * PLAIN_S, 4 * worst_s))
    for _ in range(100):
        budget = budget.launch(costs.seconds[6]).collect(7)
    assert budget.left_s == pytest.approx(4 * worst_s)
    launched = 0
    while budget.allows(costs.seconds[6]):
        budget, launched = budget.launch(costs.seconds[6]), launched + 1
    assert launched == 4


# Of a plan with a drafter: plain, self-drafts, proposals to the target, and cascades, with their costs in plain steps.
TIERS = {0: 1.0, 2: 1.7, 4: 2.4, RoundShape(4, 0, 4): 1.15, RoundShape(5, 1, 4): 1.5, RoundShape(8, 2, 4): 2.0}


def tier_row(outcome, kind, free):
    """A round of any tier. outcome: proposals before it, how many of them match the text, and accepted drafts."""
    proposals, matched, accepted = outcome
    shape = round_shape(kind)
    accepted = min(accepted, proposals if shape.proposes_to_target else shape.gamma)
    verified, matched = min(accepted + 1, shape.gamma), min(matched, proposals)
    if not (free or shape.depth):
        return RowResult([0] * (accepted + 1), accepted, verified, True, shape.gamma)
    return RowResult(
        [0] * (accepted + 1), accepted, verified, True, shape.gamma, proposals, min(matched + 1, proposals), matched
    )


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 8)), min_size=1, max_size=60),
    st.integers(50, 2000),
    st.tuples(*[st.floats(0.02, 0.99)] * 3),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_no_text_makes_any_tier_lose_more_than_it_may(pattern, new_tokens, predicted, free, depth, batch):
    """Outcomes of every tier in any order, whatever was predicted of them: 3% at most."""
    costs = RoundCosts({kind: PLAIN_S * cost for kind, cost in TIERS.items()}, *predicted, always_proposed=free)
    outcomes = cycle(pattern)
    seconds, tokens, _ = simulate(
        costs, new_tokens, lambda token, kind: next(outcomes), depth, batch, partial(tier_row, free=free)
    )
    granted_s = RUNNING_LOSS * PLAIN_S * depth
    assert seconds <= (1 + RUNNING_LOSS) * tokens * PLAIN_S + STARTING_LOSS * new_tokens * PLAIN_S + granted_s + 1e-9


@settings(deadline=None, max_examples=25)
@given(st.tuples(*[st.floats(0.0, 0.3)] * 3), st.tuples(*[st.floats(0.02, 0.99)] * 3), st.booleans(), st.integers(1, 2))
def test_tiers_lose_3_percent_at_most_on_random_tokens(chances, predicted, free, batch):
    """Few proposals, of which few match, and self-drafts that are seldom accepted."""
    costs = RoundCosts({kind: PLAIN_S * cost for kind, cost in TIERS.items()}, *predicted, always_proposed=free)
    generator = random.Random(0)

    def count(limit, chance):
        return next((n for n in range(limit) if generator.random() >= chance), limit)

    def outcome(token, kind):
        proposals = 4 * (generator.random() < chances[0])
        matched = count(proposals, chances[1])
        to_target = round_shape(kind).proposes_to_target
        return proposals, matched, matched if to_target else count(8, chances[2])

    seconds, tokens, _ = simulate(costs, 1000, outcome, batch=batch, row_of=partial(tier_row, free=free))
    assert seconds <= 1.03 * tokens * PLAIN_S


@pytest.mark.parametrize(
    "hit, proposed, drafted, best, free",
    [
        (0.6, 0.8, 0.97, RoundShape(8, 2, 4), True),
        (0.02, 0.1, 0.95, 4, True),
        (0.0, 0.0, 0.05, 0, True),
        (0.6, 0.8, 0.2, RoundShape(4, 0, 4), True),
        (1.0, 0.8, 0.2, RoundShape(4, 0, 4), False),
        (1.0, 0.05, 0.95, 4, False),
        (1.0, 0.05, 0.05, 0, False),
    ],
    ids=["cascade", "self-drafts", "plain", "to the target", "a head", "self-drafts, not a head", "plain, not a head"],
)
def test_it_finds_the_tiers_that_draft_best(hit, proposed, drafted, best, free):
    """Of two sequences; and where nothing pays it loses 3% at most.

    A lookup's proposals are told after every round, those of a head only after rounds that used them.
    """
    expected = {"hit": 0.3 if free else 1.0, "proposal_acceptance": 0.5, "always_proposed": free}
    costs = RoundCosts({kind: PLAIN_S * cost for kind, cost in TIERS.items()}, 0.8, **expected)
    schedule, generator, used, seconds, tokens = AdaptiveGamma(costs, 4000), random.Random(0), Counter(), 0.0, 0.0

    def count(limit, acceptance):
        return next((n for n in range(limit) if generator.random() >= acceptance), limit)

    def played(shape):
        """A sequence's round: proposals before it, drafts of its passes, and what the target accepts of them."""
        proposals = 4 * (generator.random() < hit)
        matched = count(proposals, proposed)
        passes = [1 + count(4 * (generator.random() < hit), proposed) * (shape.depth > 0) for _ in range(shape.passes)]
        drafts = min(sum(passes), shape.gamma)
        accepted = min(matched, shape.gamma) if shape.proposes_to_target else count(drafts, drafted)
        verified = min(accepted + 1, proposals if shape.proposes_to_target else drafts)
        kept = min(matched, accepted)  # of the proposals, as far as the text went on
        compared = min(kept + 1, proposals, accepted + 1)
        if not (free or shape.depth):
            return RowResult([0] * (accepted + 1), accepted, verified, True, drafts)
        return RowResult(
            [0] * (accepted + 1), accepted, verified, True, drafts, proposals, compared, min(kept, compared)
        )

    while tokens < 4000:
        kind = schedule.next()
        rows = [played(round_shape(kind)) for _ in range(2)]
        schedule.add(kind, rows)
        used[kind], seconds = used[kind] + 1, seconds + costs.seconds[kind]
        tokens += sum(len(row.tokens) for row in rows) / 2
    fastest_s = min(s / tokens_of(kind, [drafted] * 8, hit, proposed) for kind, s in costs.seconds.items())
    assert used.most_common(1)[0][0] == best
    assert seconds / tokens < 1.05 * fastest_s
    if best == 0:
        assert seconds < 1.03 * tokens * PLAIN_S


@pytest.mark.parametrize("free", [True, False], ids=["suffix", "a head"])
def test_probes_find_self_drafts_again_though_a_drafters_rounds_are_cheaper(free):
    """Drafts of the first 60 tokens are rejected, those after them accepted; no proposal ever matches."""
    costs = RoundCosts({kind: PLAIN_S * cost for kind, cost in TIERS.items()}, 0.9, always_proposed=free)
    schedule, tokens, used = AdaptiveGamma(costs, 4000), 0, Counter()
    while tokens < 4000:
        kind = schedule.next()
        shape = round_shape(kind)
        accepted = shape.passes if tokens >= 60 else 0  # a pass without proposals drafts one token
        schedule.add(kind, [RowResult([0] * (accepted + 1), accepted, min(accepted + 1, shape.passes))])
        tokens, used[kind] = tokens + accepted + 1, used[kind] + 1
    assert used.most_common(1)[0][0] == 4
