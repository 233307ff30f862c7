"""Calls of sampling: a draft's next tokens, and rejection sampling of a round's drafts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.sampling import draw, draw_cost, filter_cost, filter_logits, rejection_sample
from ridgeplan.kernels.sampling.reference import Choice, Greedy, VerifyResult
from ridgeplan.roofline.cost import Cost
from ridgeplan.validate.kernel_calls.case import BenchCase, Within, fresh
from ridgeplan.validate.kernel_calls.sizes import SamplingSize
from ridgeplan.validate.timing import Bench, KernelCall

SPREAD = 4.0  # standard deviation of logits, so that some tokens are likely, as in a model's
DISAGREEMENT = 0.5  # standard deviation between a draft's logits and the target's
REJECTION_S, DRAW_S = 150e-6, 25e-6  # target times


def draw_cases(bench: Bench, sizes: Iterable[SamplingSize]) -> Iterator[BenchCase]:
    """The next token of every sequence from a draft's logits, including filtering."""
    for size in sizes:
        variants = bench.variants(size.batch * size.vocab * bench.element_bytes)
        logits = SPREAD * fresh(bench, variants, size.batch, size.vocab)
        call = draw_call(shape_of(size), size, logits, uniform_numbers(bench, size.batch))
        yield BenchCase("draw", call, Within(DRAW_S))


def rejection_sample_cases(bench: Bench, sizes: Iterable[SamplingSize]) -> Iterator[BenchCase]:
    """Rejection sampling of `gamma` drafts per sequence, including the filtering of the target's logits."""
    for size in sizes:
        variants = bench.variants((2 * size.gamma + 1) * size.batch * size.vocab * bench.element_bytes)
        samplings = [RejectionSampling.draw(bench, size) for _ in range(variants)]
        call = rejection_call(f"{shape_of(size)}, gamma {size.gamma}", samplings)
        yield BenchCase("rejection_sample", call, Within(REJECTION_S))


def draw_call(name: str, size: SamplingSize, logits: Tensor, uniform: Tensor) -> KernelCall:
    """Filtering and, unless greedy, a draw of one token of each sequence from logits [variants, B, vocab]; uniform [B].

    Its error is the largest `misplaced` distance from the draw of the same logits in float32.
    """

    def tokens(variant: int) -> Tensor:
        return draw(_filtered(size, logits[variant], "auto"), uniform)

    def error() -> float:
        exact = _filtered(size, logits[0].float(), "reference")
        return misplaced(_weights(exact, size.vocab), uniform, tokens(0))

    cost = filter_cost(logits[0]) + (draw_cost(logits[0]) if size.temperature else Cost())
    return KernelCall("sampling", name, cost, tokens, len(logits), 1, size.batch, 1, error)


def rejection_call(name: str, variants: Sequence[RejectionSampling]) -> KernelCall:
    """Rejection sampling of a round, on variants of the logits."""
    first = variants[0]
    rows = first.queries * first.size.batch
    return KernelCall(
        "sampling", name, first.cost, lambda i: variants[i](), len(variants), first.queries, rows, first.queries,
        first.error,
    )  # fmt: skip


def shape_of(size: SamplingSize) -> str:
    """The size as shown in tables."""
    kept = f", top-k {size.top_k}, top-p {size.top_p}" if size.top_k else ""
    return f"{size.batch} x {size.vocab}, {f'temperature {size.temperature:g}' if size.temperature else 'greedy'}{kept}"


def misplaced(weights: Tensor, uniform: Tensor, tokens: Tensor) -> float:
    """The largest distance of a uniform number [B] from its token's interval of the CDF of weights [B, vocab].

    Rounding moves the bounds of 128k intervals by about 1e-7, which changes one draw in fifty. The neighbouring token
    is not wrong then.
    """
    sums = weights.double().cumsum(-1)
    columns = tokens[:, None]
    upper, share, total = sums.gather(1, columns)[:, 0], weights.gather(1, columns)[:, 0], sums[:, -1]
    position = uniform * total
    return float((torch.maximum(position - upper, upper - share - position).clamp_min(0) / total).max())


