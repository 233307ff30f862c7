"""`ridgeplan validate`: predictions against measurements, for one plan or a whole suite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.model_inputs import calibration_tokens, embedded_or, opening_tokens, require_planned_model
from ridgeplan.dashboards.cli.output import (
    echo,
    number,
    print_answer,
    print_json,
    print_table,
    progress,
    runs_progress,
    write_page,
)
from ridgeplan.dashboards.files import write_atomically, write_json
from ridgeplan.planner.plan_file import SavedPlan
from ridgeplan.planner.render.trace import chrome_trace
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.profile import load_profile
from ridgeplan.validate.suite.report import SECTIONS, SUITES, RegretRow, SuiteReport, SuiteRow

if TYPE_CHECKING:
    from ridgeplan.validate import Comparison
    from ridgeplan.validate.suite.report import Summary


WORST = 12  # rows shown


def run_suite(
    suite: str, only: Sequence[str], models: Sequence[str], prompt_file: str | None, other_text: str | None,
    profile: str | None, output: Path | None, html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Runs the suite, saves its results after every part, and prints them. Earlier ones of other sections are kept.

    Raises SuiteError, before anything is measured, where those are of another suite, machine or calibration.
    """
    calibrated = this_machine() if profile is None else load_profile(profile)
    earlier = SuiteReport.read(output) if output is not None and output.exists() else None
    # Importing torch takes seconds, so the files are checked first.
    from ridgeplan.validate.prompts import read_prompt
    from ridgeplan.validate.suite.run import SuiteOptions, heading
    from ridgeplan.validate.suite.run import run_suite as measure

    generating = not only or "generations" in only
    sources = tuple(embedded_or(model) for model in models or (None,)) if generating else ()
    texts = (None if path is None else read_prompt(path) for path in (prompt_file, other_text))
    options = SuiteOptions(suite, only, calibrated, sources, *texts)
    if earlier is not None:
        heading(options).merged_into(earlier)

    def saved(report: SuiteReport) -> SuiteReport:
        report = report if earlier is None else report.merged_into(earlier)
        if output is not None:
            write_atomically(output, report.to_json())
        return report

    with progress("validating") as on_progress:
        report = saved(measure(options, on_progress, keep=saved))
    show(report, html, as_json)


def show(report: SuiteReport, html: Path | None, as_json: bool) -> None:
    """Writes a report's HTML, where plotly is installed, and prints the report."""
    from ridgeplan.validate.suite.report import summaries

    errors = list(summaries(report))
    summary = [error.to_dict() for error in errors]
    elsewhere = "; `ridgeplan validate --report` can write it elsewhere"
    write_page(html, "validation_page", report.to_dict(), summary, hint=elsewhere)
    print_answer(report.to_dict() | {"summary": summary}, as_json, lambda: print_suite(report, errors))


def print_suite(report: SuiteReport, errors: Sequence[Summary]) -> None:
    """Prints errors against their targets, the largest errors, regret, and what was skipped."""
    echo(f"{report.device}, {report.date}, predicted by {report.profile}")
    columns = ("", "rows", "signed median", "median", "p90", "worst", "target", "")
    print_table("Errors (predicted / measured - 1)", columns, map(summary_texts, errors))
    if report.rows:
        worst = map(row_texts, report.worst_rows(WORST))
        print_table("Largest errors", ("", "predicted", "measured", "error", "case"), worst)
    if report.regret:
        heads = ("workload", "recommended ms", "best ms", "regret", "recommended; best")
        print_table("Regret of the recommended plans", heads, map(regret_texts, report.regret))
    for line in report.skipped:
        echo(f"skipped: {line}")


def summary_texts(summary: Summary) -> tuple[str, ...]:
    """The cells of a summary. Targets limit absolute errors."""
    target = ", ".join(f"{name} {limit:.1%}" for name, limit in vars(summary.limits).items() if limit is not None)
    verdict = {None: "", True: "met", False: "missed"}[summary.met]
    sizes = (f"{size:.1%}" for size in (summary.median, summary.p90, summary.worst))
    return summary.name, str(summary.count), f"{summary.signed_median:+.1%}", *sizes, target, verdict


def row_texts(row: SuiteRow) -> tuple[str, ...]:
    """The cells of a row."""
    predicted, measured = (f"{number(value)} {row.unit}".strip() for value in (row.predicted, row.measured))
    return row.kind, predicted, measured, f"{row.relative_error:+.1%}", " ".join(filter(None, (row.model, row.case)))


def regret_texts(row: RegretRow) -> tuple[str, ...]:
    """The cells of a workload's regret."""
    plans = row.recommended if row.recommended == row.best else f"{row.recommended}; {row.best}"
    times = number(row.recommended_ms), number(row.best_ms)
    return f"{row.model} {row.context}x{row.batch}", *times, f"{row.regret:.1%}", plans


RUNS = ("plain decoding", "the plan")  # in the order of `validate_plan`
# The options of each subject of validation.
SUBJECTS = {
    "PLAN": {"models", "prompt_file", "max_new_tokens", "profile", "calibration", "retrieval_head", "agreement"}
    | {"any_model", "trace"},
    "--suite": {"models", "prompt_file", "other_text", "profile", "only", "output", "html"},
    "--report": {"html"},
}


