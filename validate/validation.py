"""Plain decoding and a plan side by side, on the same prompts and the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ridgeplan.planner.plan import Plan
from ridgeplan.planner.policies.selection.all import autoregressive
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.validate.comparison import Comparison
from ridgeplan.validate.measure import Measured, comparison, measure, shape_of

if TYPE_CHECKING:
    from ridgeplan.runtime import SamplingParams, Statistics
    from ridgeplan.runtime.model.weights import DecoderWeights

# Called with "plain" or "plan" and the tokens delivered so far.
RunProgress = Callable[[str, int], None]


@dataclass(frozen=True)
class PlanRun:
    """One plan's run: what was measured, beside its prediction, and the text that follows each prompt."""

    measured: Measured
    comparison: Comparison
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Validation:
    """Plain decoding and the plan; the plan's comparison holds the measured speed-up."""

    plain: PlanRun
    planned: PlanRun

    @property
    def comparison(self) -> Comparison:
        """The plan's prediction beside its run."""
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
    """Runs plain decoding, then `plan`, each on an engine of its own, and compares both with their predictions.

    prompts: token ids. profile: the machine's, by default the calibrated one of this machine. calibration: token ids
    that 4-bit draft weights are fitted to, as `runtime.load` takes them.
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
        return PlanRun(measured, comparison(item, shape, profile, measured, plain or measured.statistics), texts)

    plain = run("plain", autoregressive(plan.workload), None)
    return Validation(plain, run("plan", plan, plain.measured.statistics))


def _silent(name: str, tokens: int) -> None:
    """No progress is shown."""
