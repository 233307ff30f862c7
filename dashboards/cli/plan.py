"""`ridgeplan plan` (or `recommend`): the best plan that runs and the fastest estimated one, in short or in full."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.output import echo, number, print_json, wrapped
from ridgeplan.dashboards.cli.table_file import write_plan
from ridgeplan.planner import Prediction, Recommendation, SearchOptions
from ridgeplan.planner.engines.formats import ENGINES
from ridgeplan.planner.parallelism import degree_lines
from ridgeplan.planner.plan_file import plan_json
from ridgeplan.planner.quality import FIDELITY, RULER
from ridgeplan.planner.quantities import GB, probability_text, size_text, time_text, tokens_text
from ridgeplan.planner.question import Objective
from ridgeplan.planner.recommendation import Alternative
from ridgeplan.planner.render.text import SOURCE_WORDS, first_token_text, gamma_text, plain_text
from ridgeplan.planner.render.verdict import headline, sentence
from ridgeplan.roofline.catalog.parallel import SINGLE
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.latency import GIB
from ridgeplan.roofline.plan.presets import short_name

ROWS = 5
FIRST_FIGURE = re.compile(r", | on | \[| \((?=[A-Z]|docs)")  # ends before what else is said of a loss
COLUMNS = (("plan", 34), ("gamma", 5), ("ms/token", 8), ("GB", 6), ("speed-up", 8), ("", 14))
SHORT_VERDICTS = {
    "within the noise": "within noise", "estimated only here": "estimated only", "quality": "lower quality",
    "fits only with offloading": "offloaded", "fits, but is slow": "slow", "measurably slower": "slower",
}  # fmt: skip


def answer_text(recommendation: Recommendation) -> str:
    """The answer, the first rows of the ranking, and the meaning of its source.

    Where the plan does not fit the GPU alone or is slow, a warning stands first, with better questions.
    """
    source = recommendation.predicted.source
    hidden = max(len(recommendation.alternatives) + 1 - ROWS, 0)
    name, short = recommendation.name, short_name(recommendation.name)
    answer = [wrapped(line) for line in answer_lines(recommendation)]
    legend = [wrapped(f"[{source}]: {SOURCE_WORDS[source]}"), *([wrapped(f"{short}: {name}")] if short != name else []),
              f"--all shows {f'{hidden} more plans, ' * (hidden > 0)}full names and all reasons"]  # fmt: skip
    parts = (warning_lines(recommendation), answer, table_lines(_rows(recommendation)), degree_table(recommendation),
             legend)  # fmt: skip
    return "\n\n".join(filter(None, map("\n".join, parts)))


def answer_lines(recommendation: Recommendation, source: str = "--all shows the source") -> list[str]:
    """The question, the plan, its speed, its memory, its quality cost, and the most important caveat.

    source: what shows where the quality cost is from.
    """
    workload, predicted, best = recommendation.plan.workload, recommendation.predicted, recommendation.predicted.best
    low, high = time_text(predicted.low.tpot_ms).removesuffix(" ms"), time_text(predicted.high.tpot_ms)
    batched = workload.batch > 1
    per_request = f", {number(best.tokens_per_s / workload.batch)} each" if batched else ""
    verdict = sentence(headline(recommendation))
    gamma = f", gamma {gamma_text(predicted.drafting.kind)}" if predicted.gamma else ""
    name, used_gib = short_name(recommendation.name), best.peak_memory_bytes / GIB
    degrees = f", {workload.parallel}" if workload.parallel != SINGLE else ""
    return [
        f"{workload.model} on {workload.devices}, {tokens_text(workload.context)} tokens, "
        f"batch {workload.batch}, {tokens_text(workload.new_tokens)} new tokens",
        f"{verdict}: {name}{gamma}{degrees}",
        f"{time_text(best.tpot_ms)} per token ({low} to {high}), "
        f"{predicted.speedup:.2f}x {recommendation.baseline_text}",
        f"First token after {first_token_text(best, workload.batch)}; {number(best.tokens_per_s)} tokens/s"
        f"{per_request}",
        f"Memory{' of each GPU' if degrees else ''}: {size_text(best.peak_memory_bytes)} of "
        f"{size_text(recommendation.memory_limit_bytes)} "
        f"({used_gib:{'.1f' if used_gib > 1 else '.2g'}} of {recommendation.memory_limit_bytes / GIB:.1f} GiB)",
        *([f"Drafter: {recommendation.drafter_text}"] if recommendation.drafter_range else []),
        _quality_cost(recommendation.losses, source),
        *_caveats(recommendation),
    ]


def warning_lines(recommendation: Recommendation) -> Iterator[str]:
    """The warning that a plan is slow or does not fit the GPU alone, and questions whose plans do."""
    if recommendation.warning:
        yield wrapped(recommendation.warning)
    if recommendation.on_device:
        yield wrapped(f"These fit the GPU alone: {', or '.join(fix.text for fix in recommendation.on_device)}")


def table_lines(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Aligned columns of `COLUMNS`, names on the left and figures on the right. Loading rich would take too long."""
    (_, width), *middle, _ = COLUMNS
    for name, *figures, verdict in ([title for title, _ in COLUMNS], *rows):
        cells = " ".join(cell.rjust(size) for cell, (_, size) in zip(figures, middle, strict=True))
        if len(name) > width:  # on a line of its own
            yield name
        yield f"{'' if len(name) > width else name:<{width}} {cells} {verdict}".rstrip()


