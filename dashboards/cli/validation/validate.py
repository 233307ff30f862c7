"""`ridgeplan validate`: predictions against measurements, of one plan or of a whole suite."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli.lazy_group import examples
from ridgeplan.dashboards.cli.model_inputs import calibration_tokens, embedded_or, opening_tokens
from ridgeplan.dashboards.cli.options import (
    TOKENS,
    OutputFile,
    PlanFile,
    as_json,
    calibration_file,
    options,
    profile_file,
    prompt_file,
    retrieval_head,
)
from ridgeplan.dashboards.cli.output import print_json, print_table, progress, warnings_as_notes
from ridgeplan.dashboards.cli.run import DEFAULT_NEW_TOKENS
from ridgeplan.dashboards.cli.validation.suite import run_suite, show_report
from ridgeplan.planner import Plan
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.profile import load_profile
from ridgeplan.validate.suite.results import SECTIONS, SUITES

if TYPE_CHECKING:
    from ridgeplan.validate import Comparison

RUNS = ("plain decoding", "the plan")  # in `validate_plan`'s order
# What is validated, and the options that belong to it.
SUBJECTS = {
    "PLAN": {"models", "prompt_file", "max_new_tokens", "profile", "calibration", "retrieval_head", "agreement"},
    "--suite": {"models", "prompt_file", "other_text", "profile", "only", "output", "html"},
    "--report": {"html"},
}


@click.command(
    epilog=examples(
        "ridgeplan validate plan.json --prompt-file book.txt",
        "ridgeplan validate --suite smoke --output suite.json --html suite.html",
        "ridgeplan validate --report suite.json",
    )
)
@click.argument("plan", type=PlanFile(), required=False)
@options(
    click.option("--suite", type=click.Choice(SUITES), help="Validate the package on this machine instead of a plan."),
    click.option("--report", type=click.Path(path_type=Path), help="Show a suite's results from this file instead."),
    click.option(
        "--model", "models", multiple=True,
        help="Folder, GGUF file or hub id to run; several for a suite.  [default: the embedded SmolLM2-135M-Instruct]",
    ),
    prompt_file,
    click.option("--other-text", metavar="FILE", help="Another UTF-8 text, on which a suite measures acceptance too."),
    click.option("--max-new-tokens", "--new-tokens", "--osl", "max_new_tokens", type=TOKENS,
                 help=f"Tokens to generate.  [default: {DEFAULT_NEW_TOKENS}]"),
    profile_file,
    calibration_file,
    retrieval_head,
    click.option(
        "--agreement", is_flag=True, help="Also count the greedy tokens that differ from float32's; none can on a CPU."
    ),
    click.option("--only", type=click.Choice(SECTIONS), multiple=True, help="A part of the suite; repeat for several."),
    click.option("--output", type=OutputFile(), help="Where to save a suite's results as JSON, beside earlier parts."),
    click.option("--html", type=OutputFile(), help="Where to save a suite's results as one HTML file."),
    as_json,
)  # fmt: skip
def validate(plan: Plan | None, suite: str | None, report: Path | None, as_json: bool, **rest: Any) -> None:
    """Compare predictions with measurements on this machine.

    With PLAN, a plan's file: run plain decoding and the plan in turns on one text, whose start is the prompt, as long
    as the plan's context. With --suite: kernels, steps, generations and the regret of recommendations.
    """
    subject = _subject({"PLAN": plan, "--suite": suite, "--report": report})
    given = {name: value for name, value in rest.items() if name in SUBJECTS[subject]}
    _forbid({name: value for name, value in rest.items() if name not in given}, subject)
    if plan is not None:
        validate_one(plan, as_json=as_json, **given)
    elif suite is not None:
        run_suite(suite, as_json=as_json, **given)
    elif report is not None:
        show_report(report, as_json=as_json, **given)


def _subject(found: dict[str, object]) -> str:
    """Which of the three was given. Raises UsageError for none or several."""
    named = [name for name, value in found.items() if value is not None]
    if len(named) != 1:
        told = " and ".join(named) + " were given" if named else "nothing to validate was given"
        raise click.UsageError(f"{told}; allowed: one of {', '.join(found)}")
    return named[0]


def _forbid(options: dict[str, Any], subject: str) -> None:
    """Raises UsageError for an option that does not belong to the subject."""
    stray = next((name for name, value in options.items() if value), None)
    if stray is not None:
        option = "--model" if stray == "models" else f"--{stray.replace('_', '-')}"
        raise click.UsageError(f"{option} cannot be given with {subject}")


def validate_one(
    plan: Plan,
    models: tuple[str, ...],
    prompt_file: str | None,
    max_new_tokens: int | None,
    profile: str | None,
    calibration: str | None,
    retrieval_head: str | None,
    agreement: bool,
    as_json: bool,
) -> None:
    """Runs plain decoding and the plan, and prints both comparisons."""
    if len(models) > 1:
        raise click.UsageError(f"--model was given {len(models)} times; allowed with PLAN: once")
    calibrated = this_machine() if profile is None else load_profile(profile)
    limit = min(DEFAULT_NEW_TOKENS, plan.workload.new_tokens) if max_new_tokens is None else max_new_tokens
    # Importing torch takes seconds, so the files are checked first.
    from ridgeplan.validate import validate_plan
    from ridgeplan.validate.agreement import plan_agreement

    with warnings_as_notes(), progress() as bars:
        source = embedded_or(models[0] if models else None)
        prompts = [opening_tokens(source, prompt_file, plan.workload.context)] * plan.workload.batch
        total = limit * len(prompts)
        tasks = [bars.add_task(f"running {what}", total=total) for what in RUNS]
        validation = validate_plan(
            plan, source, prompts, limit, profile=calibrated, calibration=calibration_tokens(source, calibration),
            retrieval_head=retrieval_head,
            on_progress=lambda index, tokens: bars.update(tasks[index], completed=tokens),
        )  # fmt: skip
        agreed = plan_agreement(plan, source, prompts[0], limit, retrieval_head) if agreement else None
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
