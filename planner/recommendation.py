"""The answer of `recommend`: the plan, its prediction, and why the others lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ridgeplan.planner.plan import Plan
from ridgeplan.planner.prediction import Prediction
from ridgeplan.roofline.device import GIB
from ridgeplan.roofline.passes import category

BALANCED_WITHIN = 0.1  # neither side of a step is called the bottleneck if attention takes 40% to 60% of it


@dataclass(frozen=True)
class Alternative:
    """The best plan of another family, and why it was not chosen."""

    preset: str
    plan: Plan
    predicted: Prediction
    rejected: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "preset": self.preset,
            "plan": self.plan.to_dict(),
            "predicted": self.predicted.to_dict(),
            "rejected": self.rejected,
        }


@dataclass(frozen=True)
class Recommendation:
    """The recommended plan with its prediction, plain decoding for comparison, and the ranked alternatives."""

    plan: Plan
    name: str
    predicted: Prediction
    baseline: Prediction
    alternatives: tuple[Alternative, ...]
    losses: tuple[str, ...]
    notes: tuple[str, ...]
    memory_limit_bytes: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: plan, prediction, baseline, alternatives, losses and notes."""
        return {
            "plan": self.plan.to_dict(),
            "preset": self.name,
            "predicted": self.predicted.to_dict(),
            "baseline": self.baseline.to_dict(),
            "alternatives": [alternative.to_dict() for alternative in self.alternatives],
            "losses": list(self.losses),
            "notes": list(self.notes),
            "memory_limit_bytes": self.memory_limit_bytes,
        }

    def explain(self) -> str:
        """Why this plan: the bottleneck, the round's arithmetic, memory, quality, and the nearest alternatives."""
        return "\n".join((*self._choice(), *self._round(), *self._rest()))

    def _choice(self) -> list[str]:
        workload, best = self.plan.workload, self.predicted.best
        share = self._attention_share()
        return [
            f"{workload.model} on {workload.hardware}, {workload.context} tokens of context, batch {workload.batch}:",
            f"  {self.name}: {_ms(best.tpot_ms)} per token "
            f"({_ms(self.predicted.low.tpot_ms)} to {_ms(self.predicted.high.tpot_ms)}), "
            f"{self.predicted.speedup:.2f}x plain decoding ({_ms(self.baseline.best.tpot_ms)}) "
            f"[{self.predicted.source}]",
            f"  plain decoding spends {100 * share:.0f}% of a step on attention: {_bottleneck(share)}",
        ]

    def _round(self) -> list[str]:
        speculation, predicted = self.plan.speculation, self.predicted
        if not speculation.active:
            return ["  no speculation: every step is the target's own"]
        acceptance = predicted.acceptance
        return [
            f"  a round drafts {speculation.gamma} x {_ms(predicted.draft_step_ms)}, verifies in "
            f"{_ms(predicted.verify_ms)} and yields {predicted.tokens_per_round:.2f} tokens",
            f"  acceptance {acceptance.best:.3f} ({acceptance.low:.3f} to {acceptance.high:.3f}), "
            f"{acceptance.source}: {acceptance.where}",
        ]

    def _rest(self) -> list[str]:
        peak = self.predicted.best.peak_memory_bytes
        lines = [f"  peak memory {peak / GIB:.2f} GiB of {self.memory_limit_bytes / GIB:.2f} GiB"]
        lines += [f"  gives up: {loss}" for loss in self.losses]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  not {other.preset}: {other.rejected}" for other in self.alternatives[:5]]
        return lines

    def _attention_share(self) -> float:
        target = [op for op in self.baseline.breakdown if op.part == "target"]
        return sum(op.seconds for op in target if category(op.kind) == "attention") / sum(op.seconds for op in target)


def _bottleneck(attention_share: float) -> str:
    if abs(attention_share - 0.5) <= BALANCED_WITHIN:
        return "the weights and the KV cache weigh about the same"
    return "the KV cache is the bottleneck" if attention_share > 0.5 else "the weights are the bottleneck"


def _ms(value: float) -> str:
    """Milliseconds with three significant digits, never in scientific notation."""
    return f"{value:.3g} ms" if value < 1000 else f"{value:.0f} ms"
