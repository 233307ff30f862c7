"""What tokens are drawn from: a few figures per row beside its logits, never a tensor of probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Distribution:
    """p(token) = exp((logit - peak) / temperature) / mass where logit >= cutoff, else 0.

    logits: [..., vocab] in any floating type. peak, cutoff, mass: float32 [...], the largest logit, what a logit
    must reach to be kept (-inf keeps all), and the sum of exp((logit - peak) / temperature) over the kept ones.
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
        """All of it, float32 [..., vocab]: for tests and twins."""
        logits = self.logits.float()
        weights = ((logits - self.peak[..., None]) / self.temperature).exp_()
        return weights.masked_fill_(logits < self.cutoff[..., None], 0) / self.mass[..., None]


@dataclass(frozen=True, eq=False)
class Greedy:
    """All probability is on the likeliest token, int64 [...]; of equal ones on the lowest."""

    best: Tensor


Choice = Distribution | Greedy


@dataclass(frozen=True, eq=False)
class VerifyResult:
    """What a round keeps: the first advance[b] of tokens, int64 [rows, gamma + 1].

    advance, accepted, judged: int64 [rows]. judged are the drafts that were compared with the target, those whose
    predecessors were accepted.
    """

    tokens: Tensor
    advance: Tensor
    accepted: Tensor
    judged: Tensor
