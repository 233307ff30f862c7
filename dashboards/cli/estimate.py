"""`ridgeplan estimate` and `explain`: the prediction of a given plan, and the meaning of a term."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ridgeplan import planner
from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import ThoroughCommand, command
from ridgeplan.dashboards.cli.output import echo, number, print_answer, print_table, wrapped
from ridgeplan.dashboards.cli.table_file import write_plan
from ridgeplan.dashboards.files import write_json
from ridgeplan.planner import PRESETS, Prediction, SearchOptions
from ridgeplan.planner.plan_file import SavedPlan, plan_json
from ridgeplan.planner.quantities import size_text, time_text, tokens_text
from ridgeplan.planner.queries.drafter_range import drafter_range
from ridgeplan.planner.queries.estimate import PlanEstimate, estimate_plan, with_gamma
from ridgeplan.planner.question import Question
from ridgeplan.planner.render.text import (
    SOURCE_WORDS,
    bottleneck,
    first_token_text,
    gamma_text,
    on_host_text,
    overhead_text,
    plain_text,
)
from ridgeplan.planner.render.text import explain as meaning_of
from ridgeplan.planner.render.trace import chrome_trace
from ridgeplan.planner.resolution import with_drafter_rows
from ridgeplan.roofline.execution import round_shape
from ridgeplan.roofline.plan.presets import describe, short_name
from ridgeplan.roofline.plan.support import Backend, only_estimated, unsupported


class PresetCommand(ThoroughCommand):
    """A command that names --preset where a preset follows MODEL without it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses as click does."""
        words = list(args)  # click empties its own
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            presets = [word for before, word in pairwise(["", *words]) if word in PRESETS and before[:1] != "-"]
            if not presets:
                raise
            allowed = f"--preset {presets[0]}"
            raise click.UsageError(f"{presets[0]!r} is a preset, not a model; allowed: {allowed}", ctx) from error


OF_WORKLOAD = ("preset", "ctx", "max_model_len", "batch", "new_tokens", "yarn", *opt.DRAFTING)


@command(cls=PresetCommand)
@click.argument("model", required=False)
@click.option("--preset", help="A preset from `ridgeplan list presets`.")
@click.option("--plan", type=opt.SavedPlanFile(), help="A plan file instead, with its own model, GPU and workload.")
@opt.one_gpu(help=opt.GPU_HELP)
@opt.ctx
@opt.max_model_len
@click.option(*opt.BATCH, "batch", type=int, help="Sequences that run together.  [default: 1]")
@click.option(
    *opt.NEW_TOKENS, "new_tokens", type=opt.TOKENS,
    help=f"Tokens to generate per sequence.  [default: {opt.DEFAULT_NEW_TOKENS}]",
)  # fmt: skip
@click.option("--gamma", type=int, help="Drafts per round.  [default: the preset's fastest or the plan's own]")
@click.option("--adaptive", is_flag=True, help="Adapt gamma to the acceptance, up to that number of drafts.")
@opt.parallel
@opt.priced_by
@opt.plan_output
@opt.trace_output
@opt.as_json
def estimate(
    model: str | None, preset: str | None, plan: SavedPlan | None, gamma: int | None, adaptive: bool,
    output: Path | None, trace: Path | None, as_json: bool, **rest: Any,
) -> None:  # fmt: skip
    """Predict one preset for MODEL, or a plan file, with the time of every operation.

    Of each operation the table says what bounds it, and the share of the roof: of the bandwidth or of the compute peak,
    whichever limits it. A preset runs at the gamma and sparse ratio that are fastest for the workload, as in
    `ridgeplan plan`.

    Examples:
      ridgeplan estimate Llama-3.1-8B --preset quantspec --gpu h200 --ctx 128k
      ridgeplan estimate Llama-3.1-8B --preset quantspec --gpu h200 --ctx 128k --gamma 4 -o plan.json
      ridgeplan estimate --plan plan.json --gpu h100
    """
    if plan is not None:
        result = _of_plan(plan, model, gamma, adaptive, rest)
    else:
        result = _of_preset(model, preset, gamma, adaptive, rest)
    question = result.question
    backend = question.options.backend
    write_plan(output, result, lambda: plan_json(result.plan, question.shape, question.profile, backend))
    write_json(trace, chrome_trace(result.predicted))
    print_answer(result.to_dict(), as_json, lambda: _print(result))


def _of_plan(
    saved: SavedPlan, model: str | None, gamma: int | None, adaptive: bool, rest: dict[str, Any]
) -> PlanEstimate:
    """The estimate of a saved plan, for another model or GPU where one is given."""
    source = click.get_current_context().get_parameter_source
    for name in OF_WORKLOAD:
        if source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} cannot be combined with --plan, which has its own workload")
    shape, profile = saved.resolve(model, rest["gpu"], rest["profile"], rest["acceptance"])
    plan = with_gamma(saved.on(shape, profile), gamma, adaptive=adaptive)
    if rest["acceptance"]:
        plan = replace(plan, workload=with_drafter_rows(plan.workload, rest["acceptance"]))
    sizes = {name: rest[name] for name in ("memory_utilization", "memory_limit", "host_memory", "routing_skew")}
    options = SearchOptions(**sizes, backend=saved.backend)
    return estimate_plan(plan, Question.of(shape, profile, plan.workload, options))


def _of_preset(
    model: str | None, preset: str | None, gamma: int | None, adaptive: bool, rest: dict[str, Any]
) -> PlanEstimate:
    """The estimate of a preset at its fastest hyperparameters, or at the given gamma."""
    ctx, limit, new_tokens = rest["ctx"], rest["max_model_len"], rest["new_tokens"]
    new_tokens = opt.DEFAULT_NEW_TOKENS if new_tokens is None else new_tokens
    if not (model and preset and rest["gpu"] and (ctx, limit) != (None, None)):
        raise click.UsageError("estimate needs MODEL, --preset, --gpu and --ctx, or else --plan FILE")
    batch = 1 if rest["batch"] is None else rest["batch"]
    given = {name: rest[name] for name in vars(SearchOptions()) if name in rest}
    options = SearchOptions(**given | {"batch": batch, "new_tokens": new_tokens})
    context = opt.context_of(ctx, limit, new_tokens)
    return planner.estimate(model, rest["gpu"], context, preset=preset, gamma=gamma, adaptive=adaptive, options=options)


def _print(result: PlanEstimate) -> None:
    """Prints a headline, notes, and tables of figures and operations."""
    workload, predicted, speculation = result.plan.workload, result.predicted, result.plan.speculation
    size = f"{workload.context} tokens of context, batch {workload.batch}"
    oom = "" if result.oom_reason is None else f"; {result.oom_reason}"
    echo(wrapped(f"{workload.model} on {workload.devices}, {size} [{predicted.source}]{oom}"))
    echo(f"  [{predicted.source}]: {SOURCE_WORDS[predicted.source]}")
    for loss in result.losses:
        echo(wrapped(f"  quality cost: {loss}"))
    unsupported = only_estimated(result.plan, result.shape)
    for note in (*result.notes, *_overheads(result), *([unsupported] if unsupported else [])):
        echo(wrapped(f"  note: {note}"))
    fixed = f"gamma {gamma_text(speculation.round_kind)}" * speculation.drafter.cascades
    gamma = f"adaptive up to {speculation.gamma}" if speculation.adaptive else fixed
    rows = [(short_name(result.name), *opt.figures(predicted), gamma),
            (plain_text(result.shape), *opt.figures(result.baseline), "")]  # fmt: skip
    print_table(f"Prediction ({opt.FIGURES_NOTE})", ("plan", *opt.FIGURES, ""), rows)
    print_table(
        "Operations of one prompt's prefill, a draft step and a target step",
        ("operation", "launches", "ms", "GFLOP", "MB", "FLOP/byte", "roof", "bound by: kernel class"),
        ((f"{op['part']}: {op['op']}", f"{op['launches']}", number(1e3 * op["seconds"]), number(op["flops"] / 1e9),
          number(op["bytes"] / 1e6), number(op["intensity"]), f"{op['roof_share']:.0%}" if op["bound"] else "",
          f"{op['bound']}: {op['kind']}" if op["bound"] else op["kind"]) for op in result.operations()),
    )  # fmt: skip


def _overheads(result: PlanEstimate) -> Iterator[str]:
    """What the table of operations does not show."""
    if result.predicted.offloaded_layers:
        yield on_host_text(result.predicted, result.question.host_limit_bytes)
    if result.predicted.group_end_loss > 1e-6:  # rounding is not zero
        group, loss = result.plan.kv.group, result.predicted.group_end_loss
        yield f"rounds end with groups of {group} tokens, which costs {loss:.1%} of a round's tokens"
    overhead = overhead_text(result.plan, result.predicted)
    if overhead:
        yield f"a target step also takes {overhead}"


LONGEST_OPERATIONS = 5  # operations of the target's pass that are named


@command()
@click.argument("subject", metavar="PLAN.json|TERM", nargs=-1, required=True)
@opt.chosen_backend(None, "the plan's own")
@opt.memory_utilization
@opt.memory_limit
@opt.as_json
def explain(subject: tuple[str, ...], backend: str | None, as_json: bool, **search: Any) -> None:
    """Explain where the time and memory of a plan file go, or what a term, a preset or a source means.

    Examples:
      ridgeplan explain plan.json
      ridgeplan explain plan.json --backend vllm
      ridgeplan explain acceptance
      ridgeplan explain quantspec
    """
    term = " ".join(subject)
    if Path(term).suffix != ".json":
        meaning = meaning_of(term)
        print_answer({"term": term, "meaning": meaning}, as_json, lambda: echo(wrapped(meaning)))
        return
    saved = opt.SavedPlanFile().convert(term, None, None)
    shape, profile = saved.resolve()
    plan = saved.on(shape, profile)
    options = SearchOptions(**search, backend=Backend(backend or saved.backend))
    result = estimate_plan(plan, Question.of(shape, profile, plan.workload, options))
    predictions = {"predicted": result.predicted.to_dict(), "baseline": result.baseline.to_dict()}
    document = {"plan": plan.to_dict(), **predictions}
    print_answer(document, as_json, lambda: echo("\n".join(map(wrapped, _lines(result)))))


def _lines(result: PlanEstimate) -> Iterator[str]:
    plan, shape, profile, workload = result.plan, result.shape, result.question.profile, result.plan.workload
    yield (
        f"{result.name} for {workload.model} on {workload.devices}, {tokens_text(workload.context)} tokens, "
        f"batch {workload.batch}, {tokens_text(workload.new_tokens)} new tokens"
    )
    meaning, question = describe(plan), result.question
    missing = None if question.engine else unsupported(plan, Backend.RIDGEPLAN, shape, profile)
    ours = "vLLM with the plugin" if question.options.backend is Backend.VLLM_PLUGIN else "ridgeplan's own runtime"
    runtime = question.engine.title if question.engine else ours
    yield "  " + (f"{meaning}; " if result.name != meaning else "") + (missing or f"times are those of {runtime}")
    yield from _time(result)
    yield from (f"  {line}" for line in bottleneck(result.baseline, shape, workload))
    yield from _memory(result.predicted, result.question.memory_limit_bytes)
    for loss in result.losses:
        yield f"  quality cost: {loss}"
    yield f"  [{result.predicted.source}]: {SOURCE_WORDS[result.predicted.source]}"


def _time(result: PlanEstimate) -> Iterator[str]:
    """The arithmetic of a round, its parts, and its longest operations."""
    plan, predicted, question = result.plan, result.predicted, result.question
    best, low, high, plain_ms = predicted.best, predicted.low, predicted.high, result.baseline.best.tpot_ms
    yield (
        f"Time: {time_text(best.tpot_ms)} per token of a request ({time_text(low.tpot_ms)} to "
        f"{time_text(high.tpot_ms)}), {predicted.speedup:.2f}x {plain_text(result.shape)} ({time_text(plain_ms)})"
    )
    kind, gain = predicted.drafting.kind, predicted.drafting.gain
    adapts = f"rounds adapt: as texts differ they gain {gain - 1:+.1%} over one of gamma {gamma_text(kind)}, which"
    what = adapts if plan.speculation.adapts_to_text else "a round"
    tokens = predicted.tokens_per_round / gain
    yield f"  {what} takes {time_text(predicted.round_ms)} and yields {tokens:.2f} tokens:"
    for part, seconds in predicted.round_s.items():
        if seconds:
            drafts = f" ({round_shape(kind).passes} x {time_text(predicted.draft_step_ms)})" * (part == "draft")
            yield f"    {part:<14}{time_text(1e3 * seconds):>10} {1e5 * seconds / predicted.round_ms:3.0f}%{drafts}"
    if plan.speculation.active:
        rate = predicted.acceptance
        yield f"  acceptance {rate.best:.3f} ({rate.low:.3f} to {rate.high:.3f}), {rate.source}: {rate.where}"
    pays = drafter_range(plan, result.shape, question.profile, question.machine) if question.engine is None else None
    if pays is not None:
        yield f"  the drafter {pays}"
    target = sorted((op for op in predicted.breakdown if op.part == "target"), key=lambda op: -op.seconds)
    longest = ", ".join(f"{op.op} {time_text(1e3 * op.seconds)}" for op in target[:LONGEST_OPERATIONS])
    overhead = overhead_text(plan, predicted)
    yield f"  the target's pass: {longest}" + (f"; overheads: {overhead}" if overhead else "")
    yield f"  first token after {first_token_text(best, plan.workload.batch)}"


def _memory(predicted: Prediction, usable_bytes: float) -> Iterator[str]:
    peak = predicted.best.peak_memory_bytes
    fits = "" if peak <= usable_bytes else ", which does not fit"
    yield f"Memory: {size_text(peak)} of {size_text(usable_bytes)} that plans may use{fits}"
    purposes: dict[str, Any] = predicted.memory_bytes
    parts = (f"{name.replace('_', ' ')} {size_text(value)}" for name, value in purposes.items() if value)
    yield f"  {', '.join(parts)}"
    if predicted.offloaded_layers:
        yield f"  {on_host_text(predicted)}"
