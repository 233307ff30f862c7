"""`ridgeplan study drafts`: how often sparse drafts are accepted, by policy, ratio and position in a round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ridgeplan.dashboards.cli.acceptance.lists import ListCommand
from ridgeplan.dashboards.cli.acceptance.saved_rows import save_rows, saved_in
from ridgeplan.dashboards.cli.lazy_group import examples
from ridgeplan.dashboards.cli.model_inputs import calibration_tokens, embedded_or
from ridgeplan.dashboards.cli.options import TOKENS, OutputFile, as_json, calibration_file, model_to_run, options, yarn
from ridgeplan.dashboards.cli.output import print_table, progress, warnings_as_notes, write_atomically
from ridgeplan.dashboards.cli.study.deliver import delivered

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
    from ridgeplan.validate.studies.drafts import drafts_of, study
    from ridgeplan.validate.studies.saved_drafts import SavedStudy, acceptance_rows

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
                delivered(saved.document, output, None, False, _write_page)
    if merged is not None:
        save_rows(merged, acceptance_rows(saved, named_shape(source), checkpoint_of(source)))
    if not delivered(saved.document, output, html, as_json, _write_page):
        _print(saved.document)


def _write_page(document: Mapping[str, Any], path: Path) -> None:
    from ridgeplan.dashboards.draft_study_page import page

    write_atomically(path, page(document))


def _print(document: Mapping[str, Any]) -> None:
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