def degree_table(recommendation: Recommendation) -> Iterator[str]:
    """The nearest choices of degrees of parallelism, with the reason why each lost; none on a single GPU."""
    if recommendation.degrees:
        executing = ENGINES[recommendation.backend].title
        yield f"Degrees of parallelism, each with its best plan: ms per token, memory of a GPU; {executing} runs it"
    for line in islice(degree_lines(recommendation.degrees), ROWS):
        yield from wrapped(line).splitlines()


def serve_command(recommendation: Recommendation, profile: Profile) -> str:
    """The command with which an engine serves the plan on several GPUs; a comment where it stops before the plan."""
    from ridgeplan.planner.export import ServeCommandOptions, engine_named, export, schema_for  # imports yaml

    shape, engine = recommendation.shape, engine_named(recommendation.backend)
    options = ServeCommandOptions(
        recommendation.plan, getattr(shape, "whole", shape), profile, engine, schema_for(engine.name), shape.name
    )
    exported = export(options)
    shorter = [f"# {axis.plan}: {axis.engine}" for axis in exported.carried if axis.axis == "length"]
    return "\n".join((*shorter, exported.command.shell()))


def _quality_cost(losses: Sequence[str], source: str) -> str:
    """The losses, each with its first figure."""
    if not losses:
        return "Quality cost: none; the output keeps the model's distribution"
    return f"Quality cost: {'; '.join(FIRST_FIGURE.split(loss)[0] for loss in losses)}; {source}"


def _caveats(recommendation: Recommendation) -> Iterator[str]:
    """For an engine, where its figures come from, how it is told the formats, and what counts for a floor of quality;
    else the most important caveat, and that the GPU was not calibrated.
    """
    if recommendation.backend not in ENGINES:
        yield _caveat(recommendation)
        yield from (f"Note: {note}" for note in recommendation.notes[1:] if " is not calibrated: " in note)
        return
    floors = f"{FIDELITY}>=", f"{RULER}>="
    shown = [note for note in recommendation.notes[2:] if note.endswith("executes the plan") or note.startswith(floors)]
    for note in (*recommendation.notes[:2], *shown):
        yield from wrapped(f"Note: {note}").splitlines()


def _caveat(recommendation: Recommendation) -> str:
    """The first note, else the probability that the plan is faster."""
    if recommendation.notes:
        return f"Note: {recommendation.notes[0]}"
    chance = recommendation.predicted.beats_plain
    if not chance or not recommendation.plan.speculation.active:
        plain_ms = recommendation.baseline.best.tpot_ms
        return f"{plain_text(recommendation.shape).capitalize()} takes {time_text(plain_ms)} per token"
    return f"Faster than plain decoding with {probability_text(chance)} probability [{recommendation.predicted.source}]"


def _rows(recommendation: Recommendation) -> list[tuple[str, ...]]:
    """The recommended plan, the fastest estimated one if that is another, and the next plans of the ranking."""
    verdict = SHORT_VERDICTS.get(recommendation.verdict, recommendation.verdict)
    shown = _others(recommendation)[: ROWS - 1]
    others = [_row(other.preset, other.predicted, _short_verdict(other)) for other in shown]
    return [_row(recommendation.name, recommendation.predicted, verdict), *others]


