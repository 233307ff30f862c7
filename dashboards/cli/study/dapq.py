"""`ridgeplan study dapq`: whether queries follow positions more than content, and what that is worth."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ridgeplan.dashboards.cli.lazy_group import examples
from ridgeplan.dashboards.cli.model_inputs import embedded_or
from ridgeplan.dashboards.cli.options import TOKENS, OutputFile, as_json, model_to_run, options
from ridgeplan.dashboards.cli.output import print_table, progress, warnings_as_notes, write_atomically
from ridgeplan.dashboards.cli.study.deliver import delivered

SCHEMA = 1


@click.command(
    epilog=examples(
        "ridgeplan study dapq",
        "ridgeplan study dapq --text book.txt --ctx 8k --html dapq.html",
        "ridgeplan study dapq --model model.gguf --passages 5 --json",
    )
)
@options(
    model_to_run,
    click.option("--text", metavar="FILE", help="UTF-8 text.  [default: a text that comes with Python]"),
    click.option("--ctx", "context", type=TOKENS, default=4096, show_default=True, help="Tokens of a prompt."),
    click.option("--response", type=int, default=128, show_default=True,
                 help="Tokens of the text's own continuation."),
    click.option("--passages", type=int, default=20, show_default=True, help="Passages, spread over the text."),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random tokens."),
    click.option("--output", type=OutputFile(), help="Write the JSON to this file."),
    click.option("--html", type=OutputFile(), help="Write plots to this file, which loads nothing."),
    as_json,
)  # fmt: skip
def dapq(
    model: str | None, text: str | None, output: Path | None, html: Path | None, as_json: bool, **sizes: Any
) -> None:
    """Similarity of queries, recall and attention behind DapQ's eviction, and where they differ from the paper's."""
    # Importing torch takes seconds.
    from ridgeplan.validate.acceptance import named_shape
    from ridgeplan.validate.prompts import read_prompt, sample_text
    from ridgeplan.validate.studies import dapq as measured

    asked, content = measured.Sizes(**sizes), sample_text() if text is None else read_prompt(text)
    with warnings_as_notes(), progress() as bars:
        source, bar = embedded_or(model), bars.add_task("loading")
        shape = named_shape(source)
        found = measured.study(
            source, shape, content, asked,
            on_progress=lambda what, done, total: bars.update(bar, description=what, completed=done, total=total),
        )  # fmt: skip
    document = {
        "schema": SCHEMA,
        "model": shape.name,
        "text": "Python's help topics" if text is None else Path(text).stem,
        "sizes": asdict(asked),
        "figures": measured.summary(found),
        "claims": [asdict(claim) for claim in measured.claims(found)],
    }
    if not delivered(document, output, html, as_json, _write_plots):
        _print(document)


def _write_plots(document: Mapping[str, Any], path: Path) -> None:
    """One HTML file with all plots; a note where plotly is not installed."""
    if importlib.util.find_spec("plotly") is None:
        click.echo("note: plotly is not installed, so no HTML is written", err=True)
        return
    from ridgeplan.dashboards.charts import studies
    from ridgeplan.dashboards.html_page import figure_html, html_page

    rows = document["figures"]
    charts = (studies.similarities, studies.offsets, studies.recalls, studies.attentions)
    write_atomically(path, html_page("DapQ", (figure_html(draw(rows)) for draw in charts)))


def _print(document: Mapping[str, Any]) -> None:
    sizes = document["sizes"]
    click.echo(f"{document['model']} on {document['text']}, {sizes['passages']} passages of {sizes['context']} tokens")
    means = {tuple(row["figure"]): row["mean"] for row in document["figures"]}
    print_table("Similarity of queries (Table 1)", ("content", "position", "after RoPE", "before RoPE", ""),
                _similarities(means))  # fmt: skip
    offsets = [key for key in means if key[0] == "offset"]
    print_table("Similarity at earlier positions (Figure 2b)", ("", *(str(key[1]) for key in offsets), ""),
                [("similarity", *(f"{means[key]:.4f}" for key in offsets), "")])  # fmt: skip
    _print_by_window(means, "recall", "Recall of the most read prompt tokens (Figure 3): budget/window")
    _print_by_window(means, "attention", "Similarity of attention (Table 8): window")
    for claim in document["claims"]:
        click.echo(f"{'holds' if claim['holds'] else 'differs here'}: {claim['text']}: {claim['detail']}")


def _similarities(means: Mapping[tuple[Any, ...], float]) -> Iterator[Sequence[str]]:
    for kind, *rest in means:
        if kind == "similarity" and rest[2] == "after":
            content, position, _ = rest
            both = (f"{means[kind, content, position, when]:.4f}" for when in ("after", "before"))
            yield content, position, *both, ""


def _print_by_window(means: Mapping[tuple[Any, ...], float], kind: str, title: str) -> None:
    """A line for each method, a column for each window, and budget."""
    cases = sorted({key[:1:-1] for key in means if key[0] == kind})
    methods = dict.fromkeys(key[1] for key in means if key[0] == kind)
    columns = ("method", *("/".join(map(str, case)) for case in cases), "")
    lines = ((name, *(f"{means[(kind, name, *case[::-1])]:.3f}" for case in cases), "") for name in methods)
    print_table(title, columns, lines)
