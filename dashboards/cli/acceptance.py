"""`ridgeplan acceptance` and `tune`: how often drafts are accepted on a text, and the best ratio and gamma."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli.groups import examples
from ridgeplan.dashboards.cli.model_inputs import calibration_tokens, embedded_or, require_planned_model
from ridgeplan.dashboards.cli.options import (
    TOKENS,
    ListCommand,
    OutputFile,
    SavedPlanFile,
    as_json,
    calibration_file,
    model_to_run,
    options,
    profile_file,
    yarn,
)
from ridgeplan.dashboards.cli.output import (
    number,
    print_json,
    print_table,
    progress,
    require_writable,
    warnings_as_notes,
    write_atomically,
)
from ridgeplan.planner.acceptance import AcceptanceRow, commands_of, load_rows, merged, rows_json
from ridgeplan.planner.plan_file import SavedPlan
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.profile import load_profile, user_acceptance_path
from ridgeplan.roofline.plan.plan import MAX_TOKENS
from ridgeplan.roofline.speculation import MAX_GAMMA

if TYPE_CHECKING:
    from ridgeplan.validate.acceptance import MeasuredAcceptance
    from ridgeplan.validate.tuning import Step, Tuning


@dataclass(frozen=True)
class SavedRows:
    """A file's rows, and the commands that made them."""

    path: Path
    rows: tuple[AcceptanceRow, ...] = ()
    commands: tuple[str, ...] = ()


def saved_in(path: Path | None) -> SavedRows:
    """What a file holds, by default the one where `recommend` looks; nothing if there is none yet.

    Raises FileProblem for one that cannot be written, and PlanError for damaged rows.
    """
    path = path or user_acceptance_path()
    require_writable(path)
    return SavedRows(path, load_rows(path), commands_of(path)) if path.exists() else SavedRows(path)


def save_rows(known: SavedRows, rows: Sequence[AcceptanceRow]) -> None:
    """Writes the file with `rows`, which replace those that they repeat, and the command that runs."""
    write_atomically(known.path, rows_json(merged(known.rows, rows), (*known.commands, _command())))


def _command() -> str:
    """What was typed, for the file's reader: files without their folders."""
    return shlex.join(["ridgeplan", *(Path(one).name if os.sep in one else one for one in sys.argv[1:])])


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
    from ridgeplan.validate.acceptance import Draft, Passage, measure_acceptance
    from ridgeplan.validate.prompts import read_prompt

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


@click.command(
    epilog=examples(
        "ridgeplan tune plan.json --text book.txt --output tuned.json",
        "ridgeplan tune plan.json --text book.txt --model model.gguf --gamma 6",
        "ridgeplan tune plan.json --text book.txt --tokens 512 --json",
    )
)
@click.argument("saved", metavar="PLAN", type=SavedPlanFile())
@options(
    model_to_run,
    click.option("--text", metavar="FILE", required=True, help="UTF-8 text like what will be decoded."),
    click.option("--text-name", help="What rows call the text.  [default: its file's name]"),
    click.option("--tokens", type=click.IntRange(1, MAX_TOKENS), default=256, show_default=True,
                 help="Tokens to generate after each prompt, for every ratio."),
    click.option("--gamma", type=click.IntRange(1, MAX_GAMMA), default=8, show_default=True,
                 help="The largest gamma that is considered."),
    calibration_file,
    profile_file,
    click.option("--rows", type=OutputFile(),
                 help="Merge acceptance into this file.  [default: where recommend looks]"),
    click.option("--output", type=OutputFile(), help="Write the tuned plan to this file."),
    as_json,
)  # fmt: skip
def tune(
    saved: SavedPlan, model: str | None, text: str, text_name: str | None, tokens: int, gamma: int,
    calibration: str | None, profile: str | None, rows: Path | None, output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Tune the drafts of the plan in file PLAN for a text: sparse ratio, gamma, and the ratio again.

    Each ratio is measured by a generation at temperature 1 that continues the text, and priced at this machine's
    calibrated rates. A plan that reads all tokens has no ratio to tune. The acceptance by position is saved for
    `recommend` and `estimate`.
    """
    require_planned_model(saved, model)
    known = saved_in(rows)
    rates = this_machine() if profile is None else load_profile(profile)
    # Importing torch takes seconds, so the files are checked first.
    from ridgeplan.validate.prompts import read_prompt
    from ridgeplan.validate.tuning import TuningText
    from ridgeplan.validate.tuning import tune as tuned_by

    content = read_prompt(text)
    with warnings_as_notes(), progress() as bars:
        source, bar = embedded_or(model), bars.add_task("loading")
        passage = TuningText(content, text_name or Path(text).stem, tokens, calibration_tokens(source, calibration))

        def show(what: str, done: int, total: int) -> None:
            bars.update(bar, description=what, completed=done, total=total)

        found = tuned_by(saved.plan, source, passage, rates, gamma, on_progress=show)
    if found.rows:
        save_rows(known, found.rows)
    if output:
        write_atomically(output, replace(saved, plan=found.plan).to_json())
    if as_json:
        print_json(_to_dict(found, known.path))
    else:
        _print(found, known.path)


def _to_dict(found: Tuning, path: Path) -> dict[str, Any]:
    return {
        "plan": found.plan.to_dict(),
        "steps": [step.to_dict() for step in found.steps],
        "plain_ms": found.plain_ms,
        "speedup": found.speedup,
        "rows": len(found.rows),
        "path": str(path),
    }


def _print(found: Tuning, path: Path) -> None:
    for step in found.steps:
        print_table(f"Step: {step.name}", ("ratio", "gamma", "tokens/round", "round ms", "TPOT ms", ""), _cells(step))
    best = found.chosen
    slower = "; plain decoding is faster" if found.speedup < 1 else ""
    click.echo(
        f"ratio {best.ratio:g}, gamma {best.gamma}: {number(best.tpot_ms)} ms per token, "
        f"{found.speedup:.2f}x plain decoding with the same target{slower}"
    )
    few = "no position was reached by enough drafts for a row of acceptance; more --tokens do"
    click.echo(f"saved {len(found.rows)} rows of acceptance to {path}" if found.rows else few)


def _cells(step: Step) -> list[tuple[str, ...]]:
    return [
        (f"{one.ratio:g}", f"{one.gamma}", f"{one.tokens_per_round:.2f}", number(one.round_ms), number(one.tpot_ms),
         "chosen" if index == step.index else "")
        for index, one in enumerate(step.candidates)
    ]  # fmt: skip
