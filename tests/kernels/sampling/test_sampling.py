"""Filtering, draws and speculative acceptance: references against plain definitions, kernels against references."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from ridgeplan.kernels.sampling import (
    draw,
    filter_logits,
    rejection_sample,
    row_uniform,
    softmax_distribution,
    triton,
)
from ridgeplan.kernels.sampling.reference import Distribution, Greedy, StoredDistribution, nucleus

VOCAB = 6
BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])
FILTERS = pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, None), (0.7, 5, None), (1.3, None, 0.8), (0.8, 9, 0.7), (1.0, 10_000, 1.0), (1.0, 1, None)],
)
pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rows of few tokens have several chunks."""
    for name in ("ARGMAX_CHUNK", "SOFTMAX_CHUNK", "REJECTION_CHUNK"):
        monkeypatch.setattr(triton, name, 64)


def random_logits(*shape: int, seed: int, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_uniform(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_hot(tokens: Tensor) -> Distribution:
    """Certain of each token, as any temperature above 0 is of such logits."""
    return softmax_distribution(1e4 * torch.nn.functional.one_hot(tokens, VOCAB).float(), 1.0)


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """p-value of counts under probabilities."""
    expected = probabilities.double() / probabilities.double().sum() * counts.sum()
    return float(stats.chisquare(counts.numpy(), expected.numpy()).pvalue)


def reference(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Filtered probabilities of one row by the definition, in Python's floats."""
    weights = (logits.double() / temperature).softmax(-1)
    order = weights.argsort(descending=True).tolist()[:top_k]
    total, kept, mass = sum(weights[token].item() for token in order), [], 0.0
    for token in order:
        if top_p is not None and mass >= top_p * total:
            break
        kept.append(token)
        mass += weights[token].item()
    expected = torch.zeros_like(weights)
    expected[kept] = weights[kept] / mass
    return expected.float()


@BACKENDS
@FILTERS
@pytest.mark.parametrize("vocab", [6, 64, 203])
def test_filters_keep_what_they_say(
    vocab: int, temperature: float, top_k: int | None, top_p: float | None, backend: str, device: str
) -> None:
    logits = random_logits(3, 2, vocab, seed=vocab)
    choice = filter_logits(logits.to(device), temperature, top_k, top_p, backend=backend)
    expected = torch.stack([reference(row, temperature, top_k, top_p) for row in logits.flatten(0, 1)])
    torch.testing.assert_close(choice.probabilities().cpu().flatten(0, 1), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@BACKENDS
def test_logits_stay_in_their_type(dtype: torch.dtype, backend: str, device: str) -> None:
    logits = random_logits(2, 100, seed=0).to(device, dtype)
    choice = filter_logits(logits, 0.9, backend=backend)
    assert choice.logits.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(choice.probabilities(), (logits.float() / 0.9).softmax(-1))


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_of_that_mass(top_p: float, kept: int) -> None:
    probabilities = filter_logits(torch.tensor([0.1995, 0.5, 0.3, 5e-4]).log(), 1.0, None, top_p).probabilities()
    assert (probabilities > 0).sum() == kept
    assert probabilities.sum() == pytest.approx(1)
    assert probabilities.argmax() == 1


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.5 + 2**-20, 2), (0.75, 2), (0.75 + 2**-20, 4)])
def test_a_set_whose_mass_is_just_top_p_is_enough(top_p: float, kept: int) -> None:
    """Probabilities 1/2, 1/4, 1/8 and 1/8, whose sums are exact; the last two are equally likely."""
    table = torch.tensor([0.125, 0.5, 0.25, 0.125])
    distribution = StoredDistribution(
        table.log2(), math.log2(math.e), torch.tensor(-1.0), torch.tensor(-torch.inf), torch.tensor(2.0), table
    )
    assert (nucleus(distribution, top_p).probabilities() > 0).sum() == kept


@FILTERS
def test_peak_cutoff_and_mass_describe_the_distribution(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    """By the formula of `Distribution`, which kernels compute with."""
    choice = filter_logits(random_logits(3, 40, seed=2), temperature, top_k, top_p)
    assert isinstance(choice, Distribution)
    by_formula = Distribution(choice.logits, choice.temperature, choice.peak, choice.cutoff, choice.mass)
    torch.testing.assert_close(by_formula.probabilities(), choice.probabilities())


@BACKENDS
def test_a_uniform_number_that_was_rounded_up_to_one_draws_the_last_token(backend: str, device: str) -> None:
    """As one of float32 may be; tokens after the last with probability are not drawn."""
    logits = torch.full((1, 200), -torch.inf, device=device)
    logits[0, [3, 120]] = 0.0
    uniform = torch.ones(1, dtype=torch.float64, device=device)
    assert draw(softmax_distribution(logits, 1.0, backend=backend), uniform, backend=backend).tolist() == [120]


@pytest.mark.parametrize(("top_k", "top_p"), [(2, None), (None, 0.7), (2, 0.7)])
def test_tokens_as_likely_as_the_last_kept_one_are_kept(top_k: int | None, top_p: float | None) -> None:
    probabilities = filter_logits(torch.tensor([1.0, 2.0, -1.0, 1.0, 1.0]), 1.0, top_k, top_p).probabilities()
    assert (probabilities > 0).tolist() == [True, True, False, True, True]


@BACKENDS
def test_greedy_takes_the_first_of_equal_maxima(backend: str, device: str) -> None:
    logits = torch.full((3, 203), -1.0, device=device)
    for row, tokens in enumerate([[70, 71], [202], [0, 64, 202]]):
        logits[row, tokens] = 3.0
    choice = filter_logits(logits, 0, backend=backend)
    assert isinstance(choice, Greedy)
    assert draw(choice, random_uniform(3, seed=0).to(device), backend=backend).tolist() == [70, 202, 0]


@BACKENDS
def test_draw_inverts_the_cumulative_distribution(backend: str, device: str) -> None:
    logits = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0]).log().expand(5, -1)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.5, 1 - 2**-53], dtype=torch.float64, device=device)
    choice = softmax_distribution(logits.to(device).contiguous(), 1.0, backend=backend)
    assert draw(choice, uniform, backend=backend).tolist() == [1, 1, 3, 3, 3]


