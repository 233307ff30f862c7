"""`ridgeplan compare`: GPUs, models, presets and plan files side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ridgeplan.dashboards.cli.lazy_group import examples
from ridgeplan.dashboards.cli.options import (
    Names,
    SavedPlanFile,
    as_json,
    options,
)
from ridgeplan.dashboards.cli.output import number, print_json, print_notes, print_table
from ridgeplan.dashboards.cli.planning.answer import LONGEST_NAME, shortened
from ridgeplan.dashboards.cli.planning.options import (
    DEFAULT_NEW_TOKENS,
    batch,
    context_of,
    ctx,
    limits,
    max_model_len,
    new_tokens,
    priced_by,
)
from ridgeplan.planner.interface.quantities import GB, tokens_text
from ridgeplan.planner.interface.short_names import briefly
from ridgeplan.planner.questions.comparison import ComparedPlan, PlanComparison, compare_saved
from ridgeplan.planner.questions.comparison import compare as compared

COLUMNS = ("plan", "gamma", "ms/token", "TTFT ms", "tokens/s", "GB", "x plain", "")


@click.command(
    epilog=examples(
        "ridgeplan compare Llama-3.1-8B --gpu h100,h200,rtx4090 --ctx 32k",
        "ridgeplan compare Llama-3.1-8B --gpu h200 --ctx 128k --preset autoregressive,int8,quantspec",
        "ridgeplan compare plan_a.json plan_b.json --gpu h100,h200",
    )
)
@click.argument("subjects", metavar="MODEL...|PLAN.json...", nargs=-1, required=True)
@options(
    click.option("--gpu", "gpus", type=Names(), default=(), help="GPUs with commas between them."),
    click.option("--preset", "presets", type=Names(), default=(),
                 help="Presets with commas between them, each at its fastest gamma.  [default: the recommended plan]"),
    ctx,
    max_model_len,
    batch,
    new_tokens,
    limits,
    priced_by,
    as_json,
)  # fmt: skip
def compare(
    subjects: Sequence[str], gpus: Sequence[str], presets: Sequence[str], ctx: int | None, max_model_len: int | None,
    as_json: bool, **rest: Any,
) -> None:  # fmt: skip
    """Plans side by side: of each MODEL on each GPU, by each preset; or of plan files, each for its own size."""
    plans = [subject for subject in subjects if Path(subject).suffix == ".json" and Path(subject).name != "config.json"]
    if plans and len(plans) < len(subjects):
        raise click.UsageError("models and plan files were given; allowed: either")
    if plans:
        _forbid(ctx, max_model_len, presets, rest)
        saved = [SavedPlanFile().convert(path, None, None) for path in plans]
        held = {name: rest[name] for name in ("memory_utilization", "memory_limit", "host_memory")}
        found = compare_saved(saved, gpus, **held)
    else:
        if not gpus:
            raise click.UsageError("compare needs --gpu for a model; allowed: names with commas, such as h100,h200")
        context = context_of(ctx, max_model_len, rest["new_tokens"])
        found = compared(subjects, gpus, context, presets=presets, **rest)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)


def _forbid(ctx: int | None, max_model_len: int | None, presets: Sequence[str], rest: dict[str, Any]) -> None:
    sized = rest["batch"] != 1 or rest["new_tokens"] != DEFAULT_NEW_TOKENS or rest["yarn"]
    if ctx or max_model_len or presets or sized:
        raise click.UsageError("plan files have their own size and plan; allowed with them: --gpu and memory options")


def _print(found: PlanComparison) -> None:
    """A table whose rows name only what differs; what all have in common stands above it."""
    subjects = [_subject(one) for one in found.plans]
    common = [part for part in zip(*subjects, strict=True) if len(set(part)) == 1]
    if common:
        click.echo(", ".join(part[0] for part in common))
    kept = [[part for part in zip(*subjects, strict=True) if len(set(part)) > 1]]
    differing = list(zip(*kept[0], strict=True)) if kept[0] else [()] * len(subjects)
    print_notes(found.notes)
    rows = [
        (" ".join((*own, shortened(briefly(one.name), LONGEST_NAME))), *_figures(one))
        for own, one in zip(differing, found.plans, strict=True)
    ]
    print_table("TTFT and tokens/s of the whole batch", COLUMNS, rows)
    for what, why in found.missing:
        click.echo(f"{what}: {why}")


def _subject(one: ComparedPlan) -> tuple[str, ...]:
    workload = one.plan.workload
    model = workload.model.rpartition("/")[2]
    return model, workload.hardware, f"{tokens_text(workload.context)} tokens", f"batch {workload.batch}"


def _figures(one: ComparedPlan) -> tuple[str, ...]:
    best = one.predicted.best
    return (
        str(one.predicted.gamma), number(best.tpot_ms), number(best.ttft_ms), number(best.tokens_per_s),
        number(best.peak_memory_bytes / GB), f"{one.predicted.speedup:.2f}x", one.note.partition(":")[0],
    )  # fmt: skip
