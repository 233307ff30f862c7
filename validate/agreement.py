"""Greedy tokens of an engine against float32: how often they differ, and whether rounding explains it.

Both decoders get the same tokens, so one difference does not change all later tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ridgeplan.planner.plan import Plan
from ridgeplan.runtime import load
from ridgeplan.runtime.engine import Engine

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
    own, reference = (load(plan, model, dtype=one, retrieval_head=retrieval_head) for one in (None, torch.float32))
    return agreement(own, reference, prompt, new_tokens)


def agreement(engine: Engine, reference: Engine, prompt: Sequence[int], new_tokens: int) -> Agreement:
    """Compares after each of `new_tokens` tokens that `engine` generates greedily.

    reference: an engine of the same plan and model in float32. Raises what `Engine.generate` raises.
    """
    tokens = engine.generate(prompt, new_tokens).tokens[0]
    ours, exact = (each.forced_logits(prompt, tokens[:-1]).float().cpu() for each in (engine, reference))
    chosen, wanted = ours.argmax(-1), exact.argmax(-1)
    differing = (chosen != wanted).nonzero()[:, 0]
    gaps = exact[differing, wanted[differing]] - exact[differing, chosen[differing]]
    moves = (ours - ours.mean(-1, keepdim=True)) - (exact - exact.mean(-1, keepdim=True))
    return Agreement(len(tokens), tuple(gaps.tolist()), float(moves.std()))