@BACKENDS
def test_no_token_without_probability_is_drawn(backend: str, device: str) -> None:
    """At the edges of chunks, of the kept set, and at both ends of the uniform numbers."""
    logits = torch.full((4, 200), -torch.inf)
    for row, kept in enumerate([[0], [63, 64], [127, 199], [150]]):
        logits[row, kept] = 2.0
    for value in (0.0, 0.5, 0.5 - 2**-53, 1 - 2**-53):
        uniform = torch.full((4,), value, dtype=torch.float64, device=device)
        tokens = draw(softmax_distribution(logits.to(device), 1.0, backend=backend), uniform, backend=backend)
        assert logits.gather(1, tokens.cpu()[:, None]).isfinite().all()


@BACKENDS
def test_rare_tokens_keep_their_share(backend: str, device: str) -> None:
    """A token of probability 2^-40 is drawn by exactly the uniform numbers that fall on it."""
    logits = torch.zeros(3, 100)
    logits[:, 50:] = -torch.inf
    logits[:, 25] = torch.tensor(50 * 2.0**-40).log()
    below = 25 / 49
    uniform = torch.tensor([below - 2**-40, below, below + 2**-39], dtype=torch.float64, device=device)
    tokens = draw(softmax_distribution(logits.to(device), 1.0, backend=backend), uniform, backend=backend)
    assert tokens.tolist() == [24, 25, 26]


def test_draws_follow_the_distribution(device: str) -> None:
    rows = 20_000
    logits = random_logits(12, seed=4).expand(rows, -1).contiguous()
    choice = filter_logits(logits.to(device), 0.8, 9, 0.9)
    tokens = draw(choice, random_uniform(rows, seed=1).to(device), backend="reference").cpu()
    probabilities = choice.probabilities()[0].cpu()
    counts, kept = tokens.bincount(minlength=12), probabilities > 0
    assert counts[~kept].sum() == 0
    assert 2 < kept.sum() < 9
    assert chi_square(counts[kept], probabilities[kept]) > 1e-3


