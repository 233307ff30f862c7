"""`ridgeplan compare` and `cost`: GPUs, models and plans side by side, and their price per million tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.output import echo, number, print_answer, print_notes, print_table, wrapped
from ridgeplan.dashboards.cli.table_file import write_table
from ridgeplan.planner import SearchOptions
from ridgeplan.planner.quantities import GB, tokens_text
from ridgeplan.planner.queries.compare import ComparedPlan, PlanComparison, compare_saved
from ridgeplan.planner.queries.compare import compare as compared
from ridgeplan.planner.queries.cost import BATCHES, CostRow, LatencyLimits, ServingCost, serving_cost
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.plan.presets import short_name

COMPARE_COLUMNS = ("plan", "gamma", "ms/token", "last TTFT", "tokens/s", "GB", "speed-up", "")


@command()
@click.argument(
    "subjects", metavar="MODEL...|PLAN.json...", nargs=-1, required=True, type=opt.Names(), callback=opt.distinct
)
@opt.gpu_names
@click.option(
    "--preset", "presets", type=opt.Names(), multiple=True, callback=opt.distinct,
    help="Presets, separated by commas, each at its fastest gamma.  [default: the recommended plan]",
)  # fmt: skip
@opt.workload
@opt.limits
@opt.priced_by
@opt.table_output
@opt.as_json
def compare(
    subjects: Sequence[str], gpu_names: Sequence[str], presets: Sequence[str], ctx: int | None,
    max_model_len: int | None, output: Path | None, as_json: bool, **search: Any,
) -> None:  # fmt: skip
    """Compare the plans of each MODEL on each GPU, for each preset; or compare plan files at their own workloads.

    Examples:
      ridgeplan compare Llama-3.1-8B --gpu h100,h200,rtx4090 --ctx 32k
      ridgeplan compare Llama-3.1-8B --gpu h200 --ctx 128k --preset autoregressive,int8,quantspec
      ridgeplan compare plan_a.json plan_b.json --gpu h100,h200
    """
    options, defaults = SearchOptions(**search), SearchOptions()
    plans = [subject for subject in subjects if Path(subject).suffix == ".json" and Path(subject).name != "config.json"]
    if plans and len(plans) < len(subjects):
        raise click.UsageError("models and plan files cannot be mixed; allowed: only models or only plan files")
    if plans:
        sized = options.batch != defaults.batch or options.new_tokens != defaults.new_tokens or options.yarn
        if ctx or max_model_len or presets or sized:
            raise click.UsageError("plan files have their own workload; allowed with them: --gpu and memory options")
        saved = [opt.SavedPlanFile().convert(path, None, None) for path in plans]
        result = compare_saved(saved, gpu_names, options)
    else:
        if not gpu_names:
            raise click.UsageError("compare needs --gpu for models; allowed: names with commas, such as h100,h200")
        context = opt.context_of(ctx, max_model_len, options.new_tokens)
        result = compared(subjects, gpu_names, context, presets=presets, options=options)
    write_table(output, result, result.to_dict())
    print_answer(result.to_dict(), as_json, lambda: _print_comparison(result))


def _print_comparison(result: PlanComparison) -> None:
    """Prints what all plans have in common, then a table whose rows name only what differs."""
    parts = list(zip(*map(_subject, result.plans), strict=True))
    common = ", ".join(part[0] for part in parts if len(set(part)) == 1)
    if common:
        echo(common)
    print_notes(result.notes)
    rows = []
    for index, compared_plan in enumerate(result.plans):
        differing = [part[index] for part in parts if len(set(part)) > 1]
        name = " ".join((*differing, short_name(compared_plan.name)))
        predicted, best = compared_plan.predicted, compared_plan.predicted.best
        sizes = best.tpot_ms, best.ttft_ms, best.tokens_per_s, best.peak_memory_bytes / GB
        note = compared_plan.note.partition(":")[0]
        speedup = opt.speedup_text(predicted.speedup, compared_plan.plain_fits)
        rows.append((name, str(predicted.gamma), *map(number, sizes), speedup, note))
    print_table(f"Plans ({opt.FIGURES_NOTE})", COMPARE_COLUMNS, rows)
    if not all(compared_plan.plain_fits for compared_plan in result.plans):
        echo(opt.PLAIN_DOES_NOT_FIT)
    for subject, reason in result.missing:
        echo(wrapped(f"{subject}: {reason}"))


def _subject(compared_plan: ComparedPlan) -> tuple[str, ...]:
    workload = compared_plan.plan.workload
    model = workload.model.rpartition("/")[2]
    return model, workload.hardware, f"{tokens_text(workload.context)} tokens", f"batch {workload.batch}"


@command()
@click.argument("model")
@opt.gpu_names
@click.option(
    "--price", "prices", type=opt.Names(), default=(),
    help="Dollars per GPU-hour: one price, or one for each GPU, separated by commas.  [default: the catalog's]",
)  # fmt: skip
@opt.ctx
@opt.max_model_len
@opt.batch_list(f"Batches, such as 1..64 or 1,4,16.  [default: {','.join(map(str, BATCHES))} that fit]")
@opt.new_tokens
@click.option("--ttft-max", type=opt.TIME, help="Limit on a request's own prefill, without queueing, such as 2s.")
@click.option("--tpot-max", type=opt.TIME, help="Limit on a request's time per token, such as 20ms.")
@opt.only_preset
@opt.limits
@opt.priced_by
@opt.table_output
@opt.as_json
def cost(
    model: str, gpu_names: Sequence[str], prices: Sequence[str], ctx: int | None, max_model_len: int | None,
    batches: Sequence[int], preset: str | None, ttft_max: float | None, tpot_max: float | None,
    output: Path | None, as_json: bool, **search: Any,
) -> None:  # fmt: skip
    """Price a million output tokens of MODEL at every batch, and show which batches meet the latency limits.

    One batch is served at a time: first its prompts, one after another, then its tokens. The price includes both. TTFT
    is the prefill of a request's own prompt, and TPOT a request's time per token.

    Examples:
      ridgeplan cost Llama-3.1-8B --gpu h200 --ctx 8k --price 2.5 --ttft-max 2s --tpot-max 20ms
      ridgeplan cost Llama-3.1-8B --gpu h100,h200 --price 2.2,3.5 --ctx 32k --osl 512
      ridgeplan cost Llama-3.1-70B --gpu h100,h200 --gpus 4 --ctx 8k
      ridgeplan cost Qwen3-8B --gpu rtx4090 --price 0.35 --ctx 4k --preset autoregressive --batch 1..32
    """
    if not gpu_names:
        raise click.UsageError("cost needs --gpu; allowed: names with commas, such as h100,h200")
    options, hourly = SearchOptions(**search), _prices(gpu_names, prices)
    result = serving_cost(
        model, hourly, opt.context_of(ctx, max_model_len, options.new_tokens),
        batches=batches, limits=LatencyLimits(ttft_max, tpot_max), preset=preset, options=options,
    )  # fmt: skip
    write_table(output, result, result.to_dict())
    print_answer(result.to_dict(), as_json, lambda: _print_costs(result, hourly))


def _prices(gpus: Sequence[str], prices: Sequence[str]) -> dict[str, float]:
    """Dollars per hour of each GPU, by default the catalog's. Raises UsageError."""
    if not prices:
        listed = {gpu: load_hardware(gpu).dollars_per_hour for gpu in gpus}
        if missing := [gpu for gpu, price in listed.items() if not price]:
            raise click.UsageError(f"the catalog has no price of {', '.join(missing)}; allowed: --price")
        return listed
    if len(prices) not in (1, len(gpus)):
        raise click.UsageError(
            f"{len(prices)} prices were given for {len(gpus)} GPUs; allowed: one price, or one for each GPU"
        )
    try:
        numbers = [float(price.removeprefix("$")) for price in prices]
    except ValueError:
        raise click.UsageError(f"--price is {','.join(prices)!r}; allowed: dollars per hour, such as 2.5") from None
    return dict(zip(gpus, numbers * len(gpus) if len(numbers) == 1 else numbers, strict=False))


