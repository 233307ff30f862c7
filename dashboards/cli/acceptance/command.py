"""The command itself: its options, its table, and the file that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeplan.dashboards.cli.acceptance.lists import ListCommand
from ridgeplan.dashboards.cli.acceptance.saved_rows import save_rows, saved_in
from ridgeplan.dashboards.cli.lazy_group import examples
from ridgeplan.dashboards.cli.model_inputs import calibration_tokens, embedded_or
from ridgeplan.dashboards.cli.options import TOKENS, OutputFile, as_json, calibration_file, options, yarn
from ridgeplan.dashboards.cli.output import print_json, print_table, progress, warnings_as_notes
from ridgeplan.planner.acceptance import AcceptanceRow

if TYPE_CHECKING:
    from ridgeplan.validate.acceptance import MeasuredAcceptance

DRAFTS = ("kv8", "kv4", "w4", "w4kv4", "streamingllm:0.07")


@click.command(
    cls=ListCommand,
    epilog=examples(
        "ridgeplan acceptance --text book.txt",
        "ridgeplan acceptance model.gguf --text book.txt --ctx 4k 32k",
        "ridgeplan acceptance --text code.py --drafts w4 w4kv4 streamingllm:0.1 --json",
    ),
)
@click.argument("model", required=False)
@options(
    click.option("--text", metavar="FILE", required=True, help="UTF-8 text like what will be decoded."),
    click.option("--text-name", help="What rows call the text.  [default: its file's name]"),
    click.option("--ctx", type=TOKENS, multiple=True, default=(4096,), show_default=True,
                 help="Tokens of context, a list."),
    click.option("--drafts", multiple=True, default=DRAFTS, show_default=True,
                 help="What differs in drafts, a list: bits of KV and of weights, or tokens read."),
    click.option("--tokens", type=int, default=256, show_default=True, help="Tokens after the context to measure on."),
    calibration_file,
    yarn,
    click.option("--output", type=OutputFile(), help="Merge rows into this file.  [default: where recommend looks]"),
    as_json,
)  # fmt: skip
def acceptance(
    model: str | None, text: str, text_name: str | None, ctx: tuple[int, ...], drafts: tuple[str, ...], tokens: int,
    calibration: str | None, yarn: bool, output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """How often drafts of MODEL are accepted on a text at temperature 1, saved for `recommend` and `estimate`.

    MODEL is a safetensors folder, a GGUF file or a hub id, by default the embedded SmolLM2-135M-Instruct. Rows of the
    same model, text, context and draft are replaced.
    """
    known = saved_in(output)
    # Importing torch takes seconds, so the files are checked first.
    from ridgeplan.validate.acceptance import Passage, measure_acceptance
    from ridgeplan.validate.prompts import read_prompt
    from ridgeplan.validate.teacher_forced import Draft

    wanted, content = [Draft.parse(draft) for draft in drafts], read_prompt(text)
    with warnings_as_notes(), progress() as bars:
        source, bar = embedded_or(model), bars.add_task("loading")
        fitted_to = calibration_tokens(source, calibration)
        passage = Passage(content, text_name or Path(text).stem, ctx, tokens, fitted_to, yarn)

        def show(what: str, done: int, total: int) -> None:
            bars.update(bar, description=what, completed=done, total=total)

        measured = list(measure_acceptance(source, passage, wanted, on_progress=show))
    save_rows(known, [one.row for one in measured])
    _report(measured, known.path, as_json)


def _report(measured: Sequence[MeasuredAcceptance], path: Path, as_json: bool) -> None:
    rows: list[AcceptanceRow] = [one.row for one in measured]
    if as_json:
        found = [{**asdict(one.row), "by_position": list(one.by_position)} for one in measured]
        print_json({"path": str(path), "rows": found})
        return
    positions = range(1, 1 + len(measured[0].by_position))
    print_table(
        f"Conditional acceptance of {rows[0].model} on {rows[0].text}: {rows[0].where}",
        ("draft", "context", "mean", *map(str, positions), "weights"),
        ((_draft_name(one.row), str(one.row.context), f"{one.row.acceptance:.3f}",
          *(f"{value:.3f}" for value in one.by_position), one.row.quantizer if "w4" in one.row.draft else "")
         for one in measured),
    )  # fmt: skip
    click.echo(f"saved to {path}")


def _draft_name(row: AcceptanceRow) -> str:
    return row.draft if row.ratio == 1 else f"{row.draft}:{row.ratio:g}"