@command()
@click.argument("plan", type=opt.SavedPlanFile(), required=False)
@click.option("--suite", type=click.Choice(SUITES), help="Validate the package on this machine instead of a plan.")
@click.option("--report", type=click.Path(path_type=Path), help="Show a suite's saved results instead.")
@click.option(
    "--model", "models", multiple=True,
    help="Folder, GGUF file or hub id to run; repeat for a suite.  [default: the embedded SmolLM2-135M-Instruct]",
)  # fmt: skip
@opt.prompt_file
@click.option("--other-text", metavar="FILE", help="Second UTF-8 text on which a suite measures acceptance.")
@opt.max_new_tokens
@opt.profile_file
@opt.calibration_file
@opt.retrieval_head
@click.option("--agreement", is_flag=True, help="Also count greedy tokens that differ from float32; on a CPU none can.")
@opt.any_model
@opt.trace_output
@opt.repeated("--only", "only", click.Choice(SECTIONS), "Run only this part of the suite")
@click.option(
    "--output", type=opt.OutputFile(), help="Save a suite's results to this file as JSON, beside earlier parts."
)
@click.option("--html", type=opt.OutputFile(), help="Save a suite's results as a self-contained page.")
@opt.as_json
def validate(plan: SavedPlan | None, suite: str | None, report: Path | None, as_json: bool, **rest: Any) -> None:
    """Compare predictions with measurements on this machine.

    With a plan file PLAN: run plain decoding and the plan in turns on one text. The prompt is the start of the text, as
    long as the plan's context. With --suite: measure kernels, steps, generations and the regret of recommendations.

    Examples:
      ridgeplan validate plan.json --prompt-file book.txt
      ridgeplan validate --suite smoke --output suite.json --html suite.html
      ridgeplan validate --report suite.json
    """
    subject = _subject({"PLAN": plan, "--suite": suite, "--report": report})
    applicable = {name: value for name, value in rest.items() if name in SUBJECTS[subject]}
    _forbid({name: value for name, value in rest.items() if name not in applicable}, subject)
    if plan is not None:
        validate_plan_file(plan, as_json=as_json, **applicable)
    elif suite is not None:
        run_suite(suite, as_json=as_json, **applicable)
    elif report is not None:
        show(SuiteReport.read(report), as_json=as_json, **applicable)


def _subject(subjects: dict[str, object]) -> str:
    """Which of the three was given. Raises UsageError for none or several."""
    named = [name for name, value in subjects.items() if value is not None]
    if len(named) != 1:
        problem = " and ".join(named) + " were given" if named else "nothing to validate was given"
        raise click.UsageError(f"{problem}; allowed: one of {', '.join(subjects)}")
    return named[0]


def _forbid(options: dict[str, Any], subject: str) -> None:
    """Raises UsageError for an option that does not belong to the subject."""
    stray = next((name for name, value in options.items() if value), None)
    if stray is not None:
        option = "--model" if stray == "models" else f"--{stray.replace('_', '-')}"
        raise click.UsageError(f"{option} cannot be given with {subject}")


def validate_plan_file(
    saved: SavedPlan, models: tuple[str, ...], prompt_file: str | None, max_new_tokens: int | None, profile: str | None,
    calibration: str | None, retrieval_head: str | None, agreement: bool, any_model: bool, trace: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Runs plain decoding and the plan, and prints both comparisons."""
    if len(models) > 1:
        raise click.UsageError(f"--model was given {len(models)} times; allowed with PLAN: once")
    if not any_model:
        require_planned_model(saved, models[0] if models else None, ", or any with --any-model")
    plan = saved.plan
    calibrated = this_machine() if profile is None else load_profile(profile)
    limit = min(opt.DEFAULT_RUN_TOKENS, plan.workload.new_tokens) if max_new_tokens is None else max_new_tokens
    # Importing torch takes seconds, so the files are checked first.
    from ridgeplan.validate import RunOptions, validate_plan
    from ridgeplan.validate.machine import measured_here
    from ridgeplan.validate.quality.fidelity import plan_agreement

    source = embedded_or(models[0] if models else None)
    prompts = [opening_tokens(source, prompt_file, plan.workload.context)] * plan.workload.batch
    with runs_progress(RUNS, limit * len(prompts)) as advance:
        options = RunOptions(
            source, prompts, limit, profile=calibrated, calibration=calibration_tokens(source, calibration),
            retrieval_head=retrieval_head, on_progress=advance,
        )  # fmt: skip
        validation = validate_plan(plan, options)
        greedy = plan_agreement(plan, source, prompts[0], limit, retrieval_head) if agreement else None
    planned = validation.planned
    if trace is not None and planned.comparison.predicted is not None:
        write_json(trace, chrome_trace(planned.comparison.predicted, planned.measured.round_parts_s))
    if as_json:
        more = {"agreement": greedy.to_dict()} if greedy else {}
        print_json({**measured_here(), "plan": plan.to_dict(), "validation": validation.to_dict(), **more})
        return
    for title, run in zip(RUNS, (validation.plain, validation.planned), strict=True):
        print_comparison(title, run.comparison)
    note_order(validation.in_turns)
    if greedy:
        echo(
            f"{len(greedy.gaps)} of {greedy.tokens} greedy tokens ({greedy.rate:.1%}) differ from float32, "
            f"{greedy.beyond_noise} of them by more than rounding explains"
        )


def print_comparison(title: str, comparison: Comparison) -> None:
    """Prints a table of predicted against measured."""
    workload = f"context {comparison.context}, {comparison.new_tokens} new tokens, batch {comparison.batch}"
    if comparison.spread is not None:
        workload += f", spread {comparison.spread:.0%}"
    rows = (row.texts() for row in comparison.rows)
    title = f"{title}: {comparison.preset}, {workload} [{comparison.source}]"
    print_table(title, ("", "predicted", "measured", "error"), rows)


def note_order(in_turns: bool) -> None:
    """Prints a note where the plans could not run in turns."""
    if not in_turns:
        from ridgeplan.validate.validation import ONE_AFTER_ANOTHER

        echo(f"note: {ONE_AFTER_ANOTHER}", err=True)
