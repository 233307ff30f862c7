"""Fidelity of a plan's target to the plain model: teacher-forced distributions, and greedy tokens.

Fidelity is 1 - TV, the overlap sum(min(p, q)) of the plain model's next-token distribution p and the plan's q at
temperature 1, mean over tokens. It is the figure that acceptance is (Leviathan et al. 2023, section 3.3), with the
plan's target in the place of the draft. The logits right after the prompt are left out: prefill computes them with
exact attention, before the plan's cache is read.

Both decoders get the same tokens, so one difference does not change all later tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.runtime import load
from ridgeplan.runtime.engine import Engine
from ridgeplan.validate.measure import clamp_share


@dataclass(frozen=True)
class ForcedPassage:
    """A prompt, and the tokens that follow it in the text, of which the last is only predicted."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]

    @classmethod
    def split(cls, ids: Sequence[int], tokens: int) -> ForcedPassage:
        """Measures on `tokens` tokens at the end of `ids`."""
        return cls(tuple(ids[: -tokens - 1]), tuple(ids[-tokens - 1 :]))


def next_logits(engine: Engine, passages: Sequence[ForcedPassage]) -> Tensor:
    """Logits float32 [passages, tokens, vocab] after each token of the continuations but their last, on the device."""
    prompts, tokens = [passage.prompt for passage in passages], [passage.continuation[:-1] for passage in passages]
    return engine.teacher_forced_logits(prompts, tokens)[:, 1:].float()


def overlap(logits: Tensor, others: Tensor) -> float:
    """Mean over rows of sum(min(p, q)), 1 - TV, of two sets of logits [tokens, vocab]."""
    return clamp_share(float(torch.minimum(logits.softmax(-1), others.softmax(-1)).sum(-1).double().mean()))


def surprise(logits: Tensor, passage: ForcedPassage) -> float:
    """Mean negative log-likelihood, nats a token, of the continuation's tokens that `next_logits` predicts."""
    expected = torch.tensor(passage.continuation[1:], device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits.double(), expected))


def perplexity(surprises: Sequence[float]) -> float:
    """exp of the mean of passages of equal length, each in nats a token."""
    return float(np.exp(math.fsum(surprises) / len(surprises)))  # infinite where math.exp would raise


NOISE_DEVIATIONS = 5  # largest change of a logit that rounding explains, in standard deviations


@dataclass(frozen=True)
class Agreement:
    """How often the likeliest tokens differ, and by how much the reference prefers its own.

    tokens: number compared. gaps: for each that differs, the reference's logit of its own token minus that of the
    engine's. noise: the standard deviation of the engine's logits around the reference's, each centred.
    """

    tokens: int
    gaps: tuple[float, ...]
    noise: float

    @property
    def rate(self) -> float:
        """Share of tokens that differ."""
        return len(self.gaps) / self.tokens

    @property
    def beyond_noise(self) -> int:
        """Differing tokens whose gap rounding does not explain; a gap is the difference of two noisy logits."""
        return sum(gap > NOISE_DEVIATIONS * 2**0.5 * self.noise for gap in self.gaps)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "rate": self.rate, "beyond_noise": self.beyond_noise}


def plan_agreement(
    plan: Plan, model: str, prompt: Sequence[int], new_tokens: int, retrieval_head: str | None = None
) -> Agreement:
    """`agreement` of an engine of `plan` with its reference, both loaded here like `ridgeplan.runtime.load`.

    Where engines run in float32 anyway, as on a CPU, nothing can differ.
    """
    engine, reference = (
        load(plan, model, dtype=dtype, retrieval_head=retrieval_head) for dtype in (None, torch.float32)
    )
    return agreement(engine, reference, prompt, new_tokens)


def agreement(engine: Engine, reference: Engine, prompt: Sequence[int], new_tokens: int) -> Agreement:
    """Compares after each of `new_tokens` tokens that `engine` generates greedily.

    reference: an engine of the same plan and model in float32. Raises what `Engine.generate` raises.
    """
    tokens = engine.generate(prompt, new_tokens).tokens[0]
    ours, exact = (each.teacher_forced_logits([prompt], [tokens[:-1]])[0].float().cpu() for each in (engine, reference))
    chosen, expected = ours.argmax(-1), exact.argmax(-1)
    differing = (chosen != expected).nonzero()[:, 0]
    gaps = exact[differing, expected[differing]] - exact[differing, chosen[differing]]
    moves = (ours - ours.mean(-1, keepdim=True)) - (exact - exact.mean(-1, keepdim=True))
    return Agreement(len(tokens), tuple(gaps.tolist()), float(moves.std()))
