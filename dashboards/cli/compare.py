"""`ridgeplan compare` and `cost`: GPUs, models and plans side by side, and their dollars per million tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ridgeplan.dashboards.cli.groups import examples
from ridgeplan.dashboards.cli.options import (
    BATCH,
    COUNT_LIST,
    TIME,
    Names,
    SavedPlanFile,
    as_json,
    batch,
    context_of,
    ctx,
    limits,
    max_model_len,
    new_tokens,
    options,
    priced_by,
)
from ridgeplan.dashboards.cli.output import number, print_json, print_notes, print_table, wrapped
from ridgeplan.dashboards.cli.plan import LONGEST_NAME, shortened
from ridgeplan.planner import SearchOptions
from ridgeplan.planner.quantities import GB, tokens_text
from ridgeplan.planner.queries.compare import ComparedPlan, PlanComparison, compare_saved
from ridgeplan.planner.queries.compare import compare as compared
from ridgeplan.planner.queries.cost import BATCHES, CostRow, Limits, ServingCost, serving_cost
from ridgeplan.planner.render.text import briefly

COMPARE_COLUMNS = ("plan", "gamma", "ms/token", "TTFT ms", "tokens/s", "GB", "x plain", "")


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
    as_json: bool, **search: Any,
) -> None:  # fmt: skip
    """Plans side by side: of each MODEL on each GPU, by each preset; or of plan files, each for its own size."""
    options = SearchOptions(**search)
    plans = [subject for subject in subjects if Path(subject).suffix == ".json" and Path(subject).name != "config.json"]
    if plans and len(plans) < len(subjects):
        raise click.UsageError("models and plan files were given; allowed: either")
    if plans:
        _forbid(ctx, max_model_len, presets, options)
        saved = [SavedPlanFile().convert(path, None, None) for path in plans]
        found = compare_saved(saved, gpus, options)
    else:
        if not gpus:
            raise click.UsageError("compare needs --gpu for a model; allowed: names with commas, such as h100,h200")
        context = context_of(ctx, max_model_len, options.new_tokens)
        found = compared(subjects, gpus, context, presets=presets, options=options)
    if as_json:
        print_json(found.to_dict())
    else:
        _print_comparison(found)


def _forbid(ctx: int | None, max_model_len: int | None, presets: Sequence[str], options: SearchOptions) -> None:
    usual = SearchOptions()
    sized = options.batch != usual.batch or options.new_tokens != usual.new_tokens or options.yarn
    if ctx or max_model_len or presets or sized:
        raise click.UsageError("plan files have their own size and plan; allowed with them: --gpu and memory options")


def _print_comparison(found: PlanComparison) -> None:
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
    print_table("TTFT and tokens/s of the whole batch", COMPARE_COLUMNS, rows)
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


@click.command(
    epilog=examples(
        "ridgeplan cost Llama-3.1-8B --gpu h200 --ctx 8k --price 2.5 --ttft-max 2s --tpot-max 20ms",
        "ridgeplan cost Llama-3.1-8B --gpu h100,h200 --price 2.2,3.5 --ctx 32k --osl 512",
        "ridgeplan cost Qwen3-8B --gpu rtx4090 --price 0.35 --ctx 4k --preset autoregressive --batch 1..32",
    )
)
@click.argument("model")
@options(
    click.option("--gpu", "gpus", type=Names(), required=True, help="GPUs with commas between them."),
    click.option("--price", "prices", type=Names(), required=True,
                 help="Dollars per hour of a GPU: one for all, or one for each with commas."),
    ctx,
    max_model_len,
    click.option(*BATCH[:-1], "batches", type=COUNT_LIST, default=",".join(map(str, BATCHES)), show_default=True,
                 help="Sequences at a time, such as 1..64 or 1,4,16."),
    new_tokens,
    click.option("--ttft-max", type=TIME,
                 help="Longest time of a request's own prompt, without waiting for others, such as 2s."),
    click.option("--tpot-max", type=TIME, help="Longest time per token of a request, such as 20ms."),
    click.option("--preset", help="Only this named plan.  [default: the fastest that runs]"),
    limits,
    priced_by,
    as_json,
)  # fmt: skip
def cost(
    model: str, gpus: Sequence[str], prices: Sequence[str], ctx: int | None, max_model_len: int | None,
    batches: Sequence[int], preset: str | None, ttft_max: float | None, tpot_max: float | None, as_json: bool,
    **search: Any,
) -> None:  # fmt: skip
    """Dollars per million output tokens of MODEL at every batch, tokens/s per GPU, and who meets the limits.

    A batch is served at a time: its prompts one after another, then its tokens; both are paid for. TTFT is one
    request's own prompt, TPOT one request's time per token.
    """
    options = SearchOptions(**search)
    found = serving_cost(
        model, _priced(gpus, prices), context_of(ctx, max_model_len, options.new_tokens), batches=batches,
        limits=Limits(ttft_max, tpot_max), preset=preset, options=options,
    )  # fmt: skip
    if as_json:
        print_json(found.to_dict())
    else:
        _print_costs(found)


def _priced(gpus: Sequence[str], prices: Sequence[str]) -> dict[str, float]:
    """Dollars per hour of each GPU. Raises UsageError."""
    if len(prices) not in (1, len(gpus)):
        raise click.UsageError(f"{len(prices)} prices for {len(gpus)} GPUs; allowed: one, or one for each")
    try:
        numbers = [float(price.removeprefix("$")) for price in prices]
    except ValueError:
        raise click.UsageError(f"--price is {','.join(prices)!r}; allowed: dollars per hour, such as 2.5") from None
    return dict(zip(gpus, numbers * len(gpus) if len(numbers) == 1 else numbers, strict=False))


def _print_costs(found: ServingCost) -> None:
    click.echo(f"{found.model}, {tokens_text(found.context)} tokens of prompt, {tokens_text(found.new_tokens)} new")
    several = len({row.gpu for row in found.rows}) > 1
    limited = found.limits != type(found.limits)()
    rows = [_cells(row, several, limited) for row in found.rows]
    print_notes(found.notes)
    print_table("TTFT of a request's own prompt, without waiting; tokens/s and dollars of a GPU", COST_COLUMNS, rows)
    best = found.cheapest
    if best is None:
        click.echo("none fits and meets the limits; larger limits, a shorter --ctx or another --gpu may")
        return
    found_at = f"{best.gpu} at batch {best.batch} with {best.name}"
    click.echo(wrapped(f"cheapest: {found_at}: ${best.dollars_per_million:.3g} per million tokens"))


COST_COLUMNS = ("plan", "batch", "TTFT ms", "TPOT ms", "tokens/s", "GB", "$/M", "verdict")
NAME_WIDTH = 25  # what the other columns leave of 80


def _cells(row: CostRow, several: bool, limited: bool) -> tuple[str, ...]:
    """several: whether there are other GPUs; limited: whether there are limits to meet."""
    name = f"{row.gpu} {briefly(row.name)}" if several else briefly(row.name)
    serves = "meets" if limited else "fits"
    verdict = serves if row.serves else "does not fit" if not row.fits else f"misses {', '.join(row.misses)}"
    return (
        shortened(name, NAME_WIDTH), f"{row.batch}", number(row.ttft_ms), number(row.tpot_ms),
        number(row.tokens_per_s), number(row.peak_memory_bytes / GB), f"{row.dollars_per_million:,.3g}", verdict,
    )  # fmt: skip
