"""`ridgeplan validate`: predictions against measurements, of one plan or of a whole suite."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli.groups import examples
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
from ridgeplan.dashboards.cli.output import (
    number,
    print_json,
    print_table,
    progress,
    warnings_as_notes,
    write_atomically,
)
from ridgeplan.dashboards.cli.run import DEFAULT_NEW_TOKENS
from ridgeplan.planner import Plan
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.profile import load_profile
from ridgeplan.validate.suite.report import SECTIONS, SUITES, RegretRow, SuiteReport, SuiteRow, read_report

if TYPE_CHECKING:
    from ridgeplan.validate import Comparison
    from ridgeplan.validate.suite.report import Summary
    from ridgeplan.validate.suite.run import SuiteOptions


WORST = 12  # rows shown
HTML_LATER = "plotly is not installed, so no HTML is written: make it elsewhere with `ridgeplan validate --report`"


def run_suite(
    suite: str,
    only: Sequence[str],
    models: Sequence[str],
    prompt_file: str | None,
    other_text: str | None,
    profile: str | None,
    output: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Runs the suite, saves and prints its results. What another run left in `output` is kept beside them.

    Raises SuiteError where that is of another suite, machine or calibration, before anything is measured.
    """
    calibrated = this_machine() if profile is None else load_profile(profile)
    earlier = read_report(output) if output is not None and output.exists() else None
    # Importing torch takes seconds, so the files are checked first.
    from ridgeplan.validate.prompts import read_prompt
    from ridgeplan.validate.suite.run import SuiteOptions, heading

    generating = not only or "generations" in only
    sources = tuple(embedded_or(model) for model in models or (None,)) if generating else ()
    texts = (None if path is None else read_prompt(path) for path in (prompt_file, other_text))
    question = SuiteOptions(suite, only, calibrated, sources, *texts)
    if earlier is not None:
        heading(question).merged_into(earlier)
    report = _measured(question)
    if earlier is not None:
        report = report.merged_into(earlier)
    if output is not None:
        write_atomically(output, report.to_json())
    show(report, html, as_json)


def show_report(path: Path, html: Path | None, as_json: bool) -> None:
    """Prints the results in a file, or makes their HTML. Raises SuiteError."""
    show(read_report(path), html, as_json)


def show(report: SuiteReport, html: Path | None, as_json: bool) -> None:
    """Writes the HTML, where plotly is installed, and prints the report."""
    from ridgeplan.validate.suite.report import summaries

    found = list(summaries(report))
    if html is not None:
        write_html(report, found, html)
    if as_json:
        print_json(report.to_dict() | {"summary": [one.to_dict() for one in found]})
    else:
        print_suite(report, found)


def write_html(report: SuiteReport, found: Sequence[Summary], path: Path) -> None:
    """One file with everything in it; a note where plotly is not installed."""
    if importlib.util.find_spec("plotly") is None:
        click.echo(f"note: {HTML_LATER}", err=True)
        return
    from ridgeplan.dashboards.html_pages import validation_page

    write_atomically(path, validation_page(report.to_dict(), [one.to_dict() for one in found]))


def print_suite(report: SuiteReport, found: Sequence[Summary]) -> None:
    """Prints errors against their targets, the largest errors, regret, and what did not run."""
    click.echo(f"{report.device}, {report.date}, predicted by {report.profile}")
    columns = ("", "rows", "signed median", "median", "p90", "worst", "target", "")
    print_table("Errors, predicted over measured minus 1", columns, map(summary_texts, found))
    if report.rows:
        worst = map(row_texts, report.worst_rows(WORST))
        print_table("Largest errors", ("", "predicted", "measured", "error", "case"), worst)
    if report.regret:
        heads = ("workload", "recommended ms", "best ms", "regret", "recommended, and the best")
        print_table("Regret of the recommended plans", heads, map(regret_texts, report.regret))
    for line in report.skipped:
        click.echo(f"skipped: {line}")


def summary_texts(one: Summary) -> tuple[str, ...]:
    """The cells of a summary; targets are of absolute errors."""
    asked = {name: limit for name, limit in vars(one.limits).items() if limit is not None}
    verdict = {None: "", True: "met", False: "missed"}[one.met]
    sizes = (f"{size:.1%}" for size in (one.median, one.p90, one.worst))
    target = ", ".join(f"{name} {limit:.1%}" for name, limit in asked.items())
    return one.name, str(one.count), f"{one.signed_median:+.1%}", *sizes, target, verdict


def row_texts(row: SuiteRow) -> tuple[str, ...]:
    """The cells of a row."""
    predicted, measured = (f"{number(value)} {row.unit}".strip() for value in (row.predicted, row.measured))
    return row.kind, predicted, measured, f"{row.relative_error:+.1%}", " ".join(filter(None, (row.model, row.case)))


def regret_texts(row: RegretRow) -> tuple[str, ...]:
    """The cells of a workload's regret."""
    plans = row.recommended if row.recommended == row.best else f"{row.recommended}; {row.best}"
    times = number(row.recommended_ms), number(row.best_ms)
    return f"{row.model} {row.context}x{row.batch}", *times, f"{row.regret:.1%}", plans


def _measured(question: SuiteOptions) -> SuiteReport:
    from ridgeplan.validate.suite import run

    with warnings_as_notes(), progress() as bars:
        bar = bars.add_task("validating")
        return run.run_suite(
            question,
            lambda what, done, total: bars.update(bar, description=what, completed=done, total=total),
        )


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
    from ridgeplan.validate.quality.fidelity import plan_agreement

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
