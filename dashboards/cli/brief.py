"""`ridgeplan brief`: an answer as one HTML file, or as a picture for a slide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.output import echo, write_page
from ridgeplan.dashboards.cli.plan import degree_table
from ridgeplan.dashboards.cli.run_inputs import PlanOrModel
from ridgeplan.planner import Plan, Recommendation, SearchOptions
from ridgeplan.planner.extras import require_package
from ridgeplan.planner.plan_file import SavedPlan
from ridgeplan.planner.quality import quality_of
from ridgeplan.planner.queries.estimate import estimate_plan
from ridgeplan.planner.question import Question, ask
from ridgeplan.planner.recommendation import Alternative
from ridgeplan.roofline.catalog.parallel import SINGLE


def _take_workload(ctx: click.Context, param: click.Parameter, given: Any) -> Any:
    """Makes the question of a plan file the default of all other options."""
    if isinstance(given, SavedPlan):
        workload = given.plan.workload
        degrees = {f"{name}_parallel": degree for name, degree in vars(workload.parallel).items()}
        ctx.default_map = {
            "gpu": [workload.hardware], "ctx": workload.context, "batch": workload.batch,
            "new_tokens": workload.new_tokens, "quality": str(quality_of(given.plan)), "backend": str(given.backend),
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

    The HTML file loads nothing. It needs the extra [page], a PNG [png], too. That of a PLAN is about this plan, beside
    the recommended one. A PLAN brings its model, GPU, workload, backend and quality; options replace them.

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
    options = SearchOptions(new_tokens=new_tokens, **search)
    recommendation = planner.recommend(model, gpu, context, options)
    if isinstance(given, SavedPlan):
        question = ask(model, gpu, context, options).on_gpus(recommendation.plan.parallel)
        recommendation = _about(given.plan, recommendation, question)
    if output.suffix == ".png":
        from ridgeplan.dashboards.charts.plans import brief_figure  # imports plotly
        from ridgeplan.dashboards.figures.paper_figure import write_pngs

        write_pngs({output: brief_figure(recommendation)})
    else:
        write_page(output, "brief_page", recommendation, degree_table(recommendation))
    echo(f"{recommendation.summary()}\nwritten to {output}")
    if recommendation.given:
        echo(f"note: {recommendation.alternatives[0].preset}")


def _about(plan: Plan, best: Recommendation, question: Question) -> Recommendation:
    """The answer about a file's plan. A recommended plan that differs from it becomes the first alternative.

    Raises PlanError where the question's engine does not run the file's plan.
    """
    plan = replace(plan, workload=best.plan.workload)
    if plan == best.plan:
        return best
    question.require_engine_runs(plan)
    result = estimate_plan(plan, question)
    why = result.oom_reason or question.constraint_violation(plan) or question.as_executed.unsupported(plan)
    recommended = Alternative(f"recommended: {best.name}", best.plan, best.predicted, "recommended")
    others = (other for other in best.alternatives if other.preset != result.name)
    return replace(
        best, given=f"plan of the file{f' ({why})' if why else ''}", plan=plan, name=result.name,
        predicted=result.predicted, baseline=result.baseline, alternatives=(recommended, *others), adaptive=None,
        losses=tuple(result.losses), notes=result.notes, fits_device=not result.predicted.offloaded_layers,
        on_device=(), drafter_range=None,
    )  # fmt: skip