def test_the_kernel_draws_what_the_reference_draws(device: str) -> None:
    """In a row of three chunks, the last of which is not full, whose numbers fall on many tokens of each."""
    logits = random_logits(1, 150, seed=4, spread=1.0).expand(24, -1).contiguous()
    choice = filter_logits(logits.to(device), 0.8, 120, 0.99)
    uniform = torch.linspace(0, 1 - 2**-53, 24, dtype=torch.float64, device=device)
    expected, tokens = (draw(choice, uniform, backend=backend) for backend in ("reference", "triton"))
    assert torch.equal(tokens, expected)
    assert len(tokens.unique()) > 15 and set((tokens // 64).tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("target", "drafted", "max_tokens", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3], 9, ([1, 2, 3, 4], 3, 3)),  # all accepted: one more from the target
        ([1, 2, 3, 4], [1, 2, 3], 4, ([1, 2, 3, 4], 3, 3)),  # which just reaches max_tokens
        ([1, 2, 3, 4], [1, 2, 3], 3, ([1, 2, 3], 3, 3)),  # or not: the round ends at the boundary
        ([1, 2, 3, 4], [1, 2, 3], 2, ([1, 2], 2, 2)),
        ([1, 2, 3, 4], [1, 2, 3], 1, ([1], 1, 1)),
        ([1, 2, 3, 4], [1, 5, 3], 9, ([1, 2], 1, 2)),  # a rejected draft is replaced by the target's token
        ([1, 2, 3, 4], [5, 2, 3], 9, ([1], 0, 1)),
        ([1, 2, 3, 4], [1, 2, 5], 3, ([1, 2, 3], 2, 3)),
        ([1, 2, 3, 4], [1, 2, 5], 2, ([1, 2], 2, 2)),  # a wrong draft beyond the boundary is not compared
        ([1, 2, 3, 4], [5, 2, 3], 1, ([1], 0, 1)),
        ([4], [], 1, ([4], 0, 0)),  # plain decoding
        ([4], [], 9, ([4], 0, 0)),
    ],
)
@BACKENDS
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_verification_of_certain_rows(
    target: list[int],
    drafted: list[int],
    max_tokens: int,
    expected: tuple[list[int], int, int],
    kind: str,
    backend: str,
    device: str,
) -> None:
    certain = one_hot if kind == "sampled" else Greedy
    drafts = torch.tensor([drafted], dtype=torch.int64, device=device).view(1, -1)
    result = rejection_sample(
        certain(torch.tensor([target], device=device)),
        [certain(token) for token in drafts.unbind(1)],
        drafts,
        torch.tensor([max_tokens], dtype=torch.int32, device=device),
        torch.full((1, len(target)), 1 - 2**-53, dtype=torch.float64, device=device),
        backend=backend,
    )
    kept = int(result.advance)
    assert (result.tokens[0, :kept].tolist(), int(result.accepted), int(result.verified)) == expected


@BACKENDS
def test_rows_are_verified_independently(backend: str, device: str) -> None:
    drafted = torch.tensor([[1, 2], [0, 2], [1, 2]], device=device)
    result = rejection_sample(
        one_hot(torch.tensor([[1, 2, 3]] * 3, device=device)),
        [one_hot(tokens) for tokens in drafted.unbind(1)],
        drafted,
        torch.tensor([9, 9, 1], dtype=torch.int32, device=device),
        torch.full((3, 3), 0.5, dtype=torch.float64, device=device),
        backend=backend,
    )
    assert result.advance.tolist() == [3, 1, 1]
    assert result.accepted.tolist() == [2, 0, 1]
    assert result.verified.tolist() == [2, 1, 1]


@pytest.mark.parametrize(
    ("vocab", "gamma", "temperature", "top_k", "top_p"),
    [
        (6, 1, 1.0, None, None),
        (6, 1, 0.8, 9, 0.7),
        (130, 0, 0.7, 5, None),
        (130, 0, 1.0, 10_000, 1.0),
        (130, 3, 1.0, None, None),
        (130, 3, 1.3, None, 0.8),
        (130, 3, 1.0, 1, None),
    ],
)
def test_the_kernels_verify_as_the_reference(
    vocab: int, gamma: int, temperature: float, top_k: int | None, top_p: float | None, device: str
) -> None:
    rows = 8
    logits = random_logits(rows, gamma + 1, vocab, seed=5).to(device)
    target = filter_logits(logits, temperature, top_k, top_p)
    noise = random_logits(gamma, rows, vocab, seed=6, spread=1.0).to(device)
    drafts = [filter_logits(logits[:, j] + noise[j], temperature, top_k, top_p) for j in range(gamma)]
    uniform = random_uniform(2, rows, gamma + 1, seed=7).to(device)
    drafted = torch.stack([draw(d, uniform[0, :, j]) for j, d in enumerate(drafts)] or [uniform[0, :, 0].long()], 1)
    max_tokens = torch.arange(rows, dtype=torch.int32, device=device) % (gamma + 2) + 1
    actual, expected = (
        rejection_sample(target, drafts, drafted[:, :gamma], max_tokens, uniform[1], backend=backend)
        for backend in ("triton", "reference")
    )
    for name in ("advance", "accepted", "verified"):
        assert torch.equal(getattr(actual, name), getattr(expected, name))
    kept = torch.arange(gamma + 1, device=device) < expected.advance[:, None]
    assert torch.equal(actual.tokens[kept], expected.tokens[kept])


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
def test_tokens_of_a_round_follow_the_target_whatever_the_draft(max_tokens: int) -> None:
    rows, gamma = 40_000, 2
    target = softmax_distribution(random_logits(gamma + 1, VOCAB, seed=1).expand(rows, -1, -1), 1.0)
    drafts = [softmax_distribution(row.expand(rows, -1), 1.0) for row in random_logits(gamma, VOCAB, seed=2)]
    uniform = random_uniform(2, rows, gamma + 1, seed=3)
    drafted = torch.stack([draw(draft, uniform[0, :, j]) for j, draft in enumerate(drafts)], dim=1)
    result = rejection_sample(target, drafts, drafted, torch.full((rows,), max_tokens, dtype=torch.int32), uniform[1])
    probabilities = target.probabilities()[0]
    for position in range(min(max_tokens, gamma + 1)):
        # Every position follows its own target distribution, given that the round reached it.
        tokens = result.tokens[result.advance > position, position]
        assert chi_square(tokens.bincount(minlength=VOCAB), probabilities[position]) > 1e-3
    overlap = torch.minimum(probabilities[0], drafts[0].probabilities()[0]).sum()
    assert (result.accepted > 0).float().mean() == pytest.approx(float(overlap), abs=0.01)


