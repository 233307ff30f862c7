"""`ridgeplan brief`: an answer as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.output import echo
from ridgeplan.dashboards.cli.plan import answer_lines, degree_table
from ridgeplan.dashboards.files import write_atomically
from ridgeplan.planner import SearchOptions
from ridgeplan.planner.extras import require_package


@command()
@click.argument("model")
@opt.gpu
@opt.workload
@opt.limits
@opt.priced_by
@click.option("-o", "--output", type=opt.OutputFile(), default="brief.html", help="The file to write.")
def brief(
    model: str, gpu: str, ctx: int | None, max_model_len: int | None, new_tokens: int, output: Path, **search: Any
) -> None:
    """Write the answer of `ridgeplan plan` as one HTML file: verdict, charts and table. It loads nothing.

    Examples:
      ridgeplan brief Llama-3.1-8B --gpu h200 --ctx 128k
      ridgeplan brief Qwen3-8B --gpu rtx4090 --ctx 32k -o qwen.html
      ridgeplan brief model.gguf --gpu auto --ctx 8k --quality exact
    """
    require_package("plotly")
    options = SearchOptions(new_tokens=new_tokens, **search)
    recommendation = planner.recommend(model, gpu, opt.context_of(ctx, max_model_len, new_tokens), options)
    _, profile = planner.resolve(model, gpu, options.profile, options.acceptance)
    from ridgeplan.dashboards.html_pages import brief_page  # imports plotly

    write_atomically(
        output,
        brief_page([*answer_lines(recommendation), *degree_table(recommendation)], recommendation, profile.hardware),
    )
    echo(f"{recommendation.summary()}\nwritten to {output}")
