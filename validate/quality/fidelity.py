"""Fidelity and perplexity of a plan's target on a text, teacher-forced over the plan's own cache.

Fidelity is 1 - TV, the overlap sum(min(p, q)) of the plain model's next-token distribution p and the plan's q at
temperature 1, mean over tokens. It is the figure that acceptance is (Leviathan et al. 2023, section 3.3), with the
plan's target in the place of the draft. The logits right after the prompt are left out: prefill computes them with
exact attention, before the plan's cache is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.runtime.engine import Engine


@dataclass(frozen=True)
class Passage:
    """A prompt, and the tokens that follow it in the text, of which the last is only predicted."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]

    @classmethod
    def split(cls, ids: Sequence[int], tokens: int) -> Passage:
        """Measures on `tokens` tokens at the end of `ids`."""
        return cls(tuple(ids[: -tokens - 1]), tuple(ids[-tokens - 1 :]))


def next_logits(engine: Engine, passages: Sequence[Passage]) -> Tensor:
    """Logits float32 [passages, tokens, vocab] after each token of the continuations but their last, on the device."""
    prompts, tokens = [one.prompt for one in passages], [one.continuation[:-1] for one in passages]
    return engine.forced_logits_batch(prompts, tokens)[:, 1:].float()


def overlap(logits: Tensor, others: Tensor) -> float:
    """Mean over rows of sum(min(p, q)), 1 - TV, of two sets of logits [tokens, vocab]."""
    return float(torch.minimum(logits.softmax(-1), others.softmax(-1)).sum(-1).double().mean())


def surprise(logits: Tensor, passage: Passage) -> float:
    """Mean negative log-likelihood, nats a token, of the continuation's tokens that `next_logits` predicts."""
    wanted = torch.tensor(passage.continuation[1:], device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits.double(), wanted))


def perplexity(surprises: Sequence[float]) -> float:
    """exp of the mean of passages of equal length, each in nats a token."""
    return math.exp(math.fsum(surprises) / len(surprises))
