"""Comparison of a plan's prediction with its measurement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeplan.planner.acceptance.drafter_rows import acceptance_of
from ridgeplan.planner.lowering import rates_of, round_costs, strategy_of, with_kinds
from ridgeplan.planner.prediction import Prediction, predict
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.evaluate import evaluate
from ridgeplan.roofline.execution import round_shape
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.roofline.plan.policies.dense import plain_beside
from ridgeplan.roofline.plan.presets import preset_name
from ridgeplan.validate.measure import Measured, is_busy, last_run, widest

if TYPE_CHECKING:
    from ridgeplan.runtime import Engine, Statistics

SPEEDUP = "speed-up over plain decoding"
_UNITS = {"ms": (1.0, "{:.2f} ms"), "bytes": (1e-9, "{:.3f} GB"), "": (1.0, "{:.3f}"), "x": (1.0, "{:.2f}x")}


@dataclass(frozen=True)
class ComparisonRow:
    """One figure. `unit` is "ms", "bytes", "x" or "" for a plain number.

    measured: None if it was not measured. `reason` then says why.
    """

    name: str
    unit: str
    predicted: float
    measured: float | None
    reason: str = "not measured"

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; positive if it was too high."""
        return self.predicted / self.measured - 1 if self.measured else None

    def texts(self) -> tuple[str, str, str, str]:
        """Name, predicted, measured and error, formatted."""
        scale, form = _UNITS[self.unit]
        measured = self.reason if self.measured is None else form.format(scale * self.measured)
        error = "" if self.error is None else f"{self.error:+.0%}"
        return self.name, form.format(scale * self.predicted), measured, error


