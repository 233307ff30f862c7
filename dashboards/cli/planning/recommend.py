"""`ridgeplan recommend`: the best plan that runs here, and the best of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli.options import (
    OutputFile,
    acceptance_file,
    as_json,
    memory_utilization,
    options,
    profile_file,
    yarn,
)
from ridgeplan.dashboards.cli.output import print_json, print_table, write_atomically
from ridgeplan.dashboards.cli.planning.options import (
    FIGURES,
    GPU_HELP,
    figures,
    memory_limit,
    new_tokens,
    quality,
)
from ridgeplan.planner import Recommendation
from ridgeplan.planner.search import Objective


@click.command()
@click.argument("model")
@options(
    click.option("--gpu", required=True, help=GPU_HELP),
    click.option("--ctx", type=int, required=True, help="Tokens of a prompt."),
    click.option("--batch", type=int, default=1, show_default=True, help="Sequences at a time."),
    new_tokens,
    quality,
    click.option("--objective", type=click.Choice([*map(str, Objective)]), default="latency", show_default=True,
                 help="Minimize time per token, time of the whole request, or peak memory."),
    memory_utilization,
    memory_limit,
    profile_file,
    acceptance_file,
    yarn,
    click.option("--output", type=OutputFile(), help="Write the plan to this file."),
    click.option("--adaptive", is_flag=True, help="Write it with a gamma that adapts, where it drafts."),
    as_json,
)  # fmt: skip
def recommend(
    model: str, gpu: str, ctx: int, output: Path | None, adaptive: bool, as_json: bool, **question: Any
) -> None:
    """The fastest plan for MODEL on a GPU that fits and that can be executed, and the fastest that is only estimated.

    A plan that is more exact or simpler is preferred where a faster one is not faster beyond the noise. MODEL is a name
    of `ridgeplan models`, a config.json, a GGUF file, or a hub id in the local cache.
    """
    recommendation = planner.recommend(model, gpu, ctx, **question)
    if output:
        plan = recommendation.adaptive if adaptive and recommendation.adaptive else recommendation.plan
        write_atomically(output, plan.to_json() + "\n")
    if as_json:
        print_json(recommendation.to_dict())
    else:
        _print_recommendation(recommendation)


def _print_recommendation(recommendation: Recommendation) -> None:
    click.echo(recommendation.explain() + "\n")
    rows = [(recommendation.name, *figures(recommendation.predicted), "recommended")]
    best = recommendation.best_estimated
    if best:
        rows.append((best.preset, *figures(best.predicted), f"best of all: {best.rejected}"))
    others = [other for other in recommendation.alternatives if not best or other.plan != best.plan]
    rows += [(other.preset, *figures(other.predicted), other.rejected) for other in others]
    print_table("Plans", ("plan", *FIGURES, "verdict"), rows)