@BACKENDS
def test_a_rejection_by_rounding_alone_draws_from_the_target(backend: str, device: str) -> None:
    # Draft and target are one distribution but for the last bit, so (p - q)+ has no mass to draw from.
    logits = torch.full((1, 2, VOCAB), -1e4, device=device)
    logits[0, 0, 2], logits[0, 1, 4] = 0.0, 0.0
    target, draft = softmax_distribution(logits, 1.0), softmax_distribution(logits[:, 0].contiguous(), 1.0)
    less = Distribution(logits, 1.0, target.peak, target.cutoff, target.mass * (1 + 2**-22))
    uniform = torch.tensor([[1 - 2**-26, 0.5]], dtype=torch.float64, device=device)
    drafted, max_tokens = torch.tensor([[2]], device=device), torch.tensor([9], dtype=torch.int32, device=device)
    result = rejection_sample(less, [draft], drafted, max_tokens, uniform, backend=backend)
    assert (result.advance.item(), result.accepted.item()) == (1, 0)
    assert result.tokens[0, 0] == 2


@BACKENDS
@pytest.mark.parametrize(
    ("temperature", "vocab", "value"),
    [(1.0, 6, math.nan), (1.0, 70, math.nan), (1.0, 70, math.inf), (1.0, 70, -math.inf), (0.0, 70, math.nan)],
)
def test_logits_that_are_no_numbers_give_tokens_of_the_vocabulary(
    backend: str, device: str, temperature: float, value: float, vocab: int
) -> None:
    """Which ones is of no account, but they must index the embedding until the engine has seen that logits broke."""
    constant = torch.full((2, 3, vocab), value, device=device)
    partly = random_logits(2, 3, vocab, seed=5).to(device)
    partly[:, :, vocab // 2] = value
    for logits in (constant, partly):
        target = filter_logits(logits, temperature, backend=backend)
        drafts = [filter_logits(logits[:, j].contiguous(), temperature, backend=backend) for j in range(2)]
        uniform = random_uniform(2, 3, seed=6).to(device)
        drafted = torch.stack([draw(draft, uniform[:, 0], backend=backend) for draft in drafts], dim=1)
        assert ((drafted >= 0) & (drafted < vocab)).all()
        limit = torch.full((2,), 9, dtype=torch.int32, device=device)
        result = rejection_sample(target, drafts, drafted, limit, uniform, backend=backend)
        assert ((result.tokens >= 0) & (result.tokens < vocab)).all()
        assert ((result.advance >= 1) & (result.advance <= 3)).all()


@pytest.mark.parametrize("certain", [True, False], ids=["proposals", "drafts"])
def test_the_kernels_verify_few_drafts_of_some_rows_as_the_reference(certain: bool, device: str) -> None:
    """Of none to three drafts a row, with no room for any token to room for all."""
    rows, gamma, vocab = 20, 3, 70
    logits = random_logits(rows, gamma + 1, vocab, seed=5).to(device)
    target = filter_logits(logits, 1.0)
    drafted = logits[:, :gamma].argmax(-1)
    drafts = [Greedy(drafted[:, j]) if certain else filter_logits(logits[:, j] / 2, 1.0) for j in range(gamma)]
    counts, room = (torch.arange(rows, device=device) // part % 4 for part in (1, 4))
    uniform = random_uniform(rows, gamma + 1, seed=7).to(device)
    for choice in (target, filter_logits(logits, 0)):
        actual, expected = (
            rejection_sample(choice, drafts, drafted, room.int(), uniform, counts, backend=backend)
            for backend in ("triton", "reference")
        )
        for name in ("advance", "accepted", "verified"):
            assert torch.equal(getattr(actual, name), getattr(expected, name))
        kept = torch.arange(gamma + 1, device=device) < expected.advance[:, None]
        assert torch.equal(actual.tokens[kept], expected.tokens[kept])
        assert (expected.verified <= counts).all() and (expected.advance[room == 0] == 0).all()
        assert ((expected.advance > expected.accepted) == (expected.accepted < room)).all()


def test_tokens_follow_the_target_whatever_is_proposed() -> None:
    """Proposals are certain, so that a rejection draws from what the target has but the proposed token."""
    rows, gamma = 40_000, 2
    target = softmax_distribution(random_logits(gamma + 1, VOCAB, seed=1).expand(rows, -1, -1), 1.0)
    drafted = torch.tensor([[1, 4]]).expand(rows, -1)
    counts = torch.arange(rows) % 3
    uniform, room = random_uniform(rows, gamma + 1, seed=3), torch.full((rows,), 9, dtype=torch.int32)
    result = rejection_sample(target, [Greedy(token) for token in drafted.unbind(1)], drafted, room, uniform, counts)
    probabilities = target.probabilities()[0]
    for position in range(gamma + 1):
        tokens = result.tokens[result.advance > position, position]
        assert chi_square(tokens.bincount(minlength=VOCAB), probabilities[position]) > 1e-3
    assert (result.accepted[counts > 0] > 0).float().mean() == pytest.approx(float(probabilities[0, 1]), abs=0.01)


def test_drafts_are_all_greedy_or_all_sampled() -> None:
    target, token = one_hot(torch.tensor([[2, 4, 1]])), torch.tensor([2])
    with pytest.raises(ValueError, match="allowed: all of them alike"):
        rejection_sample(
            target, [Greedy(token), one_hot(token)], torch.tensor([[2, 2]]), torch.tensor([9]).int(),
            random_uniform(1, 3, seed=0),
        )  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
@pytest.mark.parametrize(("rows", "draws"), [(1, 1), (3, 4), (5, 9)])
def test_the_kernel_draws_the_references_numbers(device: str, seed: int, rows: int, draws: int) -> None:
    key = torch.tensor(seed, device=device)
    positions = torch.arange(rows, dtype=torch.int32, device=device) * 1_000_003
    expected, kernel = (row_uniform(key, positions, 2, draws, backend=backend) for backend in ("reference", "triton"))
    assert torch.equal(expected, kernel)


@BACKENDS
def test_numbers_are_uniform_and_independent(device: str, backend: str) -> None:
    """Of neighbouring rows, positions, streams and draws, whose keys differ in few bits."""
    rows, draws = (40, 50) if backend == "triton" else (400, 50)
    key, positions = torch.tensor(7, device=device), torch.arange(rows, dtype=torch.int32, device=device)
    numbers = torch.cat([row_uniform(key, positions, stream, draws, backend=backend) for stream in (0, 1)], dim=1).cpu()
    assert 0 <= numbers.min() < numbers.max() < 1
    assert len(numbers.unique()) == numbers.numel()
    assert stats.kstest(numbers.flatten().numpy(), "uniform").pvalue > 1e-3
    for one, other in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        pairs = torch.histogramdd(torch.stack([one.flatten(), other.flatten()], dim=1), [4, 4], [0.0, 1.0] * 2).hist
        assert chi_square(pairs.flatten(), torch.full((16,), 1 / 16)) > 1e-3


def test_a_number_depends_on_its_key_alone(device: str) -> None:
    key, positions = torch.tensor(3, device=device), torch.tensor([10, 20, 30], dtype=torch.int32, device=device)
    numbers = row_uniform(key, positions, 1, 4)
    assert torch.equal(row_uniform(key, positions[:2], 1, 2), numbers[:2, :2])
    moved = row_uniform(key, positions + torch.tensor([0, 1, 0], dtype=torch.int32, device=device), 1, 4)
    assert torch.equal(moved[::2], numbers[::2])
    assert (moved[1] != numbers[1]).all()
