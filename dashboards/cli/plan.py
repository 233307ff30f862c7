"""`ridgeplan plan` (or `recommend`): the best plan that runs and the best of all, in a short answer or in full."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli.groups import examples
from ridgeplan.dashboards.cli.options import (
    FIGURES,
    GPU_HELP,
    OutputFile,
    as_json,
    batch,
    context_of,
    ctx,
    figures,
    limits,
    max_model_len,
    new_tokens,
    options,
    priced_by,
)
from ridgeplan.dashboards.cli.output import number, print_json, wrapped, write_atomically
from ridgeplan.planner import Prediction, Recommendation, SearchOptions
from ridgeplan.planner.plan_file import plan_json
from ridgeplan.planner.quantities import GB, size_text, time_text, tokens_text
from ridgeplan.planner.question import Objective
from ridgeplan.planner.recommendation import Alternative
from ridgeplan.planner.render.text import SOURCE_WORDS, briefly
from ridgeplan.roofline.latency import GIB

WIDTH = 80
ROWS = 5
LONGEST_NAME = 30  # characters of a plan's, where more follows
COLUMNS = (("plan", 35), ("gamma", 5), ("ms/token", 8), ("GB", 6), ("x plain", 7), ("", 14))
SHORT_VERDICTS = {
    "within the noise": "within noise", "estimated only here": "estimated only", "quality": "gives up more",
}  # fmt: skip


def answer_text(found: Recommendation) -> str:
    """The answer, the first rows of the ranking, and what the word of its source means.

    Where it is no plain success, a warning stands above it, with what would be better.
    """
    source, hidden = found.predicted.source, max(len(found.alternatives) + 1 - ROWS, 0)
    legend = f"[{source}]: {SOURCE_WORDS[source]}"
    more = f"{hidden} more plans, full names and all reasons: --all"
    answer = map(shortened, answer_lines(found))
    parts = warning_lines(found), answer, table_lines(_rows(found)), (shortened(legend), more)
    return "\n\n".join(filter(None, map("\n".join, parts)))


def answer_lines(found: Recommendation) -> list[str]:
    """Six lines: what was asked, the plan, how soon and how fast, memory, what it gives up, and what else there is."""
    workload, predicted, best = found.plan.workload, found.predicted, found.predicted.best
    low, high = time_text(predicted.low.tpot_ms).removesuffix(" ms"), time_text(predicted.high.tpot_ms)
    many = workload.batch > 1
    each = f", {number(best.tokens_per_s / workload.batch)} per request" if many else ""
    size = f"{tokens_text(workload.context)} tokens, batch {workload.batch}"
    name = shortened(briefly(found.name), LONGEST_NAME) + _gamma(predicted)
    gain = f"{predicted.speedup:.2f}x plain" if found.baseline_fits else "plain: no room"
    return [
        f"{workload.model} on {workload.hardware}, {size}, {tokens_text(workload.new_tokens)} new",
        f"{_verb(found)} {name}: {time_text(best.tpot_ms)} per token ({low} to {high})",
        f"{gain}; first token{'s' if many else ''} after {time_text(best.ttft_ms)}; "
        f"{number(best.tokens_per_s)} tokens/s{each}",
        f"Memory {size_text(best.peak_memory_bytes)} of {size_text(found.memory_limit_bytes)} "
        f"({best.peak_memory_bytes / GIB:.1f} of {found.memory_limit_bytes / GIB:.1f} GiB)",
        _losses(found.losses),
        _caveat(found),
    ]


def warning_lines(found: Recommendation) -> Iterator[str]:
    """That a plan does not fit the GPU alone or is slow, and what to ask instead."""
    if found.warning:
        yield wrapped(found.warning)
    if found.on_device:
        yield wrapped(f"All on the GPU: {', or '.join(one.text for one in found.on_device)}")


def table_lines(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Aligned columns of `COLUMNS`, names on the left and figures on the right."""
    for cells in ([title for title, _ in COLUMNS], *rows):
        padded = [
            shortened(cell, width).ljust(width) if index in (0, len(COLUMNS) - 1) else cell.rjust(width)
            for index, (cell, (_, width)) in enumerate(zip(cells, COLUMNS, strict=True))
        ]
        yield " ".join(padded).rstrip()


def shortened(line: str, width: int = WIDTH) -> str:
    """A line of at most `width` characters, its end replaced by dots where it is longer."""
    return line if len(line) <= width else f"{line[: width - 3].rstrip()}..."


def _verb(found: Recommendation) -> str:
    if found.warning:
        return "Possible:"
    if found.backend == "ridgeplan":
        return "Run" if found.model_runs else "Not run here:"
    return f"For {found.backend}:"


def _gamma(predicted: Prediction) -> str:
    return f", gamma {predicted.gamma}" if predicted.gamma else ""


def _losses(losses: Sequence[str]) -> str:
    """What is given up by name; each says how much after a colon."""
    if not losses:
        return "Gives up nothing: the output keeps its distribution"
    return f"Gives up {', '.join(loss.partition(':')[0] for loss in losses)}; how much: --all"


