"""`ridgeplan validate`: a plan's prediction against its measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ridgeplan.dashboards.cli.model_inputs import calibration_tokens, embedded_or, opening_tokens
from ridgeplan.dashboards.cli.options import (
    PlanFile,
    as_json,
    calibration_file,
    model_to_run,
    options,
    profile_file,
    prompt_file,
)
from ridgeplan.dashboards.cli.output import print_json, print_table, progress, warnings_as_notes
from ridgeplan.dashboards.cli.run import DEFAULT_NEW_TOKENS
from ridgeplan.planner import Plan
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.profile import load_profile

if TYPE_CHECKING:
    from ridgeplan.validate import Comparison

RUNS = ("plain decoding", "the plan")  # in `validate_plan`'s order


@click.command()
@click.argument("plan", type=PlanFile())
@options(
    model_to_run,
    prompt_file,
    click.option("--max-new-tokens", type=int, help=f"Tokens to generate.  [default: {DEFAULT_NEW_TOKENS}]"),
    profile_file,
    calibration_file,
    click.option(
        "--agreement", is_flag=True, help="Also count the greedy tokens that differ from float32's; none can on a CPU."
    ),
    as_json,
)
def validate(
    plan: Plan,
    model: str | None,
    prompt_file: str | None,
    max_new_tokens: int | None,
    profile: str | None,
    calibration: str | None,
    agreement: bool,
    as_json: bool,
) -> None:
    """Run plain decoding and the plan in file PLAN on one text, and compare both with their predictions.

    The prompt is the start of the text, as long as the plan's context.
    """
    calibrated = this_machine() if profile is None else load_profile(profile)
    limit = min(DEFAULT_NEW_TOKENS, plan.workload.new_tokens) if max_new_tokens is None else max_new_tokens
    # Importing torch takes seconds, so the files are checked first.
    from ridgeplan.validate import validate_plan
    from ridgeplan.validate.agreement import plan_agreement

    with warnings_as_notes(), progress() as bars:
        source = embedded_or(model)
        prompts = [opening_tokens(source, prompt_file, plan.workload.context)] * plan.workload.batch
        total = limit * len(prompts)
        tasks = [bars.add_task(f"running {what}", total=total) for what in RUNS]
        validation = validate_plan(
            plan, source, prompts, limit, profile=calibrated, calibration=calibration_tokens(source, calibration),
            on_progress=lambda index, tokens: bars.update(tasks[index], completed=tokens),
        )  # fmt: skip
        agreed = plan_agreement(plan, source, prompts[0], limit) if agreement else None
    if as_json:
        more = {"agreement": agreed.to_dict()} if agreed else {}
        print_json({"plan": plan.to_dict(), "validation": validation.to_dict()} | more)
        return
    for what, run in zip(RUNS, (validation.plain, validation.planned), strict=True):
        print_comparison(what, run.comparison)
    note_order(validation.in_turns)
    if agreed:
        click.echo(
            f"{len(agreed.gaps)} of {agreed.tokens} greedy tokens ({agreed.rate:.1%}) differ from float32's, "
            f"{agreed.beyond_noise} by more than rounding explains"
        )


def print_comparison(title: str, comparison: Comparison) -> None:
    """Prints a table of predicted against measured."""
    workload = f"context {comparison.context}, {comparison.new_tokens} new tokens, batch {comparison.batch}"
    if comparison.spread is not None:
        workload += f", spread {comparison.spread:.0%}"
    columns = ("", "predicted", "measured", "error")
    print_table(
        f"{title}: {comparison.preset}, {workload} [{comparison.source}]",
        columns,
        (row.texts() for row in comparison.rows),
    )


def note_order(in_turns: bool) -> None:
    """Says so where the plans could not run in turns."""
    if not in_turns:
        from ridgeplan.validate.validation import ONE_AFTER_ANOTHER

        click.echo(f"note: {ONE_AFTER_ANOTHER}", err=True)
