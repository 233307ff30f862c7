"""`ridgeplan study retrieval`: what selections choose, against what the model attends to most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ridgeplan.dashboards.cli.acceptance.lists import ListCommand
from ridgeplan.dashboards.cli.lazy_group import examples
from ridgeplan.dashboards.cli.model_inputs import embedded_or
from ridgeplan.dashboards.cli.options import TOKENS, OutputFile, as_json, model_to_run, options, retrieval_head, yarn
from ridgeplan.dashboards.cli.output import print_table, progress, warnings_as_notes, write_atomically
from ridgeplan.dashboards.cli.study.deliver import delivered

SCHEMA = 1
METHODS = (
    "retrieval-head", "retrieval-batch", "progressive", "quest", "clusterkv", "shadowkv", "streamingllm", "random",
)  # fmt: skip
FIGURES = ("hit", "distant", "mass", "overlap")


@click.command(
    cls=ListCommand,
    epilog=examples(
        "ridgeplan study retrieval --text book.txt --ctx 4k",
        "ridgeplan study retrieval --text book.txt --retrieval-head head.safetensors --budgets 512 2k",
        "ridgeplan study retrieval --text book.txt --methods quest clusterkv --html retrieval.html",
    ),
)
@options(
    model_to_run,
    click.option("--text", metavar="FILE", required=True, help="UTF-8 text."),
    retrieval_head,
    click.option("--ctx", type=TOKENS, multiple=True, default=(4096,), show_default=True,
                 help="Tokens of context, a list."),
    click.option("--budgets", type=TOKENS, multiple=True, default=(512, 1024, 2048), show_default=True,
                 help="Tokens that each method reads, a list."),
    click.option("--methods", multiple=True,
                 help=f"A list of {', '.join(METHODS)}.  [default: all; the first two with a head]"),
    click.option("--tokens", type=int, default=32, show_default=True, help="Steps after each context."),
    click.option("--passages", type=int, default=1, show_default=True, help="Passages, spread over the text."),
    yarn,
    click.option("--output", type=OutputFile(), help="Write the JSON to this file."),
    click.option("--html", type=OutputFile(), help="Write tables and plots to this file, which loads nothing."),
    as_json,
)  # fmt: skip
def retrieval(
    model: str | None, text: str, retrieval_head: str | None, ctx: tuple[int, ...], methods: tuple[str, ...],
    yarn: bool, output: Path | None, html: Path | None, as_json: bool, **sizes: Any,
) -> None:  # fmt: skip
    """How many of the tokens that the model attends to most each selection finds, at equal budgets.

    "hit" is the share of the model's own per-layer top tokens, "distant" of those that are neither first nor recent,
    "mass" the attention on what is read, "overlap" the share of a step's choice that was chosen one step before.
    """
    # Importing torch takes seconds.
    from ridgeplan.validate.acceptance import named_shape
    from ridgeplan.validate.prompts import read_prompt
    from ridgeplan.validate.studies.retrieval import Sizes, study

    chosen = methods or (METHODS if retrieval_head else METHODS[2:])
    asked, content = Sizes(contexts=ctx, methods=chosen, **sizes), read_prompt(text)
    with warnings_as_notes(), progress() as bars:
        source, bar = embedded_or(model), bars.add_task("loading")

        def show(what: str, done: int, total: int) -> None:
            bars.update(bar, description=what, completed=done, total=total)

        rows = list(study(source, content, asked, retrieval_head, yarn=yarn, on_progress=show))
        name = named_shape(source).name
    document = {
        "schema": SCHEMA,
        "model": name,
        "text": Path(text).stem,
        "sizes": asdict(asked),
        "rows": [asdict(row) for row in rows],
    }
    if not delivered(document, output, html, as_json, _write_page):
        _print(document)


def _write_page(document: Mapping[str, Any], path: Path) -> None:
    from ridgeplan.dashboards.retrieval_study_page import page

    write_atomically(path, page(document))


def _print(document: Mapping[str, Any]) -> None:
    for context in dict.fromkeys(row["context"] for row in document["rows"]):
        lines = (
            (row["method"], str(row["budget"]), *(f"{row[name]:.3f}" for name in FIGURES), "")
            for row in document["rows"] if row["context"] == context
        )  # fmt: skip
        title = f"Selections of {document['model']} on {document['text']}, {context} tokens"
        print_table(title, ("method", "budget", *FIGURES, ""), lines)
