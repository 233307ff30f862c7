"""Validation of a plan: plain decoding and the plan on the same prompts and weights, against their predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ridgeplan.planner.plan import Plan
from ridgeplan.planner.policies.selection.all import autoregressive
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.validate.comparison import Comparison, compare_measured, shape_of
from ridgeplan.validate.measure import Measured, measure

if TYPE_CHECKING:
    from ridgeplan.runtime import SamplingParams, Statistics
    from ridgeplan.runtime.model.weights import DecoderWeights

# Called with "plain" or "plan" and the tokens delivered so far.
RunProgress = Callable[[str, int], None]


@dataclass(frozen=True)
class PlanRun:
    """One plan's run: the measurement and its prediction, and the new text of each prompt."""

    measured: Measured
    comparison: Comparison
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Validation:
    """Plain decoding and the plan, whose comparison includes the measured speed-up."""

    plain: PlanRun
    planned: PlanRun

    @property
    def comparison(self) -> Comparison:
        """The plan's comparison."""
        return self.planned.comparison

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        runs = {"plan": self.planned, "plain": self.plain}
        return {name: {**run.comparison.to_dict(), "texts": list(run.texts)} for name, run in runs.items()}


def validate_plan(
    plan: Plan,
    model: str,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    *,
    device: str | None = None,
    profile: Profile | None = None,
    calibration: Sequence[int] | None = None,
    on_progress: RunProgress | None = None,
) -> Validation:
    """Runs plain decoding, then `plan`, each on its own engine, and compares both with their predictions.

    prompts: token ids. profile: by default this machine's calibrated one. calibration: token ids for 4-bit draft
    weights, as for `runtime.load`.
    Raises what `runtime.load` and `Engine.generate` raise, and ProfileError where this machine is not calibrated.
    """
    from ridgeplan import runtime  # imports torch, which takes seconds

    profile = profile or this_machine()
    progress = on_progress or _silent
    weights: DecoderWeights | None = None

    def run(name: str, item: Plan, plain: Statistics | None) -> PlanRun:
        nonlocal weights
        fitted = calibration if item.weights.draft_differs else None
        engine = runtime.load(item, model, device=device, weights=weights, calibration=fitted)
        weights = engine.weights
        measured = measure(engine, prompts, max_new_tokens, sampling, on_progress=lambda tokens: progress(name, tokens))
        texts = tuple(engine.tokenizer.batch_decode([list(tokens) for tokens in measured.tokens]))
        shape = shape_of(item, engine)
        engine.close()
        return PlanRun(measured, compare_measured(item, shape, profile, measured, plain or measured.statistics), texts)

    plain = run("plain", autoregressive(plan.workload), None)
    return Validation(plain, run("plan", plan, plain.measured.statistics))


def _silent(name: str, tokens: int) -> None:
    """Ignores progress."""
