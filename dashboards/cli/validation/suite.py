"""`ridgeplan validate --suite` and `--report`: the suite's results as tables, JSON and one HTML file."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeplan.dashboards.cli.model_inputs import embedded_or
from ridgeplan.dashboards.cli.output import (
    number,
    print_json,
    print_table,
    progress,
    warnings_as_notes,
    write_atomically,
)
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.profile import load_profile
from ridgeplan.validate.suite.results import RegretRow, SuiteReport, SuiteRow, read_report

if TYPE_CHECKING:
    from ridgeplan.validate.suite.run import Question
    from ridgeplan.validate.suite.summary import Summary

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
    from ridgeplan.validate.suite.run import Question, heading

    generating = not only or "generations" in only
    sources = tuple(embedded_or(model) for model in models or (None,)) if generating else ()
    texts = (None if path is None else read_prompt(path) for path in (prompt_file, other_text))
    question = Question(suite, only, calibrated, sources, *texts)
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
    from ridgeplan.validate.suite.summary import summaries

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
    from ridgeplan.dashboards.validation_page import page

    write_atomically(path, page(report.to_dict(), [one.to_dict() for one in found]))


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


def _measured(question: Question) -> SuiteReport:
    from ridgeplan.validate.suite import run

    with warnings_as_notes(), progress() as bars:
        bar = bars.add_task("validating")
        return run.run_suite(
            question,
            lambda what, done, total: bars.update(bar, description=what, completed=done, total=total),
        )