def _caveat(found: Recommendation) -> str:
    """The first note, else how sure the gain is."""
    if found.notes:
        return f"Note: {found.notes[0]}"
    sure = found.predicted.beats_plain
    if not sure or not found.plan.speculation.active:
        return f"Plain decoding takes {time_text(found.baseline.best.tpot_ms)} per token"
    percent = "over 99%" if sure > 0.99 else f"{100 * sure:.0f}%"
    return f"Faster than plain decoding with {percent} probability [{found.predicted.source}]"


def _rows(found: Recommendation) -> list[tuple[str, ...]]:
    """The plan, the best of all where another is, and the next of the ranking."""
    best = found.best_estimated
    rows = [_row(found.name, found.predicted, "recommended")]
    if best:
        rows.append(_row(best.preset, best.predicted, _verdict(best)))
    others = [one for one in found.alternatives if not best or one.plan != best.plan]
    return rows + [_row(one.preset, one.predicted, _verdict(one)) for one in others[: ROWS - len(rows)]]


def _row(name: str, predicted: Prediction, verdict: str) -> tuple[str, ...]:
    best = predicted.best
    memory, gain = f"{best.peak_memory_bytes / GB:,.1f}", f"{predicted.speedup:.2f}x"
    return briefly(name), str(predicted.gamma), number(best.tpot_ms), memory, gain, verdict


def _verdict(other: Alternative) -> str:
    """The reason in a word or two: what stands before the first colon or comma."""
    words = re.split(r"[:,]| on | has no ", other.rejected)[0]
    if " has no " in other.rejected:
        return f"not in {words}"
    return SHORT_VERDICTS.get(words, words)


FIGURE_WIDTH = 10  # eight of them fit 80 columns


@click.command(
    epilog=examples(
        "ridgeplan plan Llama-3.1-8B --gpu h200 --ctx 128k --batch 4",
        "ridgeplan plan model.gguf --gpu rtx4090 --ctx 32k --memory-limit 20GB --all",
        "ridgeplan plan Qwen3-8B --gpu auto --isl 8k --osl 512 --quality exact -o plan.json",
    )
)
@click.argument("model")
@options(
    click.option("--gpu", required=True, help=GPU_HELP),
    ctx,
    max_model_len,
    batch,
    new_tokens,
    limits,
    click.option("--objective", type=click.Choice([*map(str, Objective)]), default="latency", show_default=True,
                 help="Minimize time per token, time of the whole request, or peak memory."),
    priced_by,
    click.option("-o", "--output", type=OutputFile(), help="Write the plan to this file, for `ridgeplan run`."),
    click.option("--adaptive", is_flag=True, help="Write it with a gamma that adapts, where it drafts."),
    click.option("--all", "show_all", is_flag=True, help="Show every plan, with its band and the reason it lost."),
    as_json,
)  # fmt: skip
def plan(
    model: str, gpu: str, ctx: int | None, max_model_len: int | None, new_tokens: int, output: Path | None,
    adaptive: bool, show_all: bool, as_json: bool, **search: Any,
) -> None:  # fmt: skip
    """The fastest plan for MODEL on a GPU that fits and runs, and the fastest of all, even if nothing runs it yet.

    A plan that is more exact or simpler is preferred where a faster one is not faster beyond the noise. MODEL is a name
    of `ridgeplan list models`, a config.json, a GGUF file, or a hub id.
    """
    context = context_of(ctx, max_model_len, new_tokens)
    options = SearchOptions(new_tokens=new_tokens, **search)
    found = planner.recommend(model, gpu, context, options)
    if output:
        chosen = found.adaptive if adaptive and found.adaptive else found.plan
        shape, profile = planner.resolve(model, gpu, options.profile, options.acceptance)
        write_atomically(output, plan_json(chosen, shape, profile))
    if as_json:
        print_json(found.to_dict())
    elif show_all:
        print_everything(found)
    else:
        click.echo(answer_text(found))


def print_everything(found: Recommendation) -> None:
    """Every reason, and all plans: the name with its verdict, and below it a line of figures."""
    click.echo("\n".join(map(wrapped, found.explain().splitlines())) + "\n")
    click.echo("Plans (TTFT and tokens/s of the whole batch)")
    click.echo(_columns(FIGURES))
    for name, predicted, verdict in _verdicts(found):
        click.echo(wrapped(f"{name}: {verdict}"))
        click.echo(_columns(figures(predicted)))


def _verdicts(found: Recommendation) -> Iterator[tuple[str, Prediction, str]]:
    """Every plan by name with what is said of it."""
    yield found.name, found.predicted, "recommended"
    best = found.best_estimated
    if best:
        yield best.preset, best.predicted, f"best of all; {best.rejected}"
    for other in found.alternatives:
        if not best or other.plan != best.plan:
            yield other.preset, other.predicted, other.rejected


def _columns(cells: Sequence[str]) -> str:
    return "".join(cell.rjust(FIGURE_WIDTH) for cell in cells)
