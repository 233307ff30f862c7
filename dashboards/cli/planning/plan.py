"""`ridgeplan plan` (or `recommend`): the best plan that runs, and the best of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli.lazy_group import examples
from ridgeplan.dashboards.cli.options import (
    OutputFile,
    as_json,
    options,
)
from ridgeplan.dashboards.cli.output import print_json, wrapped, write_atomically
from ridgeplan.dashboards.cli.planning.answer import answer_text
from ridgeplan.dashboards.cli.planning.options import (
    FIGURES,
    GPU_HELP,
    batch,
    context_of,
    ctx,
    figures,
    limits,
    max_model_len,
    new_tokens,
    priced_by,
)
from ridgeplan.planner import Prediction, Recommendation
from ridgeplan.planner.interface.plan_file import plan_json
from ridgeplan.planner.search import Objective

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
    adaptive: bool, show_all: bool, as_json: bool, **question: Any,
) -> None:  # fmt: skip
    """The fastest plan for MODEL on a GPU that fits and runs, and the fastest of all, even if nothing runs it yet.

    A plan that is more exact or simpler is preferred where a faster one is not faster beyond the noise. MODEL is a name
    of `ridgeplan list models`, a config.json, a GGUF file, or a hub id.
    """
    context = context_of(ctx, max_model_len, new_tokens)
    found = planner.recommend(model, gpu, context, new_tokens=new_tokens, **question)
    if output:
        chosen = found.adaptive if adaptive and found.adaptive else found.plan
        shape, profile = planner.resolve(model, gpu, question["profile"], question["acceptance"])
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
