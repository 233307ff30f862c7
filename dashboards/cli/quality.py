"""`ridgeplan quality`: the quality of plans beside plain decoding, on a text and on RULER's tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.model_inputs import embedded_or, sample_or_file
from ridgeplan.dashboards.cli.output import echo, number, print_json, print_table, progress
from ridgeplan.dashboards.files import locked, require_lockable, write_atomically
from ridgeplan.planner.quality import (
    FIDELITY,
    KV_BYTES,
    PERPLEXITY,
    SOLVED,
    TPOT,
    TTFT,
    QualityRow,
    load_rows,
    rows_json,
    ruler_average,
)
from ridgeplan.roofline.catalog.files import existing_path
from ridgeplan.roofline.catalog.profile import user_quality_path
from ridgeplan.roofline.plan.plan import MAX_TOKENS
from ridgeplan.roofline.plan.presets import PRESETS

if TYPE_CHECKING:
    from ridgeplan.validate.quality.options import PlanMaker, QualityOptions
    from ridgeplan.validate.quality.ruler_samples import Material, Task

AT_ONCE = "0, the default, evicts once after the prompt, as do all policies that need the whole prompt."
COLUMNS = ("plan", "context", "fidelity", "perplexity", "RULER", "TTFT ms", "TPOT ms", "KV MB", "tasks")


@command(cls=opt.ListCommand)
@click.argument("plans", nargs=-1, required=True, metavar="PLAN...")
@opt.model_to_run
@opt.sample_or_text("UTF-8 text for the passages and RULER's haystack.")
@opt.contexts
@opt.listed(
    "--budgets", click.IntRange(1, MAX_TOKENS), "Tokens that presets keep or read, a list.  [default: each preset's]"
)
@opt.listed("--chunks", click.IntRange(0, MAX_TOKENS), f"Prompt tokens after which presets evict, a list. {AT_ONCE}")
@opt.listed(
    "--tasks", str, "RULER tasks, a list: all, none, or names such as niah_single_1, vt, cwe, fwe, qa_1.", ("all",)
)
@click.option("--samples", type=int, default=5, help="Prompts per task.")
@click.option("--batch", type=int, help="Prompts or passages that run together.  [default: 8 on a GPU, else 1]")
@click.option("--only-solved", is_flag=True, help=f"Skip tasks that plain decoding solves below {SOLVED:.0%}.")
@click.option("--passages", type=int, default=4, help="Passages of the text.")
@click.option("--tokens", type=int, default=128, help="Tokens to measure per passage.")
@click.option(
    "--long-output", type=opt.TOKENS, default=0,
    help="Tokens of the model's own output over which greedy agreement and recall are measured; 0 for none.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, help="Seed of the tasks.")
@opt.retrieval_head
@opt.yarn
@opt.rows_output("--output")
@opt.as_json
def quality(
    plans: tuple[str, ...], model: str | None, text: str | None, ctx: tuple[int, ...], budgets: tuple[int, ...],
    chunks: tuple[int, ...], tasks: tuple[str, ...], batch: int | None, output: Path | None, as_json: bool,
    **sizes: Any,
) -> None:  # fmt: skip
    """Measure fidelity, perplexity, RULER scores, times and KV memory of each PLAN beside plain decoding.

    PLAN is a preset, `random`, `oracle` or a plan file. Results that the output file already has are not measured
    again, so an interrupted run continues where it stopped. `plan` and `estimate` show the results.

    Examples:
      ridgeplan quality quantspec int8 --model model.gguf --ctx 4k
      ridgeplan quality plan.json --tasks none --passages 8
      ridgeplan quality dapq snapkv --budgets 512 1024 --tasks niah_single_1 vt
      ridgeplan quality dapq snapkv --budgets 512 --chunks 0 1024 --tasks none
      ridgeplan quality specontext-resident shadowkv --ctx 10k --long-output 8k --tasks none
    """
    path = output or user_quality_path()
    require_lockable(path)
    rows = _saved_in(path)
    makers = list(_makers(plans, budgets, chunks))
    # Importing torch takes seconds, so the files are checked first.
    from ridgeplan.validate.acceptance import named_shape
    from ridgeplan.validate.quality.measure import default_batch, measure_quality
    from ridgeplan.validate.quality.options import QualityOptions

    sizes["batch"] = default_batch() if batch is None else batch
    source = embedded_or(model)
    name, content = sample_or_file(text)
    material, chosen = _material(content, tasks)
    options = QualityOptions(source, named_shape(source), tuple(makers), ctx, content, name, tasks=chosen, **sizes)
    options.require_head()  # before anything is measured
    for line in options.refused():
        echo(f"skipped: {line}", err=True)
    with progress("loading") as on_progress:
        for measured in measure_quality(options, material, list(rows.values()), on_progress):
            rows |= save_rows(path, measured)
    _report(options, list(rows.values()), path, as_json)


def _saved_in(path: Path) -> dict[tuple[Any, ...], QualityRow]:
    """The rows of a file, if it exists."""
    return {row.cell: row for row in (load_rows(path) if path.exists() else ())}


def save_rows(path: Path, rows: Sequence[QualityRow]) -> dict[tuple[Any, ...], QualityRow]:
    """Adds `rows`, which replace rows of the same figure; returns all rows that the file then has."""
    with locked(path):  # and read again: others may have added rows while these were measured
        saved = _saved_in(path) | {row.cell: row for row in rows}
        write_atomically(path, rows_json(saved.values()))
    return saved


def _makers(plans: Sequence[str], budgets: Sequence[int], chunks: Sequence[int]) -> Iterator[PlanMaker]:
    from ridgeplan.validate.quality.options import of_file, with_budgets

    for plan in plans:
        if plan in PRESETS or not existing_path(plan):
            yield from with_budgets([plan], budgets, chunks)
        else:
            yield of_file(opt.PlanFile().convert(plan, None, None))


def _material(text: str, names: Sequence[str]) -> tuple[Material, tuple[Task, ...]]:
    """The material of the tasks, and the tasks. Tasks without data are skipped with one line."""
    from ridgeplan.validate.quality.ruler import TASKS, chosen_tasks, material
    from ridgeplan.validate.quality.ruler_questions import NoQuestions, question_sets

    expanded = [task for name in names for task in {"all": [*TASKS], "none": []}.get(name, [name])]
    chosen, questions = chosen_tasks(expanded), None
    if any(task.data for task in chosen):
        try:
            questions = question_sets()
        except NoQuestions as error:
            echo(f"skipped: {', '.join(task.name for task in chosen if task.data)}: {error}", err=True)
            chosen = tuple(task for task in chosen if not task.data)
    return material(text, questions), chosen


def _report(options: QualityOptions, rows: Sequence[QualityRow], path: Path, as_json: bool) -> None:
    from ridgeplan.validate.quality.measure import is_requested

    requested = [row for row in rows if is_requested(options, row)]
    if as_json:
        print_json({"path": str(path), "rows": [asdict(row) for row in requested]})
        return
    first = requested[0]
    passages = f"{options.passages} passage{'s' * (options.passages > 1)}"
    sizes = f"{passages}, {options.samples} prompts per task" if options.tasks else passages
    print_table(f"Quality of {first.model} on {first.text}: {sizes}, {first.where}", COLUMNS, table_rows(requested))
    echo(
        f"RULER: mean over the tasks that plain decoding solves at {100 * SOLVED:.0f}% or more; plain decoding's mean "
        "in brackets"
    )
    echo(f"saved to {path}")


def table_rows(rows: Sequence[QualityRow]) -> Iterator[tuple[str, ...]]:
    """A line for each plan and context."""
    for plan, context in dict.fromkeys((row.plan, row.context) for row in rows):
        cells = [row for row in rows if (row.plan, row.context) == (plan, context)]
        values = {row.measure: row.value for row in cells}
        times = (number(values[measure]) if measure in values else "" for measure in (TTFT, TPOT))
        memory = f"{values[KV_BYTES] / 1e6:.1f}" if KV_BYTES in values else ""
        text_figures = _figure(values, FIDELITY, 4), _figure(values, PERPLEXITY, 2)
        yield plan, str(context), *text_figures, _average(cells), *times, memory, _tasks(cells)


def _figure(values: dict[str, float], name: str, digits: int) -> str:
    return f"{values[name]:.{digits}f}" if name in values else ""


def _average(rows: Sequence[QualityRow]) -> str:
    average = ruler_average(rows)
    return f"{100 * average[0]:.1f} ({100 * average[1]:.1f})" if average else ""


def _tasks(rows: Sequence[QualityRow]) -> str:
    """Scores in percent by task."""
    costs = (FIDELITY, PERPLEXITY, TTFT, TPOT, KV_BYTES)
    return " ".join(f"{row.measure} {100 * row.value:.0f}" for row in rows if row.measure not in costs)
