"""Tables of docs/benchmarks/acceptance.md: how near the regression comes to rows and runs that it has not seen."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from readme_tables import ABLATION, decoding_files, result, table

from ridgeplan.planner.acceptance import AcceptanceModel, shipped_rows
from ridgeplan.planner.acceptance.model import observation, spans_of
from ridgeplan.planner.acceptance.regression import EffectsPosterior, fit, saved_bands
from ridgeplan.planner.acceptance.rows import AcceptanceRow
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import load_profile
from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.roofline.plan.presets import short_name
from ridgeplan.validate.comparison import tpot_ms_at
from ridgeplan.validate.decode_bench.report import DecodeCase

# Cross-validation is a program outside the package.
sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from cross_validation import HeldOut, context_group, leave_out, model_group

ROOT = Path(__file__).parents[1]
PROFILE = ROOT / "roofline" / "catalog" / "profiles" / "nvidia-h200.json"
# Calibrated with the kernels that decode runs before INTEGERS_SINCE had: low-bit products of 16-bit floats.
FORMER_PROFILE, INTEGERS_SINCE = ROOT / "validate" / "results" / "profile_h200.json", "2026-11-28"
LONG = 32768  # tokens; rows beyond are predicted without any of their group


def acceptance_errors(left_out: str) -> str:
    """Errors of rows that are predicted without their `model` or their `context`: a line for each policy."""
    held = _held_out(left_out)
    policies = sorted({item.policy for item in held})
    lines = [(policy, [item for item in held if item.policy == policy]) for policy in policies]
    lines.append(("all", held))
    if left_out == "context":
        lines.append((f"all beyond {LONG} tokens", [item for item in held if item.row.context > LONG]))
    columns = ("draft", "rows", "bias", "rmse", "90% bands hold", "mean width")
    return table(columns, ((name, str(len(items)), *_figures(items)) for name, items in lines))


@cache
def _held_out(left_out: str) -> list[HeldOut]:
    return leave_out(shipped_rows(), {"model": model_group, "context": context_group}[left_out])


def _figures(items: list[HeldOut]) -> tuple[str, ...]:
    bands = saved_bands()
    errors = [item.error for item in items]
    widths = [high - low for low, high in (item.band(bands) for item in items)]
    return (
        f"{fmean(errors):+.3f}",
        f"{sqrt(fmean(error**2 for error in errors)):.3f}",
        f"{fmean(item.within(bands) for item in items):.0%}",
        f"{fmean(widths):.3f}",
    )


@dataclass(frozen=True)
class DecodeRun:
    """A stored run of a plan that drafts, with its plan, and the function that the run computes."""

    report: dict[str, Any]
    row: dict[str, Any]
    plan: Plan

    @property
    def measured(self) -> float:
        """The acceptance."""
        return float(self.row["measured"]["acceptance"])

    def predicted(self, rows: tuple[AcceptanceRow, ...], fitted: EffectsPosterior) -> float:
        """The acceptance that a regression predicts for the small model whose function the run computes."""
        function = self.report["function"]
        name, limit = function["name"], function["max_context"]
        known = AcceptanceModel.of_profile(
            load_shape(self.report["shape"]), self.plan.workload.context, _profile(PROFILE)
        )
        small = replace(
            known, rows=rows, fitted=fitted, name=name, parameters=function["parameters"] / 1e9, limit=limit,
            spans=spans_of(rows, name),
        )  # fmt: skip
        return small.of(self.plan).best

    def error(self, acceptance: float) -> float:
        """The relative error of the time per token that is predicted at an acceptance."""
        profile = _profile(FORMER_PROFILE if self.report["date"] < INTEGERS_SINCE else PROFILE)
        predicted_ms = tpot_ms_at(self.plan, load_shape(self.report["shape"]), profile, acceptance)
        return predicted_ms / float(self.row["measured"]["tpot_ms"]) - 1


def decode_acceptance() -> str:
    """Stored decode runs: measured and predicted acceptance, and the errors of times at either."""
    rows = tuple(row for row in shipped_rows() if "as the model continues it" not in row.text)
    fitted = fit([observation(row) for row in rows])
    lines, differences, errors, at_measured = [], [], [], []
    for run in _runs():
        predicted = run.predicted(rows, fitted)
        differences.append(predicted - run.measured)
        errors.append(run.error(predicted))
        at_measured.append(run.error(run.measured))
        workload = f"{run.plan.workload.context}x{run.plan.workload.batch}"
        lines.append(
            (short_name(run.row["preset"]), workload, str(run.row["gamma"]), f"{run.measured:.3f}", f"{predicted:.3f}",
             f"{run.row['measured']['tpot_ms']:.2f}", f"{errors[-1]:+.1%}", f"{at_measured[-1]:+.1%}")
        )  # fmt: skip
    lines.append(
        (f"mean of {len(lines)}", "", "", "", f"{fmean(differences):+.3f}", "", f"{fmean(errors):+.1%}",
         f"{fmean(at_measured):+.1%}")
    )  # fmt: skip
    sizes = [[abs(each) for each in values] for values in (differences, errors, at_measured)]
    lines.append(
        ("mean without signs", "", "", "", f"{fmean(sizes[0]):.3f}", "", *(f"{fmean(each):.1%}" for each in sizes[1:]))
    )
    columns = (
        "plan", "workload", "gamma", "acceptance", "predicted", "ms per token", "error of the prediction",
        "at the measured acceptance",
    )  # fmt: skip
    return table(columns, lines)


MIN_PLANS = 3  # of a workload that tells how well plans are ranked


def decode_regret() -> str:
    """Workloads of stored decode runs: the plan that is predicted to be the fastest there, and the fastest one.

    Plans that keep all tokens; of one that ran more than once, the mean.
    """
    rows = tuple(row for row in shipped_rows() if "as the model continues it" not in row.text)
    fitted = fit([observation(row) for row in rows])
    by_workload: dict[tuple[int, int], dict[str, list[tuple[float, float]]]] = {}
    for run in _runs(drafting=False):
        workload, measured_ms = run.plan.workload, float(run.row["measured"]["tpot_ms"])
        if run.plan.eviction.active or run.plan.attention.active:
            continue
        acceptance = run.predicted(rows, fitted) if run.row["gamma"] else 1.0
        name = short_name(run.row["preset"]) + (f", gamma {run.row['gamma']}" if run.row["gamma"] else "")
        plans = by_workload.setdefault((workload.context, workload.batch), {})
        plans.setdefault(name, []).append((measured_ms * (1 + run.error(acceptance)), measured_ms))
    lines, regrets = [], []
    for (context, batch), plans in sorted(by_workload.items()):
        if len(plans) >= MIN_PLANS:
            times = {name: tuple(map(fmean, zip(*runs, strict=True))) for name, runs in plans.items()}
            chosen, fastest = (min(times, key=lambda name: times[name][place]) for place in (0, 1))
            regrets.append(times[chosen][1] / times[fastest][1] - 1)
            figures = (chosen, f"{times[chosen][1]:.2f}", fastest, f"{times[fastest][1]:.2f}", f"{regrets[-1]:.1%}")
            lines.append((f"{context}x{batch}", str(len(plans)), *figures))
    lines.append((f"mean of {len(lines)}", "", "", "", "", "", f"{fmean(regrets):.1%}"))
    return table(("workload", "plans", "predicted fastest", "ms per token", "fastest", "ms per token", "regret"), lines)


def _runs(*, drafting: bool = True) -> Iterable[DecodeRun]:
    """Those of plans that draft, or all but the older version's."""
    for name in decoding_files():
        if not drafting and name == ABLATION:
            continue
        report = result(name)
        shape = replace(load_shape(report["shape"]), max_context=report["function"]["max_context"])
        for row in report["rows"]:
            if row["gamma"] or not drafting:
                fields = {field: row[field] for field in ("adaptive", "share", "chunk") if row.get(field)}
                plan = Plan.from_dict(row["given"]) if row.get("given") else None
                case = DecodeCase(row["preset"], row["context"], row["batch"], row["gamma"], **fields, saved_plan=plan)
                new_tokens = row["measured"]["generated"] // row["batch"]
                yield DecodeRun(report, row, case.plan(shape, _profile(PROFILE), new_tokens))


@cache
def _profile(path: Path) -> Any:
    return load_profile(path)
