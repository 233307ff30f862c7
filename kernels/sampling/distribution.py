"""The distributions that tokens are drawn from: logits and a few numbers per row, without stored probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LOG2_E = 1.4426950408889634  # kernels compute exp(x) as 2 ** (x * LOG2_E)


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