def _print_costs(result: ServingCost, hourly: Mapping[str, float]) -> None:
    prompt, new = tokens_text(result.context), tokens_text(result.new_tokens)
    priced = ", ".join(f"{gpu} at ${price:.2f} per GPU-hour" for gpu, price in hourly.items())
    echo(f"{result.model}, {prompt} prompt tokens, {new} new tokens; {priced}")
    several = len({row.gpu for row in result.rows}) > 1
    limited = result.limits != type(result.limits)()
    rows = [_cells(row, several, limited) for row in result.rows]
    print_notes(result.notes)
    explained = "TTFT without queueing, last TTFT of the batch's last request; tokens/s and $ of one GPU"
    print_table(f"Cost ({explained})", COST_COLUMNS, rows)
    best = result.cheapest
    if best is None:
        echo("no batch fits and meets the limits; try larger limits, a shorter --ctx or another --gpu")
        return
    price = f"${best.dollars_per_million:.3g} per million tokens"
    slow = "; slower than reading speed" if "slow" in best.caveats else ""
    echo(wrapped(f"cheapest: {price} on {best.gpu} at batch {best.batch} with {best.name}{slow}"))


COST_COLUMNS = ("plan", "batch", "TTFT ms", "last TTFT", "TPOT ms", "tokens/s", "GB", "$/M", "verdict")


def _cells(row: CostRow, several: bool, limited: bool) -> tuple[str, ...]:
    """The cells under `COST_COLUMNS`. several: whether other rows have other GPUs; limited: whether limits are set."""
    name = f"{row.gpu} {short_name(row.name)}" if several else short_name(row.name)
    verdict = f"misses {', '.join(row.misses)}" if row.fits else "does not fit"
    if row.serves:
        verdict = ", ".join((*["meets"] * limited, *row.caveats)) or "fits"
    return (
        name, f"{row.batch}", number(row.ttft_request_ms), number(row.ttft_ms),
        number(row.tpot_ms), number(row.tokens_per_s), number(row.peak_memory_bytes / GB),
        f"{row.dollars_per_million:,.3g}", verdict,
    )  # fmt: skip
