"""Distributions over tokens, and sampling in plain torch: the kernels' reference and the CPU implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634  # kernels compute exp(x) as 2 ** (x * LOG2_E)


# splitmix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators"): the step between states, and its
# finalizer, which turns equal steps into independent-looking numbers. Integers are 64 bits and wrap.
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
STREAM_DRAWS = 1 << 16  # numbers of one purpose at one position, far more than a round draws


@dataclass(frozen=True, eq=False)
class Distribution:
    """p(token) = exp((logit - peak) / temperature) / mass where logit >= cutoff, else 0.

    logits: [..., vocab] in any floating type. peak, cutoff, mass: float32 [...], the largest logit, the smallest kept
    logit (-inf keeps all), and the sum of exp((logit - peak) / temperature) over the kept ones.
    """

    logits: Tensor
    temperature: float
    peak: Tensor
    cutoff: Tensor
    mass: Tensor

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.logits.shape[-1]

    def probabilities(self) -> Tensor:
        """All probabilities, float32 [..., vocab]: for tests and the reference."""
        logits = self.logits.float()
        weights = ((logits - self.peak[..., None]) / self.temperature).exp_()
        return weights.masked_fill_(logits < self.cutoff[..., None], 0) / self.mass[..., None]


@dataclass(frozen=True, eq=False)
class Greedy:
    """All probability on the likeliest token, int64 [...]; of ties, on the first."""

    best: Tensor


Choice = Distribution | Greedy


@dataclass(frozen=True, eq=False)
class VerifyResult:
    """The tokens that a round keeps: the first advance[b] of row b of `tokens`, int64 [rows, gamma + 1].

    advance, accepted, verified: int64 [rows]. verified counts the drafts that were compared with the target: those
    whose predecessors were all accepted.
    """

    tokens: Tensor
    advance: Tensor
    accepted: Tensor
    verified: Tensor


@dataclass(frozen=True, eq=False)
class StoredDistribution(Distribution):
    """A distribution that stores its probabilities, float32 [..., vocab], which is fastest on a CPU."""

    table: Tensor

    def probabilities(self) -> Tensor:
        """All probabilities, float32 [..., vocab]."""
        return self.table


def softmax_distribution_reference(logits: Tensor, temperature: float, cutoff: Tensor | None) -> StoredDistribution:
    """See `ridgeplan.kernels.sampling.softmax_distribution`."""
    values = logits.float()
    peak = values.amax(-1)
    if cutoff is None:
        cutoff = torch.full_like(peak, -torch.inf)
    else:
        values = values.masked_fill(values < cutoff[..., None], -torch.inf)
    table = (values / temperature).softmax(-1)
    # The likeliest token's weight is 1, so its probability is 1 / mass.
    return StoredDistribution(logits, temperature, peak, cutoff, 1 / table.amax(-1), table)


def kth_largest(logits: Tensor, k: int) -> Tensor:
    """The k-th largest of each row of logits [..., vocab], float32 [...]."""
    return logits.topk(k, dim=-1).values[..., -1].float().contiguous()


def nucleus(distribution: Distribution, top_p: float) -> StoredDistribution:
    """The smallest set of likeliest tokens of `distribution` whose mass reaches `top_p` (Holtzman et al. 2020).

    Ties with the last kept token are all kept.
    """
    table = distribution.probabilities()
    ordered = table.sort(dim=-1, descending=True)
    sums = ordered.values.cumsum(-1, dtype=torch.float64)
    last = (sums < top_p * sums[..., -1:]).sum(-1, keepdim=True).clamp_max(distribution.vocab - 1)
    cutoff = distribution.logits.gather(-1, ordered.indices.gather(-1, last)).float()
    table = table.masked_fill(distribution.logits < cutoff, 0)
    kept = table.sum(-1)
    table = table / kept[..., None]
    mass = distribution.mass * kept
    return StoredDistribution(
        distribution.logits, distribution.temperature, distribution.peak, cutoff[..., 0].contiguous(), mass, table
    )


def row_uniform_reference(seed: Tensor, positions: Tensor, stream: int, draws: int) -> Tensor:
    """See `ridgeplan.kernels.sampling.row_uniform`."""
    rows, numbers = (torch.arange(count, device=seed.device) for count in (len(positions), draws))
    key = _mixed(seed + (rows + 1) * _signed(GOLDEN))
    key = _mixed(key ^ positions.long())[:, None] + (STREAM_DRAWS * stream + 1 + numbers) * _signed(GOLDEN)
    return (_mixed(key) >> 11 & (1 << 53) - 1).double() * 2.0**-53


def _mixed(value: Tensor) -> Tensor:
    """splitmix64's finalizer of int64 values, which stand for unsigned ones."""
    value = (value ^ _shifted(value, 30)) * _signed(MIX_1)
    value = (value ^ _shifted(value, 27)) * _signed(MIX_2)
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right."""
    return value >> bits & (1 << 64 - bits) - 1


def _signed(value: int) -> int:
    """The int64 of the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