@dataclass(frozen=True)
class Comparison:
    """A plan's predicted and measured figures, for the workload that was run."""

    preset: str
    context: int
    new_tokens: int
    batch: int
    source: str  # the prediction's weakest source
    rows: tuple[ComparisonRow, ...]
    spread: float | None = None  # of the rounds' times, the baseline's included; None if there were too few
    predicted: Prediction | None = field(default=None, repr=False, compare=False)

    @property
    def busy(self) -> bool:
        """Whether other work slowed the machine while it was measured."""
        return is_busy(self.spread)

    def row(self, name: str) -> ComparisonRow:
        """The row of this name. Raises KeyError if there is none."""
        return {row.name: row for row in self.rows}[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        rows = [
            {"name": row.name, "unit": row.unit, "predicted": row.predicted, "measured": row.measured,
             "error": row.error}
            for row in self.rows
        ]  # fmt: skip
        workload = {"context": self.context, "new_tokens": self.new_tokens, "batch": self.batch}
        noise = {"spread": self.spread, "busy": self.busy, "speedup": self.row(SPEEDUP).measured}
        return {"preset": self.preset, **workload, "source": self.source, **noise, "rows": rows}

    def __str__(self) -> str:
        """A plain table."""
        title = f"{self.preset}, context {self.context}, {self.new_tokens} new tokens, batch {self.batch}"
        lines = [("", "predicted", "measured", "error"), *(row.texts() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
        ]
        return "\n".join([title, *table])


def compare(plan: Plan, engine: Engine, plain: Measured | None = None, profile: Profile | None = None) -> Comparison:
    """Compares the prediction of `plan` with the engine's last generation.

    The prediction is for the actual lengths and batch. To separate errors of the acceptance model from errors of the
    cost model, TPOT is also predicted at the measured acceptance. plain: plain decoding of the same prompts, for the
    measured speed-up. profile: by default this machine's calibrated one.
    Raises ProfileError if this machine is not calibrated, WorkloadError before a generation.
    """
    return compare_measured(plan, shape_of(plan, engine), profile or this_machine(), last_run(engine), plain)


def compare_measured(
    plan: Plan,
    shape: ModelShape,
    profile: Profile,
    measured: Measured,
    plain: Measured | None = None,
    function: ModelShape | None = None,
) -> Comparison:
    """`compare` for an existing measurement. function: see `predict_all`.

    The speed-up is left out where the spread of either run's rounds says that the machine was busy.
    """
    workload = measured.workload(plan.workload)
    plan = replace(plan, workload=workload)
    baseline = predict(plain_beside(plan), shape, profile)
    predicted = predict(plan, shape, profile, function=function).against(baseline)
    spread = widest((measured.spread, plain.spread if plain else None))
    rows = (*_rows(plan, predicted, measured, shape, profile), _speedup_row(predicted, measured, plain, spread))
    sizes = workload.context, workload.new_tokens, workload.batch
    return Comparison(preset_name(plan), *sizes, predicted.source, rows, spread, predicted)


def tpot_ms_at(
    plan: Plan, shape: ModelShape, profile: Profile, acceptance: float, proposals: tuple[float, float] | None = None
) -> float:
    """Predicted time per output token at this conditional acceptance; of rounds that adapt, at the best of them.

    proposals: hits of a plan's drafter and the conditional acceptance of its proposals, by default the predicted ones.
    """
    machine = Machine.of(profile)
    strategy, rates = strategy_of(plan, shape, machine, acceptance), rates_of(plan, shape, machine)
    if proposals is not None:
        strategy = replace(strategy, hit=proposals[0], proposal_acceptance=proposals[1])
    strategy = with_kinds(strategy, plan.speculation.round_kinds)
    return 1e3 * float(np.min(evaluate(shape, machine, strategy, rates).tpot_s))


def tpot_ms_of_rounds(plan: Plan, shape: ModelShape, profile: Profile, statistics: Statistics) -> float:
    """Predicted time per output token of the rounds that a plan which adapts took, at the tokens that these yielded."""
    seconds = {round_shape(kind): each for kind, each in round_costs(plan, shape, profile).seconds.items()}
    total_s = sum(rounds * seconds[kind] for kind, rounds in statistics.rounds_of)
    return 1e3 * total_s / statistics.rounds / statistics.tokens_per_round


def shape_of(plan: Plan, engine: Engine) -> ModelShape:
    """The shape of the engine's model, with the plan's name for it, which the acceptance model looks up."""
    return replace(engine.config.shape, name=plan.workload.model)


def _rows(
    plan: Plan, predicted: Prediction, measured: Measured, shape: ModelShape, profile: Profile
) -> Iterator[ComparisonRow]:
    statistics, drafting = measured.statistics, plan.speculation.active
    yield ComparisonRow("prefill", "ms", predicted.best.ttft_ms, statistics.ttft_ms)
    proposals_ms, passes = 1e3 * predicted.round_s.get("proposals", 0.0), plan.speculation.drafter.passes
    if plan.speculation.self_drafts:  # whose passes follow proposals in a cascade
        draft_ms = predicted.draft_step_ms + proposals_ms / max(passes, 1)
        yield ComparisonRow("draft step", "ms", draft_ms, 1e3 * statistics.draft_s)
    elif drafting:
        yield ComparisonRow("proposals", "ms", proposals_ms, 1e3 * statistics.propose_s)
    step = "verification" if drafting else "decode step"
    yield ComparisonRow(step, "ms", predicted.target_step_ms, 1e3 * statistics.verify_s)
    if drafting:
        yield ComparisonRow("acceptance", "", predicted.acceptance.best, statistics.acceptance)
        yield ComparisonRow("tokens per round", "", predicted.tokens_per_round, statistics.tokens_per_round)
    yield ComparisonRow("tpot", "ms", predicted.best.tpot_ms, measured.tpot_ms)
    if drafting:
        drafter, proposals = plan.speculation.drafter, None
        if drafter.active:
            accepted = statistics.proposal_acceptance if drafter.cascades else statistics.acceptance
            if drafter.cascades and not plan.speculation.adaptive:  # as of rows: what gives a pass its drafts
                accepted = acceptance_of(statistics.drafts_per_pass, statistics.hit_rate, drafter.depth)
            proposals = statistics.hit_rate, accepted
            yield ComparisonRow("rounds with proposals", "", predicted.drafting.hit, statistics.hit_rate)
        if plan.speculation.adaptive and statistics.rounds_of:
            at_measured_ms = tpot_ms_of_rounds(plan, shape, profile, statistics)
        else:
            at_measured_ms = tpot_ms_at(plan, shape, profile, statistics.acceptance, proposals)
        yield ComparisonRow("tpot at the measured acceptance", "ms", at_measured_ms, measured.tpot_ms)
    peak_bytes = statistics.peak_memory_bytes
    measured_peak = None if peak_bytes is None else float(peak_bytes)
    yield ComparisonRow("peak memory", "bytes", predicted.best.peak_memory_bytes, measured_peak)


def _speedup_row(
    predicted: Prediction, measured: Measured, plain: Measured | None, spread: float | None
) -> ComparisonRow:
    if spread is not None and is_busy(spread):
        return ComparisonRow(SPEEDUP, "x", predicted.speedup, None, f"machine busy: spread {spread:.0%}")
    faster = plain.tpot_ms / measured.tpot_ms if plain and measured.tpot_ms else None
    return ComparisonRow(SPEEDUP, "x", predicted.speedup, faster)
