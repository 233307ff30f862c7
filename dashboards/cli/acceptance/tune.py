"""`ridgeplan tune`: the sparse ratio and gamma of a plan, from acceptance measured on a text of the user's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli.acceptance.saved_rows import save_rows, saved_in
from ridgeplan.dashboards.cli.lazy_group import examples
from ridgeplan.dashboards.cli.model_inputs import calibration_tokens, embedded_or, require_planned_model
from ridgeplan.dashboards.cli.options import (
    OutputFile,
    SavedPlanFile,
    as_json,
    calibration_file,
    model_to_run,
    options,
    profile_file,
)
from ridgeplan.dashboards.cli.output import (
    number,
    print_json,
    print_table,
    progress,
    warnings_as_notes,
    write_atomically,
)
from ridgeplan.planner.interface.plan_file import SavedPlan
from ridgeplan.planner.plan import MAX_TOKENS
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.profile import load_profile
from ridgeplan.roofline.speculation import MAX_GAMMA

if TYPE_CHECKING:
    from ridgeplan.validate.tuning.steps import Step
    from ridgeplan.validate.tuning.tune import Tuning


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
    from ridgeplan.validate.tuning.tune import TuningText
    from ridgeplan.validate.tuning.tune import tune as tuned_by

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
