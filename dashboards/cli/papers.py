"""`ridgeplan papers` and `figures`: the papers' published times and memory beside the model's predictions."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.output import echo, number, print_json, print_table, wrapped
from ridgeplan.dashboards.files import require_writable, write_atomically, write_json
from ridgeplan.dashboards.rows import csv_text
from ridgeplan.planner.extras import pip_command

if TYPE_CHECKING:
    from ridgeplan.dashboards.figures.paper_figure import PaperFigure, Row
    from ridgeplan.validate.papers.comparison import Cell, TableResult


COLUMNS = ("cell", "quantity", "published", "predicted", "error", "ms beyond", "flag")
LEGEND = "ms beyond: what a token takes as published beyond bytes, FLOPs and what the engine is known to add"


@command()
@opt.repeated("--paper", "chosen", str, "Only quantspec, specontext, specattn or dapq", metavar="NAME")
@opt.json_output
@opt.as_json
def papers(chosen: tuple[str, ...], output: Path | None, as_json: bool) -> None:
    """Compare the times and memory that QuantSpec, SpeContext, SpecAttn and DapQ publish with predictions.

    Predictions use the published acceptance where a paper gives it. The table marks cells that contradict the memory
    traffic and cells that cannot be predicted.

    Examples:
      ridgeplan papers
      ridgeplan papers --paper quantspec --paper dapq
      ridgeplan papers --output papers.json
    """
    from ridgeplan.validate.papers.comparison import compare_all
    from ridgeplan.validate.papers.rows import PAPERS

    results = compare_all(chosen or PAPERS)
    write_json(output, document(results))
    if as_json:
        print_json(document(results))
        return
    for result in results:
        title = f"{result.paper}, {result.name}: {result.title}"
        print_table(title, COLUMNS, table_rows(result))
        echo("\n".join(summary_lines(result)) + "\n")
    echo(wrapped(LEGEND))


def document(results: Iterable[TableResult]) -> dict[str, Any]:
    """All tables as plain JSON values, each with its targets."""
    from ridgeplan.validate.papers.comparison import targets_of

    tables = [{**table.to_dict(), "targets": [item.result(table) for item in targets_of(table)]} for table in results]
    return {"tables": tables}


def summary_lines(result: TableResult) -> list[str]:
    """The table's count and median error, then a line for each target."""
    from ridgeplan.validate.papers.comparison import targets_of

    error = result.median_error
    counts = f"{len(result.cells) - len(result.unpredicted)} of {len(result.cells)} cells predicted"
    median = f"; median absolute error {error:.1%} of {len(result.errors)} with numbers" if error is not None else ""
    return [counts + median, *(target.describe(result) for target in targets_of(result))]


def table_rows(result: TableResult) -> Iterator[tuple[str, ...]]:
    """Rows of `COLUMNS`: each case, and its cells below."""
    for case, cells in groupby(result.cells, key=lambda cell: cell.case):
        yield (case, *[""] * (len(COLUMNS) - 1))
        yield from ((f"  {cell.method}", *cell_texts(cell)[1:]) for cell in cells)


def cell_texts(cell: Cell) -> tuple[str, ...]:
    """A cell's case and method, and the other columns."""
    error = "" if cell.error is None else f"{cell.error:+.1%}"
    name, quantity = f"{cell.case}, {cell.method}", cell.metric.replace("_", " ")
    beyond = "" if cell.beyond_ms is None else f"{cell.beyond_ms:+.3g}"
    return name, quantity, _value(cell.published), _value(cell.predicted), error, beyond, cell.flag


