"""Validation of plans: each runs on the same prompts and weights, and is compared with its prediction."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.roofline.plan.policies.dense import plain_beside
from ridgeplan.roofline.plan.support import missing_head
from ridgeplan.validate.comparison import Comparison, compare_measured, shape_of
from ridgeplan.validate.measure import Measured, Prompts, Run, take_turns

if TYPE_CHECKING:
    from ridgeplan.runtime import SamplingParams
    from ridgeplan.runtime.model.weights import DecoderWeights

# Called with the index of a plan and the tokens delivered so far.
RunProgress = Callable[[int, int], None]
ONE_AFTER_ANOTHER = "the plans do not fit into memory together, so they ran one after another, not in turns"


@dataclass(frozen=True)
class PlanRun:
    """One plan's run: the measurement and its prediction, and the new text of each prompt."""

    measured: Measured
    comparison: Comparison
    texts: tuple[str, ...]


@dataclass(frozen=True)
class PlanRuns:
    """Runs of several plans; the first is the baseline of speed-ups. in_turns: whether they ran segment by segment."""

    runs: tuple[PlanRun, ...]
    in_turns: bool


@dataclass(frozen=True)
class Validation:
    """Plain decoding and the plan, whose comparison includes the measured speed-up."""

    plain: PlanRun
    planned: PlanRun
    in_turns: bool

    @property
    def comparison(self) -> Comparison:
        """The plan's comparison."""
        return self.planned.comparison

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        runs = {"plan": self.planned, "plain": self.plain}
        comparisons = {name: {**run.comparison.to_dict(), "texts": list(run.texts)} for name, run in runs.items()}
        return {**comparisons, "in_turns": self.in_turns}


@dataclass(frozen=True)
class RunOptions:
    """What plans run on. model, device: as for `runtime.load`. prompts: token ids.

    profile: by default this machine's calibrated one. calibration: token ids for 4-bit weights, as for `runtime.load`.
    retrieval_head: the file of a head, for the plans that select by one.
    """

    model: str
    prompts: Prompts
    max_new_tokens: int
    sampling: SamplingParams | None = None
    device: str | None = None
    profile: Profile | None = None
    calibration: Sequence[int] | None = None
    retrieval_head: str | None = None
    on_progress: RunProgress | None = None


def validate_plan(plan: Plan, options: RunOptions) -> Validation:
    """Runs plain decoding (`plain_beside`) and `plan` by `run_plans`."""
    plan_runs = run_plans((plain_beside(plan), plan), options)
    plain, planned = plan_runs.runs
    return Validation(plain, planned, plan_runs.in_turns)


def run_plans(plans: Sequence[Plan], options: RunOptions) -> PlanRuns:
    """Runs each plan on its own engine and compares it with its prediction; targets of one format share weights.

    The engines are loaded at once and run in turns, or one after another where memory does not allow that.
    Raises what `runtime.load` and `Engine.generate` raise, and ProfileError where this machine is not calibrated.
    """
    return _Lanes(plans, options, options.profile or this_machine()).run()


@dataclass(eq=False)
class _Lanes:
    """Engines of several plans. weights: by format, for plans that share them; plain: the first measurement.

    freed_bytes: what the engines that have ended held on a GPU beside those weights.
    """

    plans: Sequence[Plan]
    options: RunOptions
    profile: Profile
    weights: dict[tuple[int, int | None, bool, bool], DecoderWeights] = field(default_factory=dict)
    plain: Measured | None = None
    freed_bytes: int = 0

    def run(self) -> PlanRuns:
        """All plans in turns, else one after another."""
        from ridgeplan.runtime import WorkloadError  # imports torch, which takes seconds

        runs = [self._begun(0)]
        try:
            for index in range(1, len(self.plans)):
                runs.append(self._begun(index))  # noqa: PERF401, the runs that have begun are needed if one fails
        except WorkloadError:
            return PlanRuns(tuple(self._in_sequence(runs)), False)
        take_turns(runs)
        exclusive = len(runs) == 1
        runs.reverse()  # the first one ends first: what it held is not the later ones'
        return PlanRuns(tuple(self._freed(plan, runs, exclusive) for plan in self.plans), True)

    def _in_sequence(self, begun: list[Run]) -> Iterator[PlanRun]:
        """The first run goes on alone; the others start again, each once the one before is closed."""
        for run in begun[1:]:
            run.engine.close()
        del begun[1:]
        take_turns(begun)
        yield self._freed(self.plans[0], begun, exclusive=False)  # others had begun
        for index in range(1, len(self.plans)):
            kept = self.plans[index].weights.target_format
            self.weights = {kind: weights for kind, weights in self.weights.items() if kind == kept}
            run = self._begun(index)
            take_turns([run])
            yield self._ended(self.plans[index], run, exclusive=True)
            del run

    def _begun(self, index: int) -> Run:
        """The run of a plan after its prefill."""
        from ridgeplan import runtime

        plan, options = self.plans[index], self.options
        if options.on_progress is not None:
            options.on_progress(index, 0)
        shared = self.weights.get(plan.weights.target_format)
        others = (held for held in self.weights.values() if held is not shared and held.embedding.is_cuda)
        others_bytes = sum(held.bytes for held in others)
        fitted = options.calibration if plan.weights.quantized else None
        engine = runtime.load(
            plan, options.model, device=options.device, weights=shared, calibration=fitted, profile=self.profile,
            retrieval_head=options.retrieval_head if missing_head(plan) else None,
        )  # fmt: skip
        self.weights[plan.weights.target_format] = engine.weights
        progress = None if options.on_progress is None else partial(options.on_progress, index)
        try:
            return Run(engine, options.prompts, options.max_new_tokens, options.sampling, progress, others_bytes)
        except runtime.WorkloadError:
            engine.close()
            raise

    def _freed(self, plan: Plan, runs: list[Run], exclusive: bool) -> PlanRun:
        """The comparison of the last of the finished runs, which is then freed.

        The freed bytes are what the run itself held. Workspaces that libraries keep are not among them, and every run's
        peak contains those, whichever run needed them first.
        """
        before_bytes = self._allocated_bytes()
        plan_run = self._ended(plan, runs.pop(), exclusive)
        gc.collect()
        self.freed_bytes += before_bytes - self._allocated_bytes()
        return plan_run

    def _allocated_bytes(self) -> int:
        """Memory that torch has allocated on the weights' GPU; 0 on a CPU."""
        device = next(iter(self.weights.values())).embedding.device
        if device.type != "cuda":
            return 0
        import torch

        return torch.cuda.memory_allocated(device)

    def _ended(self, plan: Plan, run: Run, exclusive: bool) -> PlanRun:
        """The comparison of a finished run, whose engine is closed."""
        engine, measured = run.engine, run.measured(exclusive=exclusive, freed_bytes=self.freed_bytes)
        engine.close()
        self.plain = self.plain or measured
        texts = tuple(engine.tokenizer.batch_decode([list(tokens) for tokens in measured.tokens]))
        compared = compare_measured(engine.plan, shape_of(plan, engine), self.profile, measured, self.plain)
        return PlanRun(measured, compared, texts)
