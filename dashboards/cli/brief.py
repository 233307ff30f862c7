"""`ridgeplan brief`: an answer as one HTML file, or as a picture for a slide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.output import echo, write_page
from ridgeplan.dashboards.cli.plan import degree_table
from ridgeplan.dashboards.cli.run_inputs import PlanOrModel
from ridgeplan.planner.extras import require_package
from ridgeplan.planner.plan_file import SavedPlan
from ridgeplan.planner.quality import quality_of
from ridgeplan.roofline.catalog.parallel import SINGLE
from ridgeplan.roofline.plan.presets import preset_name


def _take_workload(ctx: click.Context, param: click.Parameter, given: Any) -> Any:
    """Makes the question of a plan file the default of all other options."""
    if isinstance(given, SavedPlan):
        workload = given.plan.workload
        degrees = {f"{name}_parallel": degree for name, degree in vars(workload.parallel).items()}
        ctx.default_map = {
            "gpu": [workload.hardware], "ctx": workload.context, "batch": workload.batch,
            "new_tokens": workload.new_tokens, "quality": str(quality_of(given.plan)),
            "yarn": workload.yarn_factor > 1, "text": workload.text or None, "drafter_head": workload.drafter_head,
        } | (degrees if workload.parallel != SINGLE else {})  # fmt: skip
    return given


@command()
@click.argument("given", metavar="MODEL|PLAN", type=PlanOrModel(), is_eager=True, callback=_take_workload)
@opt.gpu
@opt.workload
@opt.limits
@opt.priced_by
@click.option("-o", "--output", type=opt.FormatFile(".html", ".png"), default="brief.html",
              help="The file to write: .html, or .png for a slide.")  # fmt: skip
def brief(
    given: SavedPlan | str, gpu: str, ctx: int | None, max_model_len: int | None, new_tokens: int, output: Path,
    **search: Any,
) -> None:  # fmt: skip
    """Write the answer of `ridgeplan plan` as one file for a slide: verdict, reasons, chart and table.

    The HTML file loads nothing. A PLAN brings its model, GPU, workload and quality; options replace them.

    Examples:
      ridgeplan brief Llama-3.1-8B --gpu h200 --ctx 128k
      ridgeplan brief Qwen3-8B --gpu rtx4090 --ctx 32k -o qwen.png
      ridgeplan brief plan.json
    """
    if output.suffix == ".png":
        require_package("kaleido")  # before the search, which takes seconds
    model: Any = given
    if isinstance(given, SavedPlan):
        model = given.shape or given.plan.workload.model
        if given.profile and gpu == given.plan.workload.hardware and search["profile"] is None:
            gpu, search["profile"] = "auto", given.profile
    context = opt.context_of(ctx, max_model_len, new_tokens)
    recommendation = planner.recommend(model, gpu, context, new_tokens=new_tokens, **search)
    if output.suffix == ".png":
        from ridgeplan.dashboards.charts.plans import brief_figure  # imports plotly
        from ridgeplan.dashboards.figures.paper_figure import write_pngs

        write_pngs({output: brief_figure(recommendation)})
    else:
        write_page(output, "brief_page", recommendation, degree_table(recommendation))
    echo(f"{recommendation.summary()}\nwritten to {output}")
    if isinstance(given, SavedPlan) and recommendation.name != preset_name(given.plan):
        echo(f"note: the file holds another plan: {preset_name(given.plan)}")
