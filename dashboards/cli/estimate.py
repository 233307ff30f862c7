"""`ridgeplan estimate` and `explain`: a given plan's figures, where time and memory go, what a word means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli.groups import examples
from ridgeplan.dashboards.cli.options import (
    BATCH,
    CTX,
    DEFAULT_NEW_TOKENS,
    FIGURES,
    GPU_HELP,
    NEW_TOKENS,
    TOKENS,
    OutputFile,
    SavedPlanFile,
    as_json,
    context_of,
    figures,
    max_model_len,
    memory_limit,
    memory_utilization,
    options,
    priced_by,
)
from ridgeplan.dashboards.cli.output import number, print_json, print_table, wrapped, write_atomically
from ridgeplan.planner import Plan, Prediction, SearchOptions
from ridgeplan.planner.capacity import usable_bytes
from ridgeplan.planner.plan_file import SavedPlan, plan_json
from ridgeplan.planner.prediction import predict_all
from ridgeplan.planner.quality import saved_rows, stated_losses
from ridgeplan.planner.quantities import size_text, time_text, tokens_text
from ridgeplan.planner.queries.estimate import PlanEstimate, drafting, estimate_plan
from ridgeplan.planner.question import Question
from ridgeplan.planner.render.text import SOURCE_WORDS, bottleneck, on_host_text, overhead_text
from ridgeplan.planner.render.text import explain as meaning_of
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.presets import describe, preset_name
from ridgeplan.roofline.plan.support import Backend, as_loaded, only_estimated, unsupported


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
    priced_by,
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
    if plan is not None:
        found = _of_plan(plan, model, preset, gamma, adaptive, rest)
    else:
        found = _of_preset(model, preset, gamma, adaptive, rest)
    if output:
        write_atomically(output, plan_json(found.plan, found.question.shape, found.question.profile))
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)


def _of_plan(
    saved: SavedPlan, model: str | None, preset: str | None, gamma: int | None, adaptive: bool, rest: dict[str, Any]
) -> PlanEstimate:
    """A file's plan, for another model or GPU where one is given."""
    stray = ("ctx", "max_model_len", "batch", "new_tokens", "yarn")
    _forbid_beside_plan({"--preset": preset} | {f"--{name.replace('_', '-')}": rest[name] for name in stray})
    shape, profile = saved.resolve(model, rest["gpu"], rest["profile"], rest["acceptance"])
    plan = drafting(saved.on(shape, profile), gamma, adaptive=adaptive)
    options = SearchOptions(**{name: rest[name] for name in ("memory_utilization", "memory_limit", "host_memory")})
    return estimate_plan(plan, Question.of(shape, profile, plan.workload, options))


def _of_preset(
    model: str | None, preset: str | None, gamma: int | None, adaptive: bool, rest: dict[str, Any]
) -> PlanEstimate:
    """A preset at its fastest hyperparameters, or at a gamma of the user's."""
    ctx, limit, new_tokens = rest["ctx"], rest["max_model_len"], rest["new_tokens"]
    new_tokens = DEFAULT_NEW_TOKENS if new_tokens is None else new_tokens
    if not (model and preset and rest["gpu"] and (ctx, limit) != (None, None)):
        raise click.UsageError("estimate needs MODEL, --preset, --gpu and --ctx, or --plan FILE")
    passed = ("memory_utilization", "memory_limit", "host_memory", "profile", "acceptance", "yarn")
    batch = 1 if rest["batch"] is None else rest["batch"]
    options = SearchOptions(batch=batch, new_tokens=new_tokens, **{name: rest[name] for name in passed})
    context = context_of(ctx, limit, new_tokens)
    return planner.estimate(model, rest["gpu"], context, preset=preset, gamma=gamma, adaptive=adaptive, options=options)


def _print(found: PlanEstimate) -> None:
    """A headline, notes, and tables of figures and operations."""
    workload, predicted = found.plan.workload, found.predicted
    size = f"{workload.context} tokens of context, batch {workload.batch}"
    misfit = "" if found.fits else f"; does not fit {size_text(found.question.memory_limit_bytes)}"
    click.echo(wrapped(f"{workload.model} on {workload.hardware}, {size} [{predicted.source}]{misfit}"))
    click.echo(f"  [{predicted.source}]: {SOURCE_WORDS[predicted.source]}")
    for loss in found.losses:
        click.echo(wrapped(f"  gives up: {loss}"))
    unsupported = only_estimated(found.plan, found.shape)
    for note in (*found.notes, *_beside(found), *([unsupported] if unsupported else [])):
        click.echo(wrapped(f"  note: {note}"))
    rows = [(found.name, *figures(predicted), _adapting(found.plan)),
            ("plain decoding", *figures(found.baseline), "")]  # fmt: skip
    print_table("Prediction (TTFT and tokens/s of the whole batch)", ("plan", *FIGURES, ""), rows)
    print_table(
        "Operations of one prompt's prefill, a draft step and a target step",
        ("operation", "launches", "ms", "GFLOP", "MB", "FLOP/byte", "kernel class"),
        ((f"{op.part}: {op.op}", f"{op.launches}", number(1e3 * op.seconds), number(op.flops / 1e9),
          number(op.bytes / 1e6), number(op.intensity), op.kind) for op in predicted.breakdown),
    )  # fmt: skip