def _value(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else number(value)


FORMATS = ("html", "csv", "png")
PAGE = "figures.html"
Drawn = Mapping["PaperFigure", Sequence["Row"]]


class Setting(click.ParamType):
    """A slider's name and its value."""

    name = "slider=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """`gpu=h200` as a pair."""
        name, equals, chosen = str(value).partition("=")
        if not (name and equals and chosen):
            self.fail(f"{value!r} is not a setting; allowed: a slider and its value, such as gpu=h200", param, ctx)
        return name.strip(), chosen.strip()


@command()
@click.argument("names", nargs=-1)
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
    help="Write the figures to this folder.",
)  # fmt: skip
@opt.repeated(
    "--format", "formats", click.Choice(FORMATS), "Only these files", otherwise="html and csv, and png with kaleido"
)
@opt.repeated("--set", "overrides", Setting(), "Another setting than the paper's, such as gpu=h200")
@opt.as_json
def figures(
    names: tuple[str, ...], output: Path | None, formats: tuple[str, ...], overrides: tuple[tuple[str, str], ...],
    as_json: bool,
) -> None:  # fmt: skip
    """Draw figures of QuantSpec, SpeContext, SpecAttn and DapQ from the model.

    NAMES are figures or papers, by default all. Without --output the figures and their settings are listed.
    Drawing needs the extra [page].

    Examples:
      ridgeplan figures
      ridgeplan figures -o figures
      ridgeplan figures quantspec-fig4 --set gpu=h200 --set gamma=6 -o figures --format csv
    """
    from ridgeplan.dashboards.figures import figures_named

    chosen = figures_named(names)
    settings = _settings(chosen, dict(overrides))
    if not (output or as_json):
        _print_list(chosen)
        return
    drawn = {figure: figure.data(**settings[figure]) for figure in chosen}
    if as_json:
        print_json({"figures": [_document(figure, settings[figure], rows) for figure, rows in drawn.items()]})
    if output:
        _write(drawn, output, formats)


def _settings(chosen: Iterable[PaperFigure], settings: Mapping[str, str]) -> dict[PaperFigure, dict[str, Any]]:
    """The settings of each figure that has such sliders. Raises FigureError for one that no figure has."""
    from ridgeplan.dashboards.figures.paper_figure import FigureError

    known = {slider.name for figure in chosen for slider in figure.sliders}
    stray = next((name for name in settings if name not in known), None)
    if stray:
        raise FigureError(f"no chosen figure has the setting {stray!r}; allowed: {', '.join(sorted(known)) or 'none'}")
    return {
        figure: figure.settings(
            **{slider.name: settings[slider.name] for slider in figure.sliders if slider.name in settings}
        )
        for figure in chosen
    }


def _print_list(chosen: Sequence[PaperFigure]) -> None:
    for paper in dict.fromkeys(figure.paper for figure in chosen):
        rows = [(figure.name, _about(figure)) for figure in chosen if figure.paper == paper]
        print_table(paper, ("figure", "content and the paper's settings"), rows)


def _about(figure: PaperFigure) -> str:
    settings = ", ".join(f"{slider.name}={slider.default}" for slider in figure.sliders)
    return f"{figure.figure}: {figure.title}" + (f" ({settings})" if settings else "")


def _document(figure: PaperFigure, settings: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    about = {"name": figure.name, "paper": figure.paper, "figure": figure.figure, "title": figure.title}
    return {**about, "settings": settings, "rows": rows}


def _write(drawn: Drawn, folder: Path, formats: Sequence[str]) -> None:
    """All files of the wanted formats, and a line that says what was written."""
    from ridgeplan.dashboards.figures import paper_figure

    chosen_formats = formats or [name for name in FORMATS if name != "png" or paper_figure.can_draw()]
    require_writable(folder / PAGE)
    if "png" in chosen_formats:  # may fail, and then nothing is written
        _write_pngs(drawn, folder)
    if "html" in chosen_formats:
        write_atomically(folder / PAGE, _page(drawn))
    if "csv" in chosen_formats:
        for figure, rows in drawn.items():
            write_atomically(folder / f"{figure.name}.csv", csv_text(rows))
    echo(f"{len(drawn)} figure{'s' * (len(drawn) != 1)} as {', '.join(chosen_formats)} in {folder}")
    if not formats and "png" not in chosen_formats:
        echo(f"note: no PNG files, because they need kaleido: `{pip_command('kaleido')}`", err=True)


def _write_pngs(drawn: Drawn, folder: Path) -> None:
    from ridgeplan.dashboards.figures.paper_figure import write_pngs

    with tempfile.TemporaryDirectory(dir=folder) as staging:
        write_pngs({Path(staging) / f"{figure.name}.png": figure.draw(rows) for figure, rows in drawn.items()})
        for path in Path(staging).glob("*.png"):
            path.replace(folder / path.name)


def _page(drawn: Drawn) -> str:
    from html import escape

    from ridgeplan.dashboards.html_pages import figure_html, html_page

    parts = (
        f"<h2>{escape(f'{figure.paper}, {figure.figure}: {figure.title}')}</h2>{figure_html(figure.draw(rows))}"
        for figure, rows in drawn.items()
    )
    return html_page("Figures of the papers, from the model", parts)
