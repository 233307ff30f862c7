"""What an engine measured, and the prediction for exactly that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.planner.plan import Plan, Workload
from ridgeplan.planner.policies.selection.all import autoregressive
from ridgeplan.planner.prediction import Prediction, predict
from ridgeplan.planner.presets import preset_name
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.evaluate import evaluate
from ridgeplan.roofline.latency import Machine
from ridgeplan.validate.comparison import Comparison, ComparisonRow

if TYPE_CHECKING:
    from ridgeplan.runtime import Engine, SamplingParams, Statistics

WARM_TOKENS = 512


@dataclass(frozen=True)
class Measured:
    """One generation: its workload as it really was (averages over the batch), statistics, and new tokens if kept."""

    context: int
    new_tokens: int
    batch: int
    statistics: Statistics
    tokens: tuple[tuple[int, ...], ...] = ()

    def workload(self, planned: Workload) -> Workload:
        """The planned workload with the lengths that were run."""
        return replace(planned, context=self.context, new_tokens=self.new_tokens, batch=self.batch)


def measure(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> Measured:
    """Generates, greedily without `sampling`, and takes the figures.

    Stop tokens are ignored, so that all sequences have the same length.
    """
    sampling = None if sampling is None else replace(sampling, stop_token_ids=())
    if engine.device.type == "cuda":
        # Kernels are compiled and graphs captured at first use, which is no part of any figure. Neither depends on
        # how long prompts are.
        short = [prompt[:WARM_TOKENS] for prompt in prompts]
        engine.generate(short, min(2, max_new_tokens), sampling)
    generation = engine.generate(prompts, max_new_tokens, sampling, on_progress=on_progress)
    return replace(last_run(engine), tokens=tuple(map(tuple, generation.tokens)))


def last_run(engine: Engine) -> Measured:
    """The engine's last generation. Raises WorkloadError before there is one."""
    statistics = engine.statistics
    batch = len(statistics.prompt_tokens)
    return Measured(
        context=round(sum(statistics.prompt_tokens) / batch),
        new_tokens=max(1, round(statistics.generated / batch)),
        batch=batch,
        statistics=statistics,
    )


def compare(plan: Plan, engine: Engine, plain: Statistics | None = None, profile: Profile | None = None) -> Comparison:
    """The prediction of `plan` beside the engine's last generation.

    The prediction is made for the lengths and batch that were run. It stands on what is known of acceptance; so
    that an error of acceptance can be told from one of the cost model, TPOT is also predicted at the acceptance
    that was measured. plain: statistics of plain decoding of the same prompts, for the measured speed-up.
    profile: the machine's, by default the calibrated one of this machine.
    Raises ProfileError where this machine is not calibrated, WorkloadError before a generation.
    """
    return comparison(plan, shape_of(plan, engine), profile or this_machine(), last_run(engine), plain)


def comparison(
    plan: Plan, shape: ModelShape, profile: Profile, measured: Measured, plain: Statistics | None = None
) -> Comparison:
    """`compare` of figures that are at hand."""
    workload = measured.workload(plan.workload)
    plan = replace(plan, workload=workload)
    baseline = predict(autoregressive(workload), shape, profile)
    predicted = predict(plan, shape, profile).against(baseline)
    at_measured_ms = tpot_ms_at(plan, shape, profile, measured.statistics.acceptance)
    rows = (
        *_time_rows(predicted, measured.statistics),
        *_token_rows(predicted, measured.statistics, at_measured_ms),
        *_whole_rows(predicted, measured.statistics, plain),
    )
    return Comparison(preset_name(plan), workload.context, workload.new_tokens, workload.batch, predicted.source, rows)


def tpot_ms_at(plan: Plan, shape: ModelShape, profile: Profile, acceptance: float) -> float:
    """Predicted time per output token where drafts are accepted at this conditional rate."""
    machine = Machine.of(profile)
    strategy, rates = strategy_of(plan, shape, machine, acceptance), rates_of(plan, shape, machine)
    return 1e3 * float(evaluate(shape, machine, strategy, rates).tpot_s)


def shape_of(plan: Plan, engine: Engine) -> ModelShape:
    """The shape of the engine's model, under the plan's name for it, by which acceptance is looked up."""
    return replace(engine.config.shape, name=plan.workload.model)


def _time_rows(predicted: Prediction, statistics: Statistics) -> list[ComparisonRow]:
    prefill = ComparisonRow("prefill", "ms", predicted.best.ttft_ms, statistics.ttft_ms)
    # The engine times a verification with its sampling, which the model counts apart.
    target_ms = predicted.verify_ms + 1e3 * predicted.round_s["acceptance"]
    if not predicted.gamma:
        return [prefill, ComparisonRow("decode step", "ms", target_ms, 1e3 * statistics.verify_s)]
    return [
        prefill,
        ComparisonRow("draft step", "ms", predicted.draft_step_ms, 1e3 * statistics.draft_s),
        ComparisonRow("verification", "ms", target_ms, 1e3 * statistics.verify_s),
    ]


def _token_rows(predicted: Prediction, statistics: Statistics, at_measured_ms: float) -> list[ComparisonRow]:
    tpot = ComparisonRow("tpot", "ms", predicted.best.tpot_ms, statistics.tpot_ms)
    if not predicted.gamma:
        return [tpot]
    return [
        ComparisonRow("acceptance", "", predicted.acceptance.best, statistics.acceptance),
        ComparisonRow("tokens per round", "", predicted.tokens_per_round, statistics.tokens_per_round),
        tpot,
        ComparisonRow("tpot at the measured acceptance", "ms", at_measured_ms, statistics.tpot_ms),
    ]


def _whole_rows(predicted: Prediction, statistics: Statistics, plain: Statistics | None) -> list[ComparisonRow]:
    peak = statistics.peak_memory_bytes
    faster = plain.tpot_ms / statistics.tpot_ms if plain and statistics.tpot_ms else None
    return [
        ComparisonRow("peak memory", "bytes", predicted.best.peak_memory_bytes, None if peak is None else float(peak)),
        ComparisonRow("speed-up over plain decoding", "x", predicted.speedup, faster),
    ]