def _beside(found: PlanEstimate) -> Iterator[str]:
    """What the table of operations does not show."""
    if found.predicted.offloaded_layers:
        yield on_host_text(found.predicted, found.question.host_limit_bytes)
    beside = overhead_text(found.plan, found.predicted)
    if beside:
        yield f"a target step takes {beside}, beside its operations"


def _adapting(plan: Plan) -> str:
    return f"adaptive up to {plan.speculation.gamma}" if plan.speculation.adaptive else ""


def _forbid_beside_plan(given: dict[str, Any]) -> None:
    """A plan's file holds its own workload, so options for it are refused."""
    stray = next((name for name, value in given.items() if value is not None and value is not False), None)
    if stray:
        raise click.UsageError(f"{stray} cannot be given with --plan, which has its own")


LONGEST_OPERATIONS = 5


@click.command(
    epilog=examples("ridgeplan explain plan.json", "ridgeplan explain acceptance", "ridgeplan explain quantspec")
)
@click.argument("subject", metavar="PLAN.json|TERM", nargs=-1, required=True)
@options(memory_utilization, memory_limit, as_json)
def explain(subject: tuple[str, ...], memory_utilization: float, memory_limit: float | None, as_json: bool) -> None:
    """Where the time and the memory of the plan in a file go; or what a term, a preset or a source's word means."""
    word = " ".join(subject)
    if Path(word).suffix != ".json":
        told = meaning_of(word)
        print_json({"term": word, "meaning": told}) if as_json else click.echo(wrapped(told))
        return
    saved = SavedPlanFile().convert(word, None, None)
    shape, profile = saved.resolve()
    plan, held = saved.on(shape, profile), as_loaded(shape)
    usable = usable_bytes(profile.hardware.memory_bytes, memory_utilization, memory_limit)
    machine = replace(Machine.of(profile), memory_bytes=usable)
    plain, predicted = predict_all([planner.preset("autoregressive", plan.workload), plan], held, profile, machine)
    compared = predicted.against(plain)
    if as_json:
        print_json({"plan": plan.to_dict(), "predicted": compared.to_dict(), "baseline": plain.to_dict()})
        return
    missing = unsupported(plan, Backend.RIDGEPLAN, held, profile)
    click.echo("\n".join(map(wrapped, _lines(plan, compared, plain, held, usable, missing))))


def _lines(
    plan: Plan, predicted: Prediction, plain: Prediction, shape: ModelShape, usable_bytes: float, missing: str | None
) -> Iterator[str]:
    workload = plan.workload
    yield (
        f"{preset_name(plan)} for {workload.model} on {workload.hardware}, {tokens_text(workload.context)} tokens, "
        f"batch {workload.batch}, {tokens_text(workload.new_tokens)} new"
    )
    known, meaning = preset_name(plan), describe(plan)
    yield "  " + (f"it is {meaning}; " if known != meaning else "") + (missing or "it runs here")
    yield from _time(plan, predicted, plain)
    yield from (f"  {line}" for line in bottleneck(plain, shape, workload))
    yield from _memory(predicted, usable_bytes)
    for loss in stated_losses(plan, saved_rows()):
        yield f"  gives up: {loss}"
    yield f"  figures are {predicted.source}: {SOURCE_WORDS[predicted.source]}"


def _time(plan: Plan, predicted: Prediction, plain: Prediction) -> Iterator[str]:
    """The arithmetic of a round, its parts, and the operations that take most of it."""
    best, low, high = predicted.best, predicted.low, predicted.high
    yield (
        f"Time: {time_text(best.tpot_ms)} per token of a request ({time_text(low.tpot_ms)} to "
        f"{time_text(high.tpot_ms)}), {predicted.speedup:.2f}x plain decoding's {time_text(plain.best.tpot_ms)}"
    )
    yield f"  a round takes {time_text(predicted.round_ms)} and yields {predicted.tokens_per_round:.2f} tokens:"
    for part, seconds in predicted.round_s.items():
        if seconds:
            drafts = f" ({predicted.gamma} x {time_text(predicted.draft_step_ms)})" if part == "draft" else ""
            yield f"    {part:<14}{time_text(1e3 * seconds):>10} {1e5 * seconds / predicted.round_ms:3.0f}%{drafts}"
    if plan.speculation.active:
        known = predicted.acceptance
        yield f"  acceptance {known.best:.3f} ({known.low:.3f} to {known.high:.3f}), {known.source}: {known.where}"
    target = sorted((op for op in predicted.breakdown if op.part == "target"), key=lambda op: -op.seconds)
    longest = ", ".join(f"{op.op} {time_text(1e3 * op.seconds)}" for op in target[:LONGEST_OPERATIONS])
    beside = overhead_text(plan, predicted)
    yield f"  the target's pass: {longest}" + (f"; beside its operations {beside}" if beside else "")
    yield f"  first token{'s of the batch' if plan.workload.batch > 1 else ''} after {time_text(best.ttft_ms)}"


def _memory(predicted: Prediction, usable_bytes: float) -> Iterator[str]:
    peak = predicted.best.peak_memory_bytes
    fits = "" if peak <= usable_bytes else ": it does not fit"
    yield f"Memory: {size_text(peak)} of {size_text(usable_bytes)} that may be used{fits}"
    held: dict[str, Any] = predicted.memory_bytes
    parts = (f"{name.replace('_', ' ')} {size_text(value)}" for name, value in held.items() if value)
    yield f"  {', '.join(parts)}"
    if predicted.offloaded_layers:
        yield f"  {on_host_text(predicted)}"
