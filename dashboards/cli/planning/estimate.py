"""`ridgeplan estimate`: the predicted figures of a given plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli.options import (
    OutputFile,
    PlanFile,
    acceptance_file,
    as_json,
    memory_utilization,
    options,
    profile_file,
    yarn,
)
from ridgeplan.dashboards.cli.output import number, print_json, print_table, write_atomically
from ridgeplan.dashboards.cli.planning.options import FIGURES, GPU_HELP, figures, memory_limit
from ridgeplan.planner import Plan, Prediction
from ridgeplan.planner.capacity import usable_bytes
from ridgeplan.planner.measured_quality import saved_rows
from ridgeplan.planner.prediction import predict_all
from ridgeplan.planner.presets import preset_name
from ridgeplan.planner.quality import stated_losses
from ridgeplan.planner.resolution import within_context
from ridgeplan.planner.search import notes
from ridgeplan.planner.support import as_loaded, missing_execution, only_estimated
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.device import GIB
from ridgeplan.roofline.latency import Machine


@click.command()
@click.argument("model", required=False)
@options(
    click.option("--preset", help="A named plan, such as quantspec."),
    click.option("--plan", type=PlanFile(), help="A plan's file instead; it names model, GPU and context itself."),
    click.option("--gpu", help=GPU_HELP),
    click.option("--ctx", type=int, help="Tokens of a prompt."),
    click.option("--batch", type=int, help="Sequences at a time.  [default: 1]"),
    click.option("--new-tokens", type=int, help="Tokens to generate for each.  [default: 1024]"),
    click.option("--gamma", type=int, help="Tokens drafted in a round.  [default: the plan's]"),
    click.option("--adaptive", is_flag=True, help="Let gamma adapt to what is accepted, up to that many."),
    memory_utilization,
    memory_limit,
    profile_file,
    acceptance_file,
    yarn,
    click.option("--output", type=OutputFile(), help="Write the plan to this file, for `ridgeplan run`."),
    as_json,
)
def estimate(
    model: str | None, preset: str | None, plan: Plan | None, gpu: str | None, ctx: int | None, batch: int | None,
    new_tokens: int | None, gamma: int | None, adaptive: bool, memory_utilization: float,
    memory_limit: float | None, profile: str | None, acceptance: str | None, yarn: bool, output: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Predicted figures of one preset for MODEL, or of a plan's file, with the time of every operation."""
    if plan is not None:
        stray = {"--preset": preset, "--ctx": ctx, "--batch": batch, "--new-tokens": new_tokens, "--yarn": yarn}
        _forbid_beside_plan(stray)
        shape, used = planner.resolve(
            plan.workload.model if model is None else model,
            plan.workload.hardware if gpu is None else gpu,
            profile,
            acceptance,
        )
        asked = replace(plan.workload, model=shape.name, hardware=used.hardware.name)
        plan = replace(plan, workload=within_context(asked, shape))
    else:
        if not (model and preset and gpu and ctx is not None):
            raise click.UsageError("estimate needs MODEL, --preset, --gpu and --ctx, or --plan FILE")
        shape, used = planner.resolve(model, gpu, profile, acceptance)
        workload = planner.workload_for(shape, used, ctx, 1024 if new_tokens is None else new_tokens,
                                        1 if batch is None else batch, yarn=yarn)  # fmt: skip
        plan = planner.preset(preset, workload)
    plan = _drafting(plan, gamma, adaptive)
    usable = usable_bytes(used.hardware.memory_bytes, memory_utilization, memory_limit)
    machine = replace(Machine.of(used), memory_bytes=usable)
    known, held = list(notes(shape, used, plan.workload, memory_limit, usable)), as_loaded(shape)
    plain, predicted = predict_all([planner.preset("autoregressive", plan.workload), plan], held, used, machine)
    if output:
        write_atomically(output, plan.to_json() + "\n")
    report = _Report(plan, held, predicted.against(plain), plain, usable, known)
    if as_json:
        print_json(report.to_dict())
    else:
        report.print()


@dataclass(frozen=True)
class _Report:
    """What the command shows."""

    plan: Plan
    shape: ModelShape
    predicted: Prediction
    baseline: Prediction
    usable_bytes: float
    notes: list[str]

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within what may be used."""
        return self.predicted.best.peak_memory_bytes <= self.usable_bytes

    @property
    def losses(self) -> list[str]:
        """What the plan gives up, measured where `ridgeplan quality` was run on it."""
        return stated_losses(self.plan, saved_rows())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        operations = [{**asdict(op), "intensity": op.intensity} for op in self.predicted.breakdown]
        return {
            "plan": self.plan.to_dict(),
            "preset": preset_name(self.plan),
            "predicted": {**self.predicted.to_dict(), "breakdown": operations},
            "baseline": self.baseline.to_dict(),
            "fits": self.fits,
            "memory_limit_bytes": self.usable_bytes,
            "not_executable": missing_execution(self.plan, self.shape),
            "losses": self.losses,
            "notes": self.notes,
        }

    def print(self) -> None:
        """A headline, notes, and tables of figures and operations."""
        workload, predicted = self.plan.workload, self.predicted
        size = f"{workload.context} tokens of context, batch {workload.batch}"
        misfit = "" if self.fits else f"; does not fit {self.usable_bytes / GIB:.1f} GiB"
        click.echo(f"{workload.model} on {workload.hardware}, {size} [{predicted.source}]{misfit}")
        for loss in self.losses:
            click.echo(f"  gives up: {loss}")
        unsupported = only_estimated(self.plan, self.shape)
        for note in (*self.notes, *([unsupported] if unsupported else [])):
            click.echo(f"  note: {note}")
        rows = [(preset_name(self.plan), *figures(predicted), _rounds(self.plan, predicted)),
                ("autoregressive", *figures(self.baseline), "plain decoding")]  # fmt: skip
        print_table("Prediction", ("plan", *FIGURES, ""), rows)
        print_table(
            "Operations of one prompt's prefill, a draft step and a target step",
            ("operation", "launches", "ms", "GFLOP", "MB", "FLOP/byte", "kernel class"),
            ((f"{op.part}: {op.op}", f"{op.launches}", number(1e3 * op.seconds), number(op.flops / 1e9),
              number(op.bytes / 1e6), number(op.intensity), op.kind) for op in predicted.breakdown),
        )  # fmt: skip


def _drafting(plan: Plan, gamma: int | None, adaptive: bool) -> Plan:
    """The plan with another gamma, or one that adapts. Raises UsageError for a plan without drafts."""
    option = f"--gamma is {gamma}" if gamma is not None else "--adaptive is given"
    if (gamma is not None or adaptive) and not plan.speculation.active:
        raise click.UsageError(f"{option}; allowed: none, as {preset_name(plan)} drafts nothing")
    speculation = plan.speculation if gamma is None else replace(plan.speculation, gamma=gamma)
    return replace(plan, speculation=replace(speculation, adaptive=speculation.adaptive or adaptive))


def _rounds(plan: Plan, predicted: Prediction) -> str:
    bound = f", adaptive up to {plan.speculation.gamma}" if plan.speculation.adaptive else ""
    return f"gamma {predicted.gamma}{bound}"


def _forbid_beside_plan(given: dict[str, Any]) -> None:
    """A plan's file holds its own workload, so options for it are refused."""
    stray = next((name for name, value in given.items() if value is not None and value is not False), None)
    if stray:
        raise click.UsageError(f"{stray} cannot be given with --plan, which has its own")
