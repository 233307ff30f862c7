"""`ridgeplan study`: measurements behind the papers' claims, on the user's model and text."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ridgeplan.dashboards.cli.acceptance import save_rows, saved_in
from ridgeplan.dashboards.cli.groups import examples
from ridgeplan.dashboards.cli.model_inputs import calibration_tokens, embedded_or
from ridgeplan.dashboards.cli.options import (
    TOKENS,
    ListCommand,
    OutputFile,
    as_json,
    calibration_file,
    model_to_run,
    options,
    retrieval_head,
    yarn,
)
from ridgeplan.dashboards.cli.output import print_json, print_table, progress, warnings_as_notes, write_atomically


def delivered(
    document: Mapping[str, Any],
    output: Path | None,
    html: Path | None,
    as_json: bool,
    write_page: Callable[[Mapping[str, Any], Path], None],
) -> bool:
    """Writes the files, with where results come from. True if they were printed as JSON too, so no table is wanted."""
    from ridgeplan.validate.machine import measured_here  # imports torch, which takes seconds

    document = {**measured_here(), **document}
    if output is not None:
        write_atomically(output, json.dumps(document, indent=1, allow_nan=False) + "\n")
    if html is not None:
        write_page(document, html)
    if as_json:
        print_json(document)
    return as_json


POLICIES = (
    "streamingllm", "snapkv", "specextend", "specattn", "specattn-heads", "specattn-logits", "specattn-all",
    "hindsight", "quest", "progressive", "oracle",
)  # fmt: skip
FORMATS = ("bf16", "kv4", "w4kv4")


@click.command(
    cls=ListCommand,
    epilog=examples(
        "ridgeplan study drafts --text book.txt --ctx 4k",
        "ridgeplan study drafts --text book.txt --policies quest progressive --ratios 0.03 0.1",
        "ridgeplan study drafts --text book.txt --html drafts.html",
        "ridgeplan study drafts --text book.txt --ctx 4k 8k --output drafts.json --resume",
    ),
)
@options(
    model_to_run,
    click.option("--text", metavar="FILE", required=True, help="UTF-8 text."),
    click.option("--ctx", type=TOKENS, multiple=True, default=(4096,), show_default=True,
                 help="Tokens of context, a list."),
    click.option("--ratios", type=float, multiple=True, default=(0.03, 0.07, 0.15, 0.25), show_default=True,
                 help="Shares of the tokens that drafts read, a list."),
    click.option("--policies", multiple=True, default=POLICIES, show_default=True, help="What selects them, a list."),
    click.option("--formats", multiple=True, default=FORMATS, show_default=True,
                 help="Bits of the drafts' KV and weights, a list."),
    click.option("--tokens", type=int, default=256, show_default=True, help="Tokens after the context to measure on."),
    calibration_file,
    yarn,
    click.option("--output", type=OutputFile(), help="Write the JSON to this file, after every context."),
    click.option("--resume", is_flag=True, help="Keep the rows of the output's file, and measure what it lacks."),
    click.option("--rows", type=OutputFile(),
                 help="Merge the acceptance of drafts that plans can have into this file, as `acceptance` writes it."),
    click.option("--html", type=OutputFile(), help="Write tables and plots to this file, which loads nothing."),
    as_json,
)  # fmt: skip
def drafts(
    model: str | None, text: str, ctx: tuple[int, ...], ratios: tuple[float, ...], policies: tuple[str, ...],
    formats: tuple[str, ...], tokens: int, calibration: str | None, yarn: bool, output: Path | None, resume: bool,
    rows: Path | None, html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Acceptance of drafts that read a share of the tokens, teacher-forced on a text at temperature 1.

    The policies' own code selects, in rounds of seven drafts. "hindsight" is a bound: a set for each round and KV head
    by the round's own verification. "specattn" has variants: a set for each KV head, logits, and all rows (Eq 2).
    """
    # Importing torch takes seconds.
    from ridgeplan.validate.acceptance import Passage, checkpoint_of, named_shape
    from ridgeplan.validate.machine import device_here
    from ridgeplan.validate.prompts import read_prompt
    from ridgeplan.validate.studies.drafts import SavedStudy, acceptance_rows, drafts_of, study

    if resume and output is None:
        raise click.UsageError("--resume was given without --output; allowed: with the file to resume")
    asked, content, merged = drafts_of(policies, ratios, formats), read_prompt(text), saved_in(rows) if rows else None
    with warnings_as_notes(), progress() as bars:
        source, bar = embedded_or(model), bars.add_task("loading")
        passage = Passage(content, Path(text).stem, ctx, tokens, calibration_tokens(source, calibration), yarn)
        fitted_to = Path(calibration).stem if calibration else ""
        saved = SavedStudy(named_shape(source).name, tokens, fitted_to, device=device_here(), text=passage.name)
        if resume and output is not None and output.exists():
            saved = saved.resumed(output)

        def show(what: str, done: int, total: int) -> None:
            bars.update(bar, description=what, completed=done, total=total)

        for found in study(source, passage, asked, on_progress=show, known=saved.known):
            saved = saved.with_row(found)
            if output is not None:
                delivered(saved.document, output, None, False, _write_drafts_page)
    if merged is not None:
        save_rows(merged, acceptance_rows(saved, named_shape(source), checkpoint_of(source)))
    if not delivered(saved.document, output, html, as_json, _write_drafts_page):
        _print_drafts(saved.document)


