"""`ridgeplan papers`: the papers' published tables, cell by cell, beside the model's predictions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli.lazy_group import examples
from ridgeplan.dashboards.cli.options import OutputFile, as_json, options
from ridgeplan.dashboards.cli.output import number, print_json, print_table, write_atomically

if TYPE_CHECKING:
    from ridgeplan.planner.published import Cell, TableResult

COLUMNS = ("cell", "quantity", "published", "predicted", "error", "flag")


@click.command(
    epilog=examples(
        "ridgeplan papers",
        "ridgeplan papers --paper quantspec --paper dapq",
        "ridgeplan papers --output papers.json",
    )
)
@options(
    click.option("--paper", "chosen", metavar="NAME", multiple=True,
                 help="Only quantspec, specontext, specattn or dapq; may be repeated."),
    click.option("--output", type=OutputFile(), help="Write the JSON to this file."),
    as_json,
)  # fmt: skip
def papers(chosen: tuple[str, ...], output: Path | None, as_json: bool) -> None:
    """Published tables of QuantSpec, SpeContext, SpecAttn and DapQ against predictions.

    Published acceptance is an input where it is given. Cells that bytes do not allow, and cells that cannot be
    predicted, say so.
    """
    from ridgeplan.planner.published import PAPERS, compare_all

    results = compare_all(chosen or PAPERS)
    if output:
        write_atomically(output, json.dumps(document(results), indent=2, allow_nan=False) + "\n")
    if as_json:
        print_json(document(results))
        return
    for result in results:
        title = f"{result.paper}, {result.name}: {result.title}"
        print_table(title, COLUMNS, table_rows(result))
        click.echo("\n".join(summary_lines(result)) + "\n")


def document(results: Iterable[TableResult]) -> dict[str, Any]:
    """All tables as plain JSON values, each with its targets."""
    from ridgeplan.planner.published import targets_of

    return {"tables": [{**one.to_dict(), "targets": [item.result(one) for item in targets_of(one)]} for one in results]}


def summary_lines(result: TableResult) -> list[str]:
    """The table's count and median error, then a line for each target."""
    from ridgeplan.planner.published import targets_of

    error = result.median_error
    counts = f"{len(result.cells) - len(result.unpredicted)} of {len(result.cells)} cells predicted"
    told = f"; median absolute error {error:.1%} of {len(result.errors)} with numbers" if error is not None else ""
    return [counts + told, *(target.told(result) for target in targets_of(result))]


def table_rows(result: TableResult) -> Iterator[tuple[str, ...]]:
    """Rows of `COLUMNS`: each case, and its cells below."""
    for case, cells in groupby(result.cells, key=lambda cell: cell.case):
        yield (case, *[""] * (len(COLUMNS) - 1))
        yield from ((f"  {cell.method}", *cell_texts(cell)[1:]) for cell in cells)


def cell_texts(cell: Cell) -> tuple[str, ...]:
    """A cell's case and method, and the other columns."""
    error = "" if cell.error is None else f"{cell.error:+.1%}"
    name, quantity = f"{cell.case}, {cell.method}", cell.metric.replace("_", " ")
    return name, quantity, _value(cell.published), _value(cell.predicted), error, cell.flag


def _value(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else number(value)
