"""Distributions, draws and acceptance at unit level."""

import pytest
import torch
from scipy import stats

from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.sampling import Sampling, draw, judge

VOCAB = 6


def one_hot(tokens, vocab=VOCAB):
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float()


def random_distributions(*shape, seed, sharpness=1.5):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * sharpness).softmax(-1)


def chi_square(counts, weights):
    """p-value of counts under the distribution that weights are proportional to."""
    expected = weights.double() / weights.double().sum() * counts.sum()
    return stats.chisquare(counts.numpy(), expected.numpy()).pvalue


def test_greedy_probabilities_hold_one_token():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, -2.0]])
    assert Sampling().probabilities(logits).tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_temperature_divides_logits(temperature):
    logits = torch.tensor([1.0, 3.0, 2.0])
    expected = (logits / temperature).softmax(-1)
    assert torch.allclose(Sampling(temperature).probabilities(logits), expected)


@pytest.mark.parametrize("top_k, kept", [(1, [1]), (2, [1, 2]), (3, [0, 1, 2]), (9, [0, 1, 2, 3])])
def test_top_k_keeps_the_likeliest(top_k, kept):
    probabilities = Sampling(1.0, top_k=top_k).probabilities(torch.tensor([1.0, 3.0, 2.0, 0.0]))
    assert probabilities.nonzero().flatten().tolist() == kept
    assert probabilities.sum() == pytest.approx(1)


@pytest.mark.parametrize("top_p, kept", [(0.01, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_of_that_mass(top_p, kept):
    distribution = torch.tensor([0.1995, 0.5, 0.3, 5e-4])
    probabilities = Sampling(1.0, top_p=top_p).probabilities(distribution.log())
    assert (probabilities > 0).sum() == kept
    assert probabilities.sum() == pytest.approx(1)
    assert probabilities.argmax() == 1


@pytest.mark.parametrize(
    "values, message",
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": float("nan")}, "top_p is nan"),
    ],
)
def test_sampling_refuses_what_it_cannot_mean(values, message):
    with pytest.raises(WorkloadError, match=message) as caught:
        Sampling(**values)
    assert "allowed" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_draw_inverts_the_cumulative_distribution():
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0])
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights.expand(5, -1), uniform).tolist() == [1, 1, 3, 3, 3]


def test_draw_follows_unnormalized_weights():
    weights = torch.tensor([1.0, 0.0, 2.0, 5.0, 0.5])
    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = draw(weights.expand(len(uniform), -1), uniform).bincount(minlength=5)
    kept = weights > 0
    assert counts[~kept].sum() == 0
    assert counts.sum() == len(uniform)
    assert chi_square(counts[kept], weights[kept]) > 1e-3


def greedy_verdict(target, drafted, room):
    gamma = len(drafted)
    drafts = torch.tensor([drafted], dtype=torch.long).view(1, gamma)
    q = one_hot(drafted).view(1, gamma, VOCAB) if drafted else torch.zeros(1, 0, VOCAB)
    uniform = torch.full((1, gamma + 1), 1 - 2**-53, dtype=torch.float64)
    verdict = judge(one_hot(target)[None], q, drafts, torch.tensor([room], dtype=torch.int32), uniform)
    kept = int(verdict.advance)
    return verdict.tokens[0, :kept].tolist(), int(verdict.accepted), int(verdict.judged)


@pytest.mark.parametrize(
    "target, drafted, room, expected",
    [
        ([1, 2, 3, 4], [1, 2, 3], 9, ([1, 2, 3, 4], 3, 3)),  # all accepted: one more from the target
        ([1, 2, 3, 4], [1, 2, 3], 4, ([1, 2, 3, 4], 3, 3)),  # which may just fit
        ([1, 2, 3, 4], [1, 2, 3], 3, ([1, 2, 3], 3, 3)),  # or not: the round ends at the boundary
        ([1, 2, 3, 4], [1, 2, 3], 2, ([1, 2], 2, 2)),
        ([1, 2, 3, 4], [1, 2, 3], 1, ([1], 1, 1)),
        ([1, 2, 3, 4], [1, 5, 3], 9, ([1, 2], 1, 2)),  # a rejected draft is replaced by the target's token
        ([1, 2, 3, 4], [5, 2, 3], 9, ([1], 0, 1)),
        ([1, 2, 3, 4], [1, 2, 5], 3, ([1, 2, 3], 2, 3)),
        ([1, 2, 3, 4], [1, 2, 5], 2, ([1, 2], 2, 2)),  # a wrong draft beyond the boundary is never judged
        ([1, 2, 3, 4], [5, 2, 3], 1, ([1], 0, 1)),
        ([4], [], 1, ([4], 0, 0)),  # plain decoding
        ([4], [], 9, ([4], 0, 0)),
    ],
)
def test_greedy_verdicts(target, drafted, room, expected):
    assert greedy_verdict(target, drafted, room) == expected


def test_rows_are_judged_independently():
    target = one_hot([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    drafted = torch.tensor([[1, 2], [0, 2], [1, 2]])
    room = torch.tensor([9, 9, 1], dtype=torch.int32)
    verdict = judge(target, one_hot(drafted.tolist()), drafted, room, torch.full((3, 3), 0.5).double())
    assert verdict.advance.tolist() == [3, 1, 1]
    assert verdict.accepted.tolist() == [2, 0, 1]
    assert verdict.judged.tolist() == [2, 1, 1]


@pytest.mark.parametrize("room", [1, 2, 3, 9])
def test_tokens_of_a_round_follow_the_target_whatever_the_draft(room):
    rows, gamma = 40_000, 2
    target, draft = random_distributions(gamma + 1, VOCAB, seed=1), random_distributions(gamma, VOCAB, seed=2)
    generator = torch.Generator().manual_seed(3)
    uniform = torch.rand(2, rows, gamma + 1, generator=generator, dtype=torch.float64)
    drafted = draw(draft.expand(rows, -1, -1), uniform[0, :, :gamma])
    verdict = judge(
        target.expand(rows, -1, -1),
        draft.expand(rows, -1, -1),
        drafted,
        torch.full((rows,), room, dtype=torch.int32),
        uniform[1],
    )
    for position in range(min(room, gamma + 1)):
        # Every position follows its own target distribution, given that the round reached it.
        tokens = verdict.tokens[verdict.advance > position, position]
        assert chi_square(tokens.bincount(minlength=VOCAB), target[position]) > 1e-3
    overlap = torch.minimum(target[0], draft[0]).sum()
    assert (verdict.accepted > 0).float().mean() == pytest.approx(float(overlap), abs=0.01)


def test_a_rejection_by_rounding_alone_draws_from_the_target():
    # Draft and target are one distribution but for the last bit, so (p - q)+ has no mass to draw from.
    draft = one_hot([2])[:, None]
    target = torch.cat([draft * (1 - 2**-24), one_hot([4])[:, None]], dim=1)
    uniform = torch.tensor([[1 - 2**-26, 0.5]], dtype=torch.float64)
    verdict = judge(target, draft, torch.tensor([[2]]), torch.tensor([9]), uniform)
    assert (verdict.advance.item(), verdict.accepted.item()) == (1, 0)
    assert verdict.tokens[0, 0] == 2