def _write_drafts_page(document: Mapping[str, Any], path: Path) -> None:
    from ridgeplan.dashboards.html_pages import draft_study_page

    write_atomically(path, draft_study_page(document))


def _print_drafts(document: Mapping[str, Any]) -> None:
    for context in dict.fromkeys(row["context"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["context"] == context]
        title = f"Acceptance of {document['model']} on {document['text']}, {context} tokens, mean of 7 positions"
        print_table(title, *summary(rows))


def summary(rows: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], Iterator[Sequence[str]]]:
    """Columns and lines of a table: a line for each policy and ratio, a column for each format."""
    formats = [one for one in FORMATS if any(row["format"] == one for row in rows)]
    means = {(row["policy"], row["ratio"], row["format"]): f"{row['mean']:.3f}" for row in rows}
    cases = dict.fromkeys((row["policy"], row["ratio"]) for row in rows)
    lines = ((policy, f"{ratio:g}", *(means.get((policy, ratio, one), "") for one in formats), "")
             for policy, ratio in cases)  # fmt: skip
    return ("policy", "ratio", *formats, ""), lines


RETRIEVAL_SCHEMA = 1
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
    from ridgeplan.validate.studies.retrieval import RetrievalSizes, study

    chosen = methods or (METHODS if retrieval_head else METHODS[2:])
    asked, content = RetrievalSizes(contexts=ctx, methods=chosen, **sizes), read_prompt(text)
    with warnings_as_notes(), progress() as bars:
        source, bar = embedded_or(model), bars.add_task("loading")

        def show(what: str, done: int, total: int) -> None:
            bars.update(bar, description=what, completed=done, total=total)

        rows = list(study(source, content, asked, retrieval_head, yarn=yarn, on_progress=show))
        name = named_shape(source).name
    document = {
        "schema": RETRIEVAL_SCHEMA,
        "model": name,
        "text": Path(text).stem,
        "sizes": asdict(asked),
        "rows": [asdict(row) for row in rows],
    }
    if not delivered(document, output, html, as_json, _write_retrieval_page):
        _print_retrieval(document)


def _write_retrieval_page(document: Mapping[str, Any], path: Path) -> None:
    from ridgeplan.dashboards.html_pages import retrieval_study_page

    write_atomically(path, retrieval_study_page(document))


def _print_retrieval(document: Mapping[str, Any]) -> None:
    for context in dict.fromkeys(row["context"] for row in document["rows"]):
        lines = (
            (row["method"], str(row["budget"]), *(f"{row[name]:.3f}" for name in FIGURES), "")
            for row in document["rows"] if row["context"] == context
        )  # fmt: skip
        title = f"Selections of {document['model']} on {document['text']}, {context} tokens"
        print_table(title, ("method", "budget", *FIGURES, ""), lines)


DAPQ_SCHEMA = 1


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

    asked, content = measured.DapqSizes(**sizes), sample_text() if text is None else read_prompt(text)
    with warnings_as_notes(), progress() as bars:
        source, bar = embedded_or(model), bars.add_task("loading")
        shape = named_shape(source)
        found = measured.study(
            source, shape, content, asked,
            on_progress=lambda what, done, total: bars.update(bar, description=what, completed=done, total=total),
        )  # fmt: skip
    document = {
        "schema": DAPQ_SCHEMA,
        "model": shape.name,
        "text": "Python's help topics" if text is None else Path(text).stem,
        "sizes": asdict(asked),
        "figures": measured.summary(found),
        "claims": [asdict(claim) for claim in measured.claims(found)],
    }
    if not delivered(document, output, html, as_json, _write_plots):
        _print_dapq(document)


def _write_plots(document: Mapping[str, Any], path: Path) -> None:
    """One HTML file with all plots; a note where plotly is not installed."""
    if importlib.util.find_spec("plotly") is None:
        click.echo("note: plotly is not installed, so no HTML is written", err=True)
        return
    from ridgeplan.dashboards.charts import results
    from ridgeplan.dashboards.html_pages import figure_html, html_page

    rows = document["figures"]
    charts = (results.similarities, results.offsets, results.recalls, results.attentions)
    write_atomically(path, html_page("DapQ", (figure_html(draw(rows)) for draw in charts)))


def _print_dapq(document: Mapping[str, Any]) -> None:
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
