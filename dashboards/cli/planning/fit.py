"""`ridgeplan fit`: the largest contexts and batches that fit a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli.options import as_json, memory_utilization, options, profile_file, yarn
from ridgeplan.dashboards.cli.output import print_json, print_table
from ridgeplan.dashboards.cli.planning.options import memory_limit, new_tokens, quality
from ridgeplan.planner.search.fit import BATCHES, FitRow
from ridgeplan.roofline.device import GIB


@click.command()
@click.argument("model")
@click.argument("gpu")
@options(
    click.option("--batch", "batches", type=int, multiple=True, default=BATCHES, show_default=True,
                 help="Find the largest context for this batch; repeat for several."),
    click.option("--ctx", "contexts", type=int, multiple=True,
                 help="Find the largest batch for this context; repeat for several.  [default: powers of 2]"),
    click.option("--preset", help="Only this named plan, such as quantspec.  [default: any that runs]"),
    new_tokens,
    quality,
    memory_utilization,
    memory_limit,
    profile_file,
    yarn,
    as_json,
)  # fmt: skip
def fit(model: str, gpu: str, batches: Sequence[int], contexts: Sequence[int], as_json: bool, **more: Any) -> None:
    """The largest context per batch, and the largest batch per context, that fit MODEL on GPU.

    Of the plans that run and that --quality allows, the one that reaches the most is named.
    """
    found = planner.fit(model, gpu, batches=batches, contexts=contexts, **more)
    if as_json:
        print_json(found.to_dict())
        return
    click.echo(f"{found.model} on {found.hardware}, of which {found.memory_limit_bytes / GIB:.1f} GiB may be used")
    for note in found.notes:
        click.echo(f"  note: {note}")
    _print_rows("Largest context per batch", found.contexts)
    _print_rows("Largest batch per context", found.batches)


def _print_rows(title: str, rows: Iterable[FitRow]) -> None:
    cells = (
        (one.plan or "none fits", f"{one.context}", f"{one.batch}", f"{one.peak_bytes / GIB:.2f}", one.limited_by)
        for one in rows
    )
    print_table(title, ("plan", "context", "batch", "GiB", "limited by"), cells)