@dataclass(frozen=True, eq=False)
class RejectionSampling:
    """Rejection sampling of drafted tokens [B, gamma], drawn from logits `drafts` [gamma, B, vocab].

    target: logits [B, gamma + 1, vocab]; uniform: [B, gamma + 1].
    """

    size: SamplingSize
    target: Tensor
    drafts: Tensor
    drafted: Tensor
    uniform: Tensor

    @classmethod
    def draw(cls, bench: Bench, size: SamplingSize) -> RejectionSampling:
        """Drafts that differ slightly from the target, so that some are rejected."""
        target = SPREAD * fresh(bench, size.batch, size.gamma + 1, size.vocab)
        noise = DISAGREEMENT * fresh(bench, size.gamma, size.batch, size.vocab)
        drafts = target[:, :-1].transpose(0, 1) + noise
        drafted = draw(_filtered(size, drafts, "auto"), uniform_numbers(bench, size.gamma, size.batch)).t().contiguous()
        return cls(size, target, drafts, drafted, uniform_numbers(bench, size.batch, size.gamma + 1))

    @property
    def queries(self) -> int:
        """Queries of each sequence."""
        return self.size.gamma + 1

    @cached_property
    def max_tokens(self) -> Tensor:
        """int32 [B], large enough for all drafts."""
        return torch.full((self.size.batch,), self.queries, dtype=torch.int32, device=self.target.device)

    def __call__(self) -> VerifyResult:
        target = _filtered(self.size, self.target, "auto")
        return rejection_sample(target, self._choices, self.drafted, self.max_tokens, self.uniform)

    @property
    def cost(self) -> Cost:
        """Declared cost of filtering all queries' logits and, unless greedy, of a draw from the residual."""
        drawn = draw_cost(self.target[:, 0], self.drafts[0]) if self.size.temperature else Cost()
        return filter_cost(self.target) + drawn

    def error(self) -> float:
        """The share of sequences that accept other drafts than the reference, or the largest `misplaced` distance.

        Both compare with the same logits in float32. After a rejection the token is drawn from (p - q)+, at the end
        from p.
        """
        target = _filtered(self.size, self.target.float(), "reference")
        choices = [_filtered(self.size, draft.float(), "reference") for draft in self.drafts]
        ours, exact = (
            self(),
            rejection_sample(target, choices, self.drafted, self.max_tokens, self.uniform, backend="reference"),
        )
        rows, last = torch.arange(len(self.max_tokens), device=self.max_tokens.device), ours.accepted
        p = _weights(target, self.size.vocab)
        q = torch.stack([*(_weights(choice, self.size.vocab) for choice in choices), torch.zeros_like(p[:, 0])], dim=1)
        left = (p[rows, last] - q[rows, last]).clamp_min(0)
        wrong = float((ours.accepted != exact.accepted).double().mean())
        return max(wrong, misplaced(left, self.uniform[:, -1], ours.tokens[rows, last]))

    @cached_property
    def _choices(self) -> list[Choice]:
        """The drafts' distributions, which were filtered while drafting and are not part of the timing."""
        return [_filtered(self.size, draft, "auto") for draft in self.drafts]


def _filtered(size: SamplingSize, logits: Tensor, backend: Backend) -> Choice:
    return filter_logits(logits, size.temperature, size.top_k, size.top_p, backend=backend)


def uniform_numbers(bench: Bench, *shape: int) -> Tensor:
    """Random numbers for draws."""
    return torch.rand(shape, dtype=torch.float64, device=bench.device)


def _weights(choice: Choice, vocab: int) -> Tensor:
    """Probabilities [..., vocab], one-hot for a greedy choice."""
    if isinstance(choice, Greedy):
        return torch.nn.functional.one_hot(choice.best, vocab).float()
    return choice.probabilities()
