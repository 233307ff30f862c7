"""`ridgeplan acceptance` and `tune`: acceptance of drafts on a text, and the best sparse ratio and gamma."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.model_inputs import calibration_tokens, embedded_or, require_planned_model
from ridgeplan.dashboards.cli.output import echo, number, print_json, print_table, progress
from ridgeplan.dashboards.files import locked, require_lockable, write_atomically, write_json
from ridgeplan.planner.acceptance import AcceptanceRow, commands_of, load_rows, merged, rows_json
from ridgeplan.planner.acceptance.drafter_rows import DrafterRow, load_drafter_rows
from ridgeplan.planner.acceptance.speculation_profile import NAME as PROFILE
from ridgeplan.planner.plan_file import SavedPlan
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile, ProfileError, load_profile, user_acceptance_path
from ridgeplan.roofline.execution import MAX_GAMMA
from ridgeplan.roofline.plan.plan import MAX_BATCH, MAX_TOKENS, PlanError, TextKind

if TYPE_CHECKING:
    from ridgeplan.validate.acceptance import MeasuredAcceptance
    from ridgeplan.validate.tuning import Schedule, Step, Tuning


def require_extensible(path: Path | None) -> Path:
    """The file that rows are added to, by default the one that `recommend` reads.

    Raises FileProblem for a file that cannot be written, and PlanError for damaged rows.
    """
    path = path or user_acceptance_path()
    require_lockable(path)
    if path.exists():
        load_rows(path)
        load_drafter_rows(path)
    return path


def save_rows(path: Path, rows: Sequence[AcceptanceRow], drafters: Sequence[DrafterRow] = ()) -> None:
    """Adds rows, which replace rows of the same case, and the command line without its folders."""
    command = shlex.join(["ridgeplan", *(Path(word).name if os.sep in word else word for word in sys.argv[1:])])
    with locked(path):  # and read again: others may have added rows while these were measured
        known, commands = (load_rows(path), commands_of(path)) if path.exists() else ((), ())
        of_drafters = merged(load_drafter_rows(path), drafters)
        write_atomically(path, rows_json(merged(known, rows), (*commands, command), of_drafters))


# What `acceptance` and `study drafts` take to measure drafters.
drafter_options = opt.combine(
    opt.listed(
        "--drafter", str, "Drafters to measure in real rounds, a list: suffix, head, cascade, w4 (4-bit drafts)."
    ),
    opt.drafter_head,
    opt.listed("--windows", int, "Latest tokens that the head reads, a list; 0 for all.  [default: its own]"),
    click.option("--kind", type=click.Choice([*map(str, TextKind)]), help="Kind of the text, for the head's rows."),
    click.option("--depth", type=click.IntRange(1, MAX_GAMMA), default=4, help="Tokens that drafters propose."),
    click.option("--batch", type=click.IntRange(1, MAX_BATCH), default=1, help="Places of the text to continue."),
    click.option("--temperature", type=float, default=1.0, help="Temperature of the rounds of drafters; 0 is greedy."),
)  # fmt: skip


def report_drafters(
    model: str | None, text: str, text_name: str | None, ctx: tuple[int, ...], tokens: int, *, calibration: str | None,
    yarn: bool, output: Path | None, rows: Path | None, as_json: bool, drafter: tuple[str, ...],
    drafter_head: str | None, windows: tuple[int, ...], kind: str | None, depth: int, batch: int, temperature: float,
) -> None:  # fmt: skip
    """Measures drafters in real rounds, prints the figures, and adds those of a head to its speculation profile.

    output: for all figures. rows: that rows for the planner are added to, if any.
    """
    # Importing torch takes seconds.
    from ridgeplan.validate.acceptance import Passage, named_shape
    from ridgeplan.validate.drafter_acceptance import CASES, HEAD, head_profile, measure_drafters
    from ridgeplan.validate.machine import measured_here
    from ridgeplan.validate.prompts import read_prompt

    for case in drafter:
        if case not in CASES:
            raise click.UsageError(f"--drafter is {case!r}; allowed: {', '.join(CASES)}")
    content, name = read_prompt(text), text_name or Path(text).stem
    with progress("loading") as on_progress:
        source = embedded_or(model)
        passage = Passage(content, name, ctx, tokens, calibration_tokens(source, calibration), yarn)
        how: dict[str, Any] = {"depth": depth, "temperature": temperature, "passages": batch}
        document = {**measured_here(), "model": named_shape(source).name, "text": name, "kind": kind, "tokens": tokens}
        measured = []
        for each in measure_drafters(
            source, passage, drafter, kind or "", head=drafter_head or "", windows=windows, on_progress=on_progress,
            **how,
        ):  # fmt: skip
            measured.append(each)
            document |= {**how, "rows": [each.document for each in measured]}
            write_json(output, document)
    if drafter_head and HEAD in drafter:
        with locked(Path(drafter_head) / PROFILE):  # others may measure the head on other texts
            path, profile = head_profile(drafter_head, measured)
            write_json(path, profile)
    if rows is not None:
        save_rows(rows, (), [each.row for each in measured if each.row is not None])
        document["path"] = str(rows)
    if as_json:
        print_json(document)
        return
    print_table(
        f"Drafters on {name}, {depth} proposals at a time, temperature {temperature:g}",
        ("drafter", "context", "window", "tokens a round", "hits", "acceptance", *map(str, range(1, depth + 1))),
        ((each.case, str(each.context), str(each.window) if each.window else "",
          f"{each.statistics.tokens_per_round:.2f}", f"{each.statistics.hit_rate:.0%}",
          f"{each.statistics.acceptance:.3f}", *(f"{share:.3f}" for share in each.statistics.acceptance_at[:depth]))
         for each in measured),
    )  # fmt: skip
    if drafter_head and HEAD in drafter:
        echo(f"saved to {path}")
    if rows is not None:
        use = f"`plan --text {kind}` uses the rows" if kind else "no plan uses rows without a kind of text (--kind)"
        echo(f"saved to {rows}; {use}")


DRAFTS = ("kv8", "kv4", "w4", "w4kv4", "streamingllm:0.07")


@command(cls=opt.ListCommand)
@click.argument("model", required=False)
@opt.text_file
@opt.text_name
@opt.contexts
@opt.listed("--drafts", str, "Drafts to measure, a list: bits of KV (kv4) and weights (w4), or policy:ratio.", DRAFTS)
@opt.tokens_after
@drafter_options
@opt.calibration_file
@opt.yarn
@opt.rows_output("--output")
@opt.as_json
def acceptance(
    model: str | None, text: str, text_name: str | None, ctx: tuple[int, ...], drafts: tuple[str, ...], tokens: int,
    calibration: str | None, yarn: bool, output: Path | None, as_json: bool, **drafters: Any,
) -> None:  # fmt: skip
    """Measure how often drafts of MODEL are accepted on a text at temperature 1.

    The rows are saved, and `plan` and `estimate` use them. MODEL is a safetensors folder, a GGUF file or a hub id, by
    default the embedded SmolLM2-135M-Instruct. Rows of the same model, text, context and draft are replaced.

    With --drafter, drafters are measured in real rounds instead, and `plan --text KIND` uses the rows of those that
    feed the target. A head's are also added to speculation_profile.json in its folder, for `plan --drafter-head`.

    Examples:
      ridgeplan acceptance --text book.txt
      ridgeplan acceptance model.gguf --text book.txt --ctx 4k 32k
      ridgeplan acceptance --text code.py --drafts w4 w4kv4 streamingllm:0.1 --json
      ridgeplan acceptance --text code.py --kind code --drafter suffix head cascade w4 --drafter-head head/
    """
    path = require_extensible(output)
    if drafters["drafter"]:
        if drafts != DRAFTS:
            raise click.UsageError("--drafts and --drafter measure in different ways; allowed: one of them")
        report_drafters(
            model, text, text_name, ctx, tokens, calibration=calibration, yarn=yarn, output=None, rows=path,
            as_json=as_json, **drafters,
        )  # fmt: skip
        return
    # Importing torch takes seconds, so the files are checked first.
    from ridgeplan.validate.acceptance import Draft, Passage, measure_acceptance
    from ridgeplan.validate.prompts import read_prompt

    parsed, content = [Draft.parse(draft) for draft in drafts], read_prompt(text)
    with progress("loading") as on_progress:
        source = embedded_or(model)
        fitted_to = calibration_tokens(source, calibration)
        passage = Passage(content, text_name or Path(text).stem, ctx, tokens, fitted_to, yarn)
        measured = list(measure_acceptance(source, passage, parsed, on_progress=on_progress))
    save_rows(path, [result.row for result in measured])
    _report(measured, path, as_json)


def _report(measured: Sequence[MeasuredAcceptance], path: Path, as_json: bool) -> None:
    first: AcceptanceRow = measured[0].row
    if as_json:
        rows = [{**asdict(result.row), "by_position": list(result.by_position)} for result in measured]
        print_json({"path": str(path), "rows": rows})
        return
    positions = range(1, 1 + len(measured[0].by_position))
    print_table(
        f"Conditional acceptance of {first.model} on {first.text}: {first.where}",
        ("draft", "context", "mean", *map(str, positions), "weights"),
        ((_draft_name(result.row), str(result.row.context), f"{result.row.acceptance:.3f}",
          *(f"{value:.3f}" for value in result.by_position), result.row.quantizer if "w4" in result.row.draft else "")
         for result in measured),
    )  # fmt: skip
    echo(f"saved to {path}")


def _draft_name(row: AcceptanceRow) -> str:
    return row.draft if row.ratio == 1 else f"{row.draft}:{row.ratio:g}"


@command()
@click.argument("saved", metavar="PLAN", type=opt.SavedPlanFile())
@opt.model_to_run
@opt.text_file
@opt.text_name
@click.option("--tokens", type=click.IntRange(1, MAX_TOKENS), default=256, help="Tokens to generate after each prompt.")
@click.option("--gamma", type=click.IntRange(1, MAX_GAMMA), default=9, help="Largest gamma to consider.")
@click.option("--quick", is_flag=True, help="Measure acceptance once per ratio, and predict the times of all gammas.")
@opt.calibration_file
@opt.profile_file
@opt.rows_output("--rows")
@click.option("--output", type=opt.OutputFile(), help="Write the tuned plan to this file.")
@opt.as_json
def tune(
    saved: SavedPlan, model: str | None, text: str, text_name: str | None, tokens: int, gamma: int, quick: bool,
    calibration: str | None, profile: str | None, rows: Path | None, output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Tune the sparse ratio and gamma of the drafts of the plan in file PLAN on a text.

    The first step takes the smallest ratio that reaches 97% of the most tokens per round, at the largest gamma. Then
    gamma, and the ratio once more, are chosen by the least time per token. Each ratio and gamma that a step compares is
    a generation at temperature 1 that continues the text. With --quick, acceptance is measured at the largest gamma
    only, and times are predicted at this machine's calibrated rates. A plan whose drafts read all tokens has no ratio
    to tune. The acceptance by position is saved for each ratio and gamma, and `plan` and `estimate` use it.

    Examples:
      ridgeplan tune plan.json --text book.txt --output tuned.json
      ridgeplan tune plan.json --text book.txt --model model.gguf --gamma 6
      ridgeplan tune plan.json --text book.txt --tokens 512 --json
      ridgeplan tune plan.json --text book.txt --quick
    """
    require_planned_model(saved, model)
    rows_path = require_extensible(rows)
    rates = _rates(profile, required=quick)
    # Importing torch takes seconds, so the files are checked first.
    from ridgeplan.validate.acceptance import Passage, named_shape
    from ridgeplan.validate.prompts import read_prompt
    from ridgeplan.validate.tuning import Schedule
    from ridgeplan.validate.tuning import tune as measure_tuning

    content, schedule = read_prompt(text), Schedule(saved.plan, tokens, gamma, quick)
    source = embedded_or(model)
    _announce(schedule, named_shape(source), rates)
    with progress("loading") as on_progress:
        passage = Passage(content, text_name or Path(text).stem, (), tokens, calibration_tokens(source, calibration))
        tuning = measure_tuning(saved.plan, source, passage, rates, gamma, on_progress=on_progress, quick=quick)
    if tuning.rows:
        save_rows(rows_path, tuning.rows)
    if output:
        write_atomically(output, replace(saved, plan=tuning.plan).to_json())
    if as_json:
        print_json({
            "plan": tuning.plan.to_dict(), "steps": [step.to_dict() for step in tuning.steps],
            **{name: getattr(tuning, name) for name in ("plain_ms", "speedup", "measured", "generations", "spread")},
            "rows": len(tuning.rows), "path": str(rows_path),
        })  # fmt: skip
    else:
        _print(tuning, rows_path)


