"""`ridgeplan quality`: what plans give up, measured on a text and on RULER's tasks, beside plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli.groups import examples
from ridgeplan.dashboards.cli.model_inputs import embedded_or
from ridgeplan.dashboards.cli.options import (
    TOKENS,
    ListCommand,
    OutputFile,
    PlanFile,
    as_json,
    model_to_run,
    options,
    retrieval_head,
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
from ridgeplan.roofline.catalog.profile import user_quality_path
from ridgeplan.roofline.plan.plan import MAX_TOKENS
from ridgeplan.roofline.plan.presets import PRESETS

if TYPE_CHECKING:
    from ridgeplan.validate.quality.options import PlanMaker, QualityOptions
    from ridgeplan.validate.quality.ruler_samples import Material, Task

COLUMNS = ("plan", "context", "fidelity", "perplexity", "RULER", "TTFT ms", "TPOT ms", "KV MB", "tasks")


@click.command(
    cls=ListCommand,
    epilog=examples(
        "ridgeplan quality quantspec int8 --model model.gguf --ctx 4k",
        "ridgeplan quality plan.json --tasks none --passages 8",
        "ridgeplan quality dapq snapkv --budgets 512 1024 --tasks niah_single_1 vt",
        "ridgeplan quality dapq snapkv --budgets 512 --chunks 0 1024 --tasks none",
    ),
)
@click.argument("plans", nargs=-1, required=True, metavar="PLAN...")
@options(
    model_to_run,
    click.option("--text", metavar="FILE",
                 help="UTF-8 text to measure on, also the haystack.  [default: a text that comes with Python]"),
    click.option("--ctx", type=TOKENS, multiple=True, default=(4096,), show_default=True,
                 help="Tokens of a sequence with its answer, a list."),
    click.option("--budgets", type=click.IntRange(1, MAX_TOKENS), multiple=True,
                 help="Tokens that presets with a budget keep or read, a list.  [default: each preset's own]"),
    click.option("--chunks", type=click.IntRange(0, MAX_TOKENS), multiple=True,
                 help="Tokens of a prompt after which presets evict, a list; 0: after all, the default. Policies that "
                      "need whole prompts evict after all of it in any case."),
    click.option("--tasks", multiple=True, default=("all",), show_default=True,
                 help="RULER's tasks, a list: all, none, or names such as niah_single_1, vt, cwe, fwe, qa_1."),
    click.option("--samples", type=int, default=5, show_default=True, help="Prompts of each task."),
    click.option("--batch", type=int,
                 help="Prompts or passages that run together.  [default: 8 on a GPU, else 1]"),
    click.option("--only-solved", is_flag=True, help=f"Leave out tasks that plain decoding solves below {SOLVED:.0%}."),
    click.option("--passages", type=int, default=4, show_default=True, help="Passages of the text."),
    click.option("--tokens", type=int, default=128, show_default=True, help="Tokens of a passage to measure on."),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of the tasks."),
    retrieval_head,
    yarn,
    click.option("--output", type=OutputFile(), help="Merge rows into this file.  [default: where recommend looks]"),
    as_json,
)  # fmt: skip
def quality(
    plans: tuple[str, ...], model: str | None, text: str | None, ctx: tuple[int, ...], budgets: tuple[int, ...],
    chunks: tuple[int, ...], tasks: tuple[str, ...], batch: int | None, output: Path | None, as_json: bool,
    **sizes: Any,
) -> None:  # fmt: skip
    """Fidelity, perplexity, RULER scores, times and KV memory of each PLAN: a preset's name, `random`, `oracle` or a
    plan's file.

    Every figure stands beside plain decoding's. What the output file has already is not measured again, so that an
    interrupted run goes on where it stopped. `recommend` and `estimate` show what was measured of a plan.
    """
    path = output or user_quality_path()
    require_writable(path)
    rows = {row.cell: row for row in (load_rows(path) if path.exists() else ())}
    makers = list(_makers(plans, budgets, chunks))
    # Importing torch takes seconds, so the files are checked first.
    from ridgeplan.validate.acceptance import named_shape
    from ridgeplan.validate.prompts import read_prompt, sample_text
    from ridgeplan.validate.quality.measure import default_batch
    from ridgeplan.validate.quality.options import QualityOptions

    sizes["batch"] = default_batch() if batch is None else batch
    with warnings_as_notes():
        source = embedded_or(model)
        content = sample_text() if text is None else read_prompt(text)
        material, chosen = _material(content, tasks)
        name = "Python's help topics" if text is None else Path(text).stem
        question = QualityOptions(source, named_shape(source), tuple(makers), ctx, content, name, tasks=chosen, **sizes)
        question.require_head()  # before anything is measured
        for line in question.refused():
            click.echo(f"skipped: {line}", err=True)
        for new in _measured(question, material, list(rows.values())):
            rows.update((row.cell, row) for row in new)
            write_atomically(path, rows_json(rows.values()))
    _report(question, list(rows.values()), path, as_json)


def _makers(plans: Sequence[str], budgets: Sequence[int], chunks: Sequence[int]) -> Iterator[PlanMaker]:
    from ridgeplan.validate.quality.options import of_file, with_budgets

    for one in plans:
        if one in PRESETS or not Path(one).exists():
            yield from with_budgets([one], budgets, chunks)
        else:
            yield of_file(PlanFile().convert(one, None, None))


def _material(text: str, names: Sequence[str]) -> tuple[Material, tuple[Task, ...]]:
    """What tasks are made of, and the tasks. Those whose data cannot be had are left out, with one line."""
    from ridgeplan.validate.quality.ruler import TASKS, chosen_tasks, material
    from ridgeplan.validate.quality.ruler_questions import NoQuestions, question_sets

    named = [task for one in names for task in {"all": [*TASKS], "none": []}.get(one, [one])]
    chosen, questions = chosen_tasks(named), None
    if any(task.data for task in chosen):
        try:
            questions = question_sets()
        except NoQuestions as error:
            left_out = [task for task in chosen if task.data]
            click.echo(f"skipped: {', '.join(task.name for task in left_out)}: {error}", err=True)
            chosen = tuple(task for task in chosen if not task.data)
    return material(text, questions), chosen


def _measured(question: QualityOptions, material: Material, known: Sequence[QualityRow]) -> Iterator[list[QualityRow]]:
    from ridgeplan.validate.quality.measure import measure_quality

    with progress() as bars:
        bar = bars.add_task("loading")
        yield from measure_quality(
            question,
            material,
            known,
            lambda what, done, total: bars.update(bar, description=what, completed=done, total=total),
        )


def _report(question: QualityOptions, rows: Sequence[QualityRow], path: Path, as_json: bool) -> None:
    from ridgeplan.validate.quality.measure import is_requested

    found = [row for row in rows if is_requested(question, row)]
    if as_json:
        print_json({"path": str(path), "rows": [asdict(row) for row in found]})
        return
    first = found[0]
    title = f"Quality of {first.model} on {first.text}: {question.passages} passages, {question.samples} prompts a task"
    print_table(f"{title}, {first.where}", COLUMNS, table_rows(found))
    click.echo(
        f"RULER: mean of the tasks that plain decoding solves at {100 * SOLVED:.0f}% or more; its own in brackets"
    )
    click.echo(f"saved to {path}")


def table_rows(rows: Sequence[QualityRow]) -> Iterator[tuple[str, ...]]:
    """One line for each plan and context."""
    for plan, context in dict.fromkeys((row.plan, row.context) for row in rows):
        own = [row for row in rows if (row.plan, row.context) == (plan, context)]
        value = {row.measure: row.value for row in own}
        costs = (number(value[one]) if one in value else "" for one in (TTFT, TPOT))
        memory = f"{value[KV_BYTES] / 1e6:.1f}" if KV_BYTES in value else ""
        yield plan, str(context), _figure(value, FIDELITY, 4), _figure(value, PERPLEXITY, 2), _average(own), *costs, \
            memory, _tasks(own)  # fmt: skip


def _figure(values: dict[str, float], name: str, digits: int) -> str:
    return f"{values[name]:.{digits}f}" if name in values else ""


def _average(rows: Sequence[QualityRow]) -> str:
    average = ruler_average(rows)
    return f"{100 * average[0]:.1f} ({100 * average[1]:.1f})" if average else ""


def _tasks(rows: Sequence[QualityRow]) -> str:
    """Scores in percent by task."""
    costs = (FIDELITY, PERPLEXITY, TTFT, TPOT, KV_BYTES)
    return " ".join(f"{row.measure} {100 * row.value:.0f}" for row in rows if row.measure not in costs)
