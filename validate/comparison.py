"""Comparison of a plan's prediction with its measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.planner.plan import Plan
from ridgeplan.planner.policies.selection.all import autoregressive
from ridgeplan.planner.prediction import Prediction, predict
from ridgeplan.planner.presets import preset_name
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.evaluate import evaluate
from ridgeplan.roofline.latency import Machine
from ridgeplan.validate.measure import Measured, last_run

if TYPE_CHECKING:
    from ridgeplan.runtime import Engine, Statistics

_UNITS = {"ms": (1.0, "{:.2f} ms"), "bytes": (1 / 2**20, "{:.0f} MiB"), "": (1.0, "{:.3f}"), "x": (1.0, "{:.2f}x")}


@dataclass(frozen=True)
class ComparisonRow:
    """One figure. `unit` is "ms", "bytes", "x" or "" for a plain number; `measured` is None if it was not measured."""

    name: str
    unit: str
    predicted: float
    measured: float | None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; positive if it was too high."""
        return self.predicted / self.measured - 1 if self.measured else None

    def texts(self) -> tuple[str, str, str, str]:
        """Name, predicted, measured and error, formatted."""
        scale, form = _UNITS[self.unit]
        measured = "not measured" if self.measured is None else form.format(scale * self.measured)
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
        return {"preset": self.preset, **workload, "source": self.source, "rows": rows}

    def __str__(self) -> str:
        """A plain table."""
        title = f"{self.preset}, context {self.context}, {self.new_tokens} new tokens, batch {self.batch}"
        lines = [("", "predicted", "measured", "error"), *(row.texts() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
        ]
        return "\n".join([title, *table])


def compare(plan: Plan, engine: Engine, plain: Statistics | None = None, profile: Profile | None = None) -> Comparison:
    """Compares the prediction of `plan` with the engine's last generation.

    The prediction is for the actual lengths and batch. To separate errors of the acceptance model from errors of the
    cost model, TPOT is also predicted at the measured acceptance. plain: statistics of plain decoding of the same
    prompts, for the measured speed-up. profile: by default this machine's calibrated one.
    Raises ProfileError if this machine is not calibrated, WorkloadError before a generation.
    """
    return compare_measured(plan, shape_of(plan, engine), profile or this_machine(), last_run(engine), plain)


def compare_measured(
    plan: Plan, shape: ModelShape, profile: Profile, measured: Measured, plain: Statistics | None = None
) -> Comparison:
    """`compare` for an existing measurement."""
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
    """Predicted time per output token at this conditional acceptance."""
    machine = Machine.of(profile)
    strategy, rates = strategy_of(plan, shape, machine, acceptance), rates_of(plan, shape, machine)
    return 1e3 * float(evaluate(shape, machine, strategy, rates).tpot_s)


def shape_of(plan: Plan, engine: Engine) -> ModelShape:
    """The shape of the engine's model, with the plan's name for it, which the acceptance model looks up."""
    return replace(engine.config.shape, name=plan.workload.model)


def _time_rows(predicted: Prediction, statistics: Statistics) -> list[ComparisonRow]:
    prefill = ComparisonRow("prefill", "ms", predicted.best.ttft_ms, statistics.ttft_ms)
    # The engine's verification time includes sampling, which the cost model counts separately.
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
