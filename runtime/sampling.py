"""Distributions that tokens are drawn from, and speculative acceptance, as device arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.runtime.errors import WorkloadError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy. Draft and target are filtered alike."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, "a finite number of 0 or more")
        if self.temperature < 0:
            raise WorkloadError(f"temperature is {self.temperature}; allowed: a finite number of 0 or more")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise WorkloadError(f"top_k is {self.top_k!r}; allowed: a whole number of 1 or more, or None")
        if self.top_p is not None:
            _require_number("top_p", self.top_p, "above 0 up to 1, or None")
            if not 0 < self.top_p <= 1:
                raise WorkloadError(f"top_p is {self.top_p}; allowed: above 0 up to 1, or None")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Float32 distributions of logits [..., vocab]; greedy ones hold a single 1."""
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            kept = logits.topk(self.top_k, dim=-1)
            logits = torch.full_like(logits, -torch.inf).scatter_(-1, kept.indices, kept.values)
        probabilities = logits.softmax(-1)
        return probabilities if self.top_p is None else _nucleus(probabilities, self.top_p)


def _require_number(name: str, value: object, allowed: str) -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not math.isfinite(value):  # type: ignore[arg-type]
        raise WorkloadError(f"{name} is {value!r}; allowed: {allowed}")


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The smallest set of likeliest tokens whose mass reaches `top_p`, renormalized."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    ahead = ordered.cumsum(-1) - ordered
    ordered = ordered * (ahead < top_p)
    kept = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
    return kept / kept.sum(-1, keepdim=True)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Tokens [...] by inverse CDF from weights [..., vocab], of any sum; uniform [...] in [0, 1).

    Float64 sums, so that a token of weight 0 is never drawn and rare ones keep their share.
    """
    cumulative = weights.double().cumsum(-1)
    threshold = uniform[..., None].double() * cumulative[..., -1:]
    token = torch.searchsorted(cumulative, threshold, right=True)[..., 0]
    return token.clamp_max(weights.shape[-1] - 1)


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a round keeps: the first advance[b] of tokens [rows, gamma + 1].

    judged: drafts [rows] that were compared with the target, those whose predecessors were accepted.
    """

    tokens: Tensor
    advance: Tensor
    accepted: Tensor
    judged: Tensor


def judge(target: Tensor, draft: Tensor, drafted: Tensor, room: Tensor, uniform: Tensor) -> Verdict:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1), cut at each row's `room`.

    target: [rows, gamma + 1, vocab]; draft: [rows, gamma, vocab]; drafted: int64 [rows, gamma]; room: int32
    [rows], at least 1; uniform: float64 [rows, gamma + 1], of which the last draws the replacement.

    Draft j is accepted with probability min(1, p/q); at the first rejection the token is drawn from (p - q)+,
    after gamma acceptances one more from p. A row that fills its room ends there with an accepted draft.
    """
    gamma = drafted.shape[1]
    limit = room.long().clamp_max(gamma)
    p = target[:, :gamma].gather(-1, drafted[..., None])[..., 0]
    q = draft.gather(-1, drafted[..., None])[..., 0]
    index = torch.arange(gamma, device=drafted.device)
    passed = (uniform[:, :gamma] * q < p) & (index < limit[:, None])
    accepted = passed.long().cumprod(1).sum(1)
    full = (accepted == limit) & (room <= gamma)
    replacement = draw(_residual(target, draft, accepted), uniform[:, gamma])
    tokens = torch.cat([drafted, drafted.new_zeros(len(drafted), 1)], dim=1)
    # A full row keeps its last draft, which becomes the pending token; the write beyond it is never read.
    tokens.scatter_(1, accepted[:, None], replacement[:, None])
    return Verdict(tokens, accepted + (~full).long(), accepted, torch.minimum(accepted + 1, limit))


def _residual(target: Tensor, draft: Tensor, accepted: Tensor) -> Tensor:
    """(p - q)+ [rows, vocab] after `accepted` drafts; q is 0 after the last.

    Where rounding leaves nothing of it, p and q are the same distribution, and it is p.
    """
    q = torch.cat([draft, torch.zeros_like(target[:, :1])], dim=1)
    at = accepted[:, None, None].expand(-1, 1, target.shape[2])
    wanted = target.gather(1, at)[:, 0]
    beyond = (wanted - q.gather(1, at)[:, 0]).clamp_min(0)
    return torch.where((beyond > 0).any(-1, keepdim=True), beyond, wanted)
