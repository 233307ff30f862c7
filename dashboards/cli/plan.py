"""`ridgeplan recommend` and `ridgeplan estimate`: the best plan, and the predicted figures of a given plan."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli.options import (
    OutputFile,
    PlanFile,
    Size,
    acceptance_file,
    as_json,
    options,
    profile_file,
    yarn,
)
from ridgeplan.dashboards.cli.output import number, print_json, print_table, write_atomically
from ridgeplan.planner import Plan, Prediction, Recommendation
from ridgeplan.planner.presets import preset_name
from ridgeplan.planner.quality import Quality
from ridgeplan.planner.search import Objective, notes
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.device import GIB

GPU_HELP = "A name of `ridgeplan gpus`, a TOML file, or auto for this machine."
FIGURES = ("TPOT ms", "low", "high", "TTFT ms", "tokens/s", "GiB", "speed-up")


@click.command()
@click.argument("model")
@options(
    click.option("--gpu", required=True, help=GPU_HELP),
    click.option("--ctx", type=int, required=True, help="Tokens of a prompt."),
    click.option("--batch", type=int, default=1, show_default=True, help="Sequences at a time."),
    click.option("--new-tokens", type=int, default=1024, show_default=True, help="Tokens to generate for each."),
    click.option("--quality", type=click.Choice([*map(str, Quality)]), default="near-lossless", show_default=True,
                 help="What the target may give up."),
    click.option("--objective", type=click.Choice([*map(str, Objective)]), default="latency", show_default=True,
                 help="Minimize time per token, time of the whole request, or peak memory."),
    click.option("--memory-limit", type=Size(), help="Memory that may be used, such as 24GiB.  [default: all of it]"),
    profile_file,
    acceptance_file,
    yarn,
    click.option("--output", type=OutputFile(), help="Write the plan to this file."),
    as_json,
)  # fmt: skip
def recommend(model: str, gpu: str, ctx: int, output: Path | None, as_json: bool, **question: Any) -> None:
    """The fastest plan for MODEL on a GPU that fits and that can be executed.

    MODEL is a name of `ridgeplan models`, a config.json, a GGUF file, or a hub id in the local cache.
    """
    recommendation = planner.recommend(model, gpu, ctx, **question)
    if output:
        write_atomically(output, recommendation.plan.to_json() + "\n")
    if as_json:
        print_json(recommendation.to_dict())
    else:
        _print_recommendation(recommendation)


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
    profile_file,
    acceptance_file,
    yarn,
    as_json,
)
def estimate(
    model: str | None, preset: str | None, plan: Plan | None, gpu: str | None, ctx: int | None, batch: int | None,
    new_tokens: int | None, gamma: int | None, profile: str | None, acceptance: str | None, yarn: bool, as_json: bool,
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
    else:
        if not (model and preset and gpu and ctx is not None):
            raise click.UsageError("estimate needs MODEL, --preset, --gpu and --ctx, or --plan FILE")
        shape, used = planner.resolve(model, gpu, profile, acceptance)
        workload = planner.workload_for(shape, used, ctx, 1024 if new_tokens is None else new_tokens,
                                        1 if batch is None else batch, yarn=yarn)  # fmt: skip
        plan = planner.preset(preset, workload)
    if gamma is not None:
        plan = replace(plan, speculation=replace(plan.speculation, gamma=gamma))
    _report_estimate(plan, shape, used, as_json)


def figures(predicted: Prediction) -> tuple[str, ...]:
    """The cells of `FIGURES`."""
    best = predicted.best
    return (
        number(best.tpot_ms), number(predicted.low.tpot_ms), number(predicted.high.tpot_ms), number(best.ttft_ms),
        number(best.tokens_per_s), f"{best.peak_memory_bytes / GIB:.2f}", f"{predicted.speedup:.2f}x",
    )  # fmt: skip


def _print_recommendation(recommendation: Recommendation) -> None:
    click.echo(recommendation.explain() + "\n")
    rows = [(recommendation.name, *figures(recommendation.predicted), "recommended")]
    rows += [(other.preset, *figures(other.predicted), other.rejected) for other in recommendation.alternatives]
    print_table("Plans", ("plan", *FIGURES, "verdict"), rows)


def _forbid_beside_plan(given: dict[str, Any]) -> None:
    """A plan's file holds its own workload, so options for it are refused."""
    stray = next((name for name, value in given.items() if value is not None and value is not False), None)
    if stray:
        raise click.UsageError(f"{stray} cannot be given with --plan, which has its own")


def _report_estimate(plan: Plan, shape: ModelShape, profile: Profile, as_json: bool) -> None:
    baseline = planner.predict(planner.preset("autoregressive", plan.workload), shape, profile)
    predicted = planner.predict(plan, shape, profile).against(baseline)
    capacity = profile.hardware.memory_bytes
    fits = predicted.best.peak_memory_bytes <= capacity
    known = list(notes(shape, profile, plan.workload))
    if as_json:
        operations = [{**asdict(op), "intensity": op.intensity} for op in predicted.breakdown]
        print_json({
            "plan": plan.to_dict(),
            "preset": preset_name(plan),
            "predicted": {**predicted.to_dict(), "breakdown": operations},
            "baseline": baseline.to_dict(),
            "fits": fits,
            "notes": known,
        })  # fmt: skip
        return
    workload = plan.workload
    click.echo(f"{workload.model} on {workload.hardware}, {workload.context} tokens of context, batch {workload.batch} "
               f"[{predicted.source}]" + ("" if fits else f"; does not fit its {capacity / GIB:.1f} GiB"))  # fmt: skip
    for note in known:
        click.echo(f"  note: {note}")
    rows = [(preset_name(plan), *figures(predicted), f"gamma {predicted.gamma}"),
            ("autoregressive", *figures(baseline), "plain decoding")]  # fmt: skip
    print_table("Prediction", ("plan", *FIGURES, ""), rows)
    print_table(
        "Operations of one prompt's prefill, a draft step and a target step",
        ("operation", "launches", "ms", "GFLOP", "MB", "FLOP/byte", "kernel class"),
        ((f"{op.part}: {op.op}", f"{op.launches}", number(1e3 * op.seconds), number(op.flops / 1e9),
          number(op.bytes / 1e6), number(op.intensity), op.kind) for op in predicted.breakdown),
    )  # fmt: skip