def _rates(profile: str | None, required: bool) -> Profile | None:
    """A profile's rates, by default this machine's; None if these are not known and not required."""
    if profile is not None or required:
        return load_profile(profile) if profile is not None else this_machine()
    with contextlib.suppress(ProfileError):
        return this_machine()
    return None


def _announce(schedule: Schedule, shape: ModelShape, rates: Profile | None) -> None:
    """Says on stderr how many generations follow, and about how long they take."""
    workload, count = schedule.plan.workload, schedule.max_generations
    about = ""
    if rates is not None:
        # Without a cost model times can still be measured.
        with contextlib.suppress(PlanError):
            minutes = schedule.predicted_s(shape, rates) / 60
            about = f", about {number(minutes)} minutes by the rates of {rates.hardware.name}"
    generations = "1 generation" if count == 1 else f"up to {count} generations"
    sequences = f" in {workload.batch} sequences" if workload.batch > 1 else ""
    echo(f"{generations} of {schedule.tokens} tokens after {workload.context}{sequences}{about}", err=True)


def _gain(tuning: Tuning) -> str:
    """The gain over plain decoding, or why it is not known."""
    if tuning.speedup is not None:
        slower = "; plain decoding is faster" if tuning.speedup < 1 else ""
        return f"{tuning.speedup:.2f}x plain decoding with the same target{slower}"
    spread = "" if tuning.spread is None else f" (times of rounds spread by {tuning.spread:.0%})"
    return f"but other work slowed some generations{spread}, so this choice and its gain are noise; try again once idle"


def _print(tuning: Tuning, path: Path) -> None:
    columns = ("ratio", "gamma", "tokens/round", "accepted, first to last", "round ms", "TPOT ms", "")
    for step in tuning.steps:
        print_table(f"Step: {step.name}", columns, _cells(step))
    best, how = tuning.chosen, "measured" if tuning.measured else "predicted"
    echo(f"ratio {best.ratio:g}, gamma {best.gamma}: {number(best.tpot_ms)} ms per token ({how}), {_gain(tuning)}")
    few = "no acceptance saved, because too few drafts reached any position; increase --tokens"
    echo(f"saved {len(tuning.rows)} acceptance rows to {path}" if tuning.rows else few)


def _cells(step: Step) -> list[tuple[str, ...]]:
    return [
        (f"{candidate.ratio:g}", f"{candidate.gamma}", f"{candidate.tokens_per_round:.2f}",
         f"{candidate.acceptance_at[0]:.2f} to {candidate.acceptance_at[-1]:.2f}", number(candidate.round_ms),
         number(candidate.tpot_ms), "chosen" if index == step.index else "")
        for index, candidate in enumerate(step.candidates)
    ]  # fmt: skip