def _others(recommendation: Recommendation) -> list[Alternative]:
    """All other plans; the fastest estimated one is first."""
    best = recommendation.best_estimated
    others = [other for other in recommendation.alternatives if not best or other.plan != best.plan]
    return [best, *others] if best else others


def _row(name: str, predicted: Prediction, verdict: str) -> tuple[str, ...]:
    best = predicted.best
    memory, speedup = f"{best.peak_memory_bytes / GB:,.1f}", f"{predicted.speedup:.2f}x"
    return short_name(name), str(predicted.gamma), number(best.tpot_ms), memory, speedup, verdict


def _short_verdict(other: Alternative) -> str:
    """The reason in a word or two: the text before the first colon or comma."""
    words = re.split(r"[:,]| on | has no | than | the host", other.rejected)[0]
    if " has no " in other.rejected:
        return f"not in {words}"
    return SHORT_VERDICTS.get(words, words)


@command()
@click.argument("model")
@opt.gpu
@opt.workload
@opt.limits
@click.option(
    "--objective", type=click.Choice([*map(str, Objective)]), default="latency",
    help="Minimize time per token, time of the whole request, or peak memory.",
)  # fmt: skip
@opt.priced_by
@opt.plan_output
@click.option("--adaptive", is_flag=True, help="Write the plan with an adaptive gamma, if it drafts.")
@click.option("--all", "show_all", is_flag=True, help="Show every plan with its band and the reason it lost.")
@opt.as_json
def plan(
    model: str, gpu: str, ctx: int | None, max_model_len: int | None, new_tokens: int, output: Path | None,
    adaptive: bool, show_all: bool, as_json: bool, **search: Any,
) -> None:  # fmt: skip
    """Find the fastest plan for MODEL that fits a GPU and runs.

    The answer also names the fastest plan that nothing runs yet. Where a faster plan is not faster beyond the noise of
    the predictions, the simpler one is recommended; where it is less than 3% faster, the one that gives up less. MODEL
    is a name from `ridgeplan list models`, a config.json, a GGUF file or a hub id.

    Examples:
      ridgeplan plan Llama-3.1-8B --gpu h200 --ctx 128k --batch 4
      ridgeplan plan model.gguf --gpu rtx4090 --ctx 32k --memory-limit 20GB --all
      ridgeplan plan Qwen3-8B --gpu auto --isl 8k --osl 512 --quality exact -o plan.json
      ridgeplan plan DeepSeek-V3 --gpu h200 --gpus 8 --ctx 32k --batch 16
    """
    context = opt.context_of(ctx, max_model_len, new_tokens)
    recommendation = planner.recommend(model, gpu, context, new_tokens=new_tokens, **search)
    options = SearchOptions(new_tokens=new_tokens, **search)

    def plan_text() -> str:
        chosen = recommendation.adaptive if adaptive and recommendation.adaptive else recommendation.plan
        shape, profile = planner.resolve(model, gpu, options.profile, options.acceptance)
        return plan_json(chosen, options.skewed(shape), profile, recommendation.backend)

    write_plan(output, recommendation, plan_text)
    if as_json:
        print_json(recommendation.to_dict())
    elif show_all:
        print_everything(recommendation)
    else:
        echo(answer_text(recommendation))
    if recommendation.degrees and not as_json:
        _, profile = planner.resolve(model, gpu, options.profile, options.acceptance)
        echo(f"\n{serve_command(recommendation, profile)}")


def print_everything(recommendation: Recommendation) -> None:
    """Every reason and all plans: each plan's name and verdict, and below it a line of figures."""

    def columns(cells: Iterable[str]) -> str:
        return "".join(cell.rjust(10) for cell in cells)  # eight of them fit 80 columns

    echo("\n".join(map(wrapped, recommendation.explain().splitlines())))
    echo(f"\nPlans ({opt.FIGURES_NOTE})\n{columns(opt.FIGURES)}")
    best = recommendation.best_estimated
    verdicts = [(recommendation.name, recommendation.predicted, recommendation.verdict)]
    verdicts += [
        (other.preset, other.predicted, f"fastest estimated; {other.rejected}" if other is best else other.rejected)
        for other in _others(recommendation)
    ]
    for name, predicted, verdict in verdicts:
        echo(wrapped(f"{name}: {verdict}"))
        echo(columns(opt.figures(predicted)))