def draw_reference(distribution: Distribution, uniform: Tensor) -> Tensor:
    """See `ridgeplan.kernels.sampling.draw`."""
    return _pick(distribution.probabilities(), uniform)


def rejection_sample_reference(
    target: Distribution,
    drafts: Sequence[Distribution] | None,
    drafted: Tensor,
    max_tokens: Tensor,
    uniform: Tensor,
    drafted_counts: Tensor | None = None,
) -> VerifyResult:
    """See `ridgeplan.kernels.sampling.rejection_sample`. drafts: None for drafts that were certain."""
    tables = target.probabilities()
    # After a row's last draft q is 0, so that the residual is p.
    draft = torch.zeros_like(tables)
    if drafts is None:
        draft[:, :-1].scatter_(-1, drafted[..., None], 1.0)
    elif drafts:
        draft[:, :-1] = torch.stack([each.probabilities() for each in drafts], dim=1)
    if drafted_counts is not None:
        draft[torch.arange(draft.shape[1], device=draft.device) >= drafted_counts[:, None]] = 0
    p, q = (table[:, :-1].gather(-1, drafted[..., None])[..., 0] for table in (tables, draft))
    accepted, full, verified = count_accepted(uniform[:, :-1] * q < p, max_tokens, drafted_counts)
    replacement = _pick(_residual(tables, draft, accepted), uniform[:, -1])
    tokens = torch.cat([drafted, drafted.new_zeros(len(drafted), 1)], dim=1)
    # A full row keeps its last draft, which becomes the pending token; what is written after it is never read.
    tokens.scatter_(1, accepted[:, None], replacement[:, None])
    return VerifyResult(tokens, accepted + (~full).long(), accepted, verified)


def count_accepted(
    passed: Tensor, max_tokens: Tensor, drafted_counts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's accepted drafts, whether it reaches max_tokens, its verified drafts; passed: bool [rows, gamma]."""
    gamma = passed.shape[1]
    limit = max_tokens.long().clamp_max(gamma)
    drafts = limit if drafted_counts is None else torch.minimum(limit, drafted_counts)
    inside = torch.arange(gamma, device=passed.device) < drafts[:, None]
    accepted = (passed & inside).long().cumprod(1).sum(1)
    return accepted, (accepted == limit) & (max_tokens <= gamma), torch.minimum(accepted + 1, drafts)


def _residual(target: Tensor, draft: Tensor, accepted: Tensor) -> Tensor:
    """The residual distribution (p - q)+, not normalized, [rows, vocab] after `accepted` drafts.

    target, draft: probabilities [rows, gamma + 1, vocab]. If rounding leaves nothing, p and q are the same
    distribution, and p is returned.
    """
    rows = torch.arange(len(accepted), device=accepted.device)
    p = target[rows, accepted]
    residual = (p - draft[rows, accepted]).clamp_min_(0)
    return torch.where((residual > 0).any(-1, keepdim=True), residual, p)


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Tokens [...] by inverse CDF from unnormalized weights [..., vocab].

    Sums are float64, so tokens of weight 0 are never drawn and rare ones keep their probability. NaN weights give some
    token of the vocabulary; the caller checks for them later.
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = sums[..., -1:]
    threshold = torch.minimum(uniform[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, threshold, right=True)[..., 0].clamp_max_(weights.shape[-1] - 1)
