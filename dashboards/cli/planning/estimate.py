"""`ridgeplan estimate`: the predicted figures of a given plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli.lazy_group import examples
from ridgeplan.dashboards.cli.options import (
    TOKENS,
    OutputFile,
    SavedPlanFile,
    acceptance_file,
    as_json,
    memory_utilization,
    options,
    profile_file,
    yarn,
)
from ridgeplan.dashboards.cli.output import number, print_json, print_table, write_atomically
from ridgeplan.dashboards.cli.planning.options import (
    BATCH,
    CTX,
    DEFAULT_NEW_TOKENS,
    FIGURES,
    GPU_HELP,
    NEW_TOKENS,
    context_of,
    figures,
    max_model_len,
    memory_limit,
)
from ridgeplan.planner import Plan, Prediction
from ridgeplan.planner.capacity import usable_bytes
from ridgeplan.planner.interface.glossary import SOURCE_WORDS
from ridgeplan.planner.interface.plan_file import SavedPlan, plan_json
from ridgeplan.planner.interface.quantities import size_text
from ridgeplan.planner.measured_quality import saved_rows
from ridgeplan.planner.prediction import predict_all
from ridgeplan.planner.presets import preset_name
from ridgeplan.planner.quality import Quality, stated_losses
from ridgeplan.planner.search import Objective, Question, best_of_preset
from ridgeplan.planner.search.question import ask
from ridgeplan.planner.support import missing_execution, only_estimated
from ridgeplan.roofline.catalog.shapes import ModelShape


@click.command(
    epilog=examples(
        "ridgeplan estimate Llama-3.1-8B --preset quantspec --gpu h200 --ctx 128k",
        "ridgeplan estimate Llama-3.1-8B --preset quantspec --gpu h200 --ctx 128k --gamma 4 -o plan.json",
        "ridgeplan estimate --plan plan.json --gpu h100",
    )
)
@click.argument("model", required=False)
@options(
    click.option("--preset", help="A named plan of `ridgeplan list presets`."),
    click.option("--plan", type=SavedPlanFile(), help="A plan's file instead, which has its own model, GPU and size."),
    click.option("--gpu", help=GPU_HELP),
    click.option(*CTX, type=TOKENS, help="Tokens of a prompt, such as 128k."),
    max_model_len,
    click.option(*BATCH, type=int, help="Sequences at a time.  [default: 1]"),
    click.option(*NEW_TOKENS, type=TOKENS, help=f"Tokens to generate for each.  [default: {DEFAULT_NEW_TOKENS}]"),
    click.option("--gamma", type=int, help="Tokens drafted in a round.  [default: a preset's fastest, a plan's own]"),
    click.option("--adaptive", is_flag=True, help="Let gamma adapt to what is accepted, up to that many."),
    memory_utilization,
    memory_limit,
    profile_file,
    acceptance_file,
    yarn,
    click.option("-o", "--output", type=OutputFile(), help="Write the plan to this file, for `ridgeplan run`."),
    as_json,
)  # fmt: skip
def estimate(
    model: str | None, preset: str | None, plan: SavedPlan | None, gamma: int | None, adaptive: bool,
    output: Path | None, as_json: bool, **rest: Any,
) -> None:  # fmt: skip
    """Predicted figures of one preset for MODEL, or of a plan's file, with the time of every operation.

    A preset is taken at the gamma and ratio that are fastest for the question, as `ridgeplan plan` lists it.
    """
    asked = _of_plan(plan, model, preset, rest) if plan is not None else _of_preset(model, preset, gamma, rest)
    chosen = _drafting(asked.plan, gamma, adaptive)
    question, held = asked.question, asked.question.as_executed.shape
    plain, predicted = predict_all(
        [planner.preset("autoregressive", chosen.workload), chosen], held, question.profile, question.machine
    )
    if output:
        write_atomically(output, plan_json(chosen, question.shape, question.profile))
    known = list(question.notes(rest["memory_limit"]))
    report = _Report(chosen, held, predicted.against(plain), plain, question.memory_limit_bytes, known)
    if as_json:
        print_json(report.to_dict())
    else:
        report.print()


@dataclass(frozen=True)
class _Asked:
    """A plan, and the question that it answers."""

    plan: Plan
    question: Question


def _of_plan(saved: SavedPlan, model: str | None, preset: str | None, rest: dict[str, Any]) -> _Asked:
    """A file's plan, for another model or GPU where one is given."""
    stray = ("ctx", "max_model_len", "batch", "new_tokens", "yarn")
    _forbid_beside_plan({"--preset": preset} | {f"--{name.replace('_', '-')}": rest[name] for name in stray})
    shape, profile = saved.resolve(model, rest["gpu"], rest["profile"], rest["acceptance"])
    plan = saved.on(shape, profile)
    usable = usable_bytes(profile.hardware.memory_bytes, rest["memory_utilization"], rest["memory_limit"])
    return _Asked(plan, Question(shape, profile, plan.workload, Quality.LOSSY, Objective.LATENCY, usable))


def _of_preset(model: str | None, preset: str | None, gamma: int | None, rest: dict[str, Any]) -> _Asked:
    """A preset at its fastest hyperparameters; with a gamma of the user's, at the others that are published."""
    ctx, limit, new_tokens = rest["ctx"], rest["max_model_len"], rest["new_tokens"]
    new_tokens = DEFAULT_NEW_TOKENS if new_tokens is None else new_tokens
    if not (model and preset and rest["gpu"] and (ctx, limit) != (None, None)):
        raise click.UsageError("estimate needs MODEL, --preset, --gpu and --ctx, or --plan FILE")
    passed = ("memory_utilization", "memory_limit", "profile", "acceptance", "yarn")
    question = ask(
        model, rest["gpu"], context_of(ctx, limit, new_tokens), batch=1 if rest["batch"] is None else rest["batch"],
        new_tokens=new_tokens, quality="lossy", **{name: rest[name] for name in passed},
    )  # fmt: skip
    if gamma is not None:
        return _Asked(planner.preset(preset, question.workload), question)
    return _Asked(best_of_preset(preset, question.as_executed).plan, question)


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
        misfit = "" if self.fits else f"; does not fit {size_text(self.usable_bytes)}"
        click.echo(f"{workload.model} on {workload.hardware}, {size} [{predicted.source}]{misfit}")
        click.echo(f"  [{predicted.source}]: {SOURCE_WORDS[predicted.source]}")
        for loss in self.losses:
            click.echo(f"  gives up: {loss}")
        unsupported = only_estimated(self.plan, self.shape)
        for note in (*self.notes, *([unsupported] if unsupported else [])):
            click.echo(f"  note: {note}")
        rows = [(preset_name(self.plan), *figures(predicted), _adapting(self.plan)),
                ("autoregressive", *figures(self.baseline), "plain decoding")]  # fmt: skip
        print_table("Prediction (TTFT and tokens/s of the whole batch)", ("plan", *FIGURES, ""), rows)
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


def _adapting(plan: Plan) -> str:
    return f"adaptive up to {plan.speculation.gamma}" if plan.speculation.adaptive else ""


def _forbid_beside_plan(given: dict[str, Any]) -> None:
    """A plan's file holds its own workload, so options for it are refused."""
    stray = next((name for name, value in given.items() if value is not None and value is not False), None)
    if stray:
        raise click.UsageError(f"{stray} cannot be given with --plan, which has its own")
