"""`ridgeplan cost`: dollars per million tokens, and which batches meet latency limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ridgeplan.dashboards.cli.lazy_group import examples
from ridgeplan.dashboards.cli.options import (
    COUNT_LIST,
    TIME,
    Names,
    as_json,
    options,
)
from ridgeplan.dashboards.cli.output import number, print_json, print_notes, print_table, wrapped
from ridgeplan.dashboards.cli.planning.answer import shortened
from ridgeplan.dashboards.cli.planning.options import (
    BATCH,
    context_of,
    ctx,
    limits,
    max_model_len,
    new_tokens,
    priced_by,
)
from ridgeplan.planner.interface.quantities import GB, tokens_text
from ridgeplan.planner.interface.short_names import briefly
from ridgeplan.planner.questions.cost import BATCHES, CostRow, Limits, ServingCost, serving_cost


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
    ttft_max: float | None, tpot_max: float | None, as_json: bool, **rest: Any,
) -> None:  # fmt: skip
    """Dollars per million output tokens of MODEL at every batch, tokens/s per GPU, and who meets the limits.

    A batch is served at a time: its prompts one after another, then its tokens; both are paid for. TTFT is one
    request's own prompt, TPOT one request's time per token.
    """
    context = context_of(ctx, max_model_len, rest["new_tokens"])
    found = serving_cost(model, _priced(gpus, prices), context, limits=Limits(ttft_max, tpot_max), **rest)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)


def _priced(gpus: Sequence[str], prices: Sequence[str]) -> dict[str, float]:
    """Dollars per hour of each GPU. Raises UsageError."""
    if len(prices) not in (1, len(gpus)):
        raise click.UsageError(f"{len(prices)} prices for {len(gpus)} GPUs; allowed: one, or one for each")
    try:
        numbers = [float(price.removeprefix("$")) for price in prices]
    except ValueError:
        raise click.UsageError(f"--price is {','.join(prices)!r}; allowed: dollars per hour, such as 2.5") from None
    return dict(zip(gpus, numbers * len(gpus) if len(numbers) == 1 else numbers, strict=False))


def _print(found: ServingCost) -> None:
    click.echo(f"{found.model}, {tokens_text(found.context)} tokens of prompt, {tokens_text(found.new_tokens)} new")
    several = len({row.gpu for row in found.rows}) > 1
    rows = [_cells(row, several) for row in found.rows]
    print_notes(found.notes)
    print_table("TTFT of a request's own prompt, without waiting; tokens/s and dollars of a GPU", COLUMNS, rows)
    best = found.cheapest
    if best is None:
        click.echo("none fits and meets the limits; larger limits, a shorter --ctx or another --gpu may")
        return
    found_at = f"{best.gpu} at batch {best.batch} with {best.name}"
    click.echo(wrapped(f"cheapest: {found_at}: ${best.dollars_per_million:.3g} per million tokens"))


COLUMNS = ("plan", "batch", "TTFT ms", "TPOT ms", "tokens/s", "GB", "$/M", "limits")
NAME_WIDTH = 25  # what the other columns leave of 80


def _cells(row: CostRow, several: bool) -> tuple[str, ...]:
    name = f"{row.gpu} {briefly(row.name)}" if several else briefly(row.name)
    verdict = "meets" if row.serves else "does not fit" if not row.fits else f"misses {', '.join(row.misses)}"
    return (
        shortened(name, NAME_WIDTH), f"{row.batch}", number(row.ttft_ms), number(row.tpot_ms),
        number(row.tokens_per_s), number(row.peak_memory_bytes / GB), f"{row.dollars_per_million:,.3g}", verdict,
    )  # fmt: skip
