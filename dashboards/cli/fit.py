"""`ridgeplan fit`: the largest contexts and batches that fit a GPU, and the smallest GPU that would do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli.groups import examples
from ridgeplan.dashboards.cli.options import (
    BATCH,
    COUNT_LIST,
    CTX,
    GPU_HELP,
    TOKEN_LIST,
    as_json,
    flat,
    host_memory,
    limits,
    memory_limit,
    memory_utilization,
    new_tokens,
    one_gpu,
    options,
    profile_file,
    yarn,
)
from ridgeplan.dashboards.cli.output import print_json, print_table
from ridgeplan.planner import SearchOptions
from ridgeplan.planner.quantities import GB, size_text, tokens_text
from ridgeplan.planner.queries.fit import BATCHES, FitRow, fit_gpus
from ridgeplan.roofline.latency import GIB


@click.command(
    epilog=examples(
        "ridgeplan fit Llama-3.1-8B h200",
        "ridgeplan fit Llama-3.1-8B h200 --batch 1..64 --ctx 32k,128k --quality lossy",
        "ridgeplan fit Llama-3.1-8B --ctx 128k --batch 4   # which GPU?",
    )
)
@click.argument("model")
@click.argument("gpu", required=False)
@options(
    click.option("--gpu", "gpu_option", help=GPU_HELP + "  [default: every GPU of the catalog]"),
    click.option(*BATCH[:-1], "batches", type=COUNT_LIST, multiple=True,
                 help="Find the largest context for these, such as 1..64 or 1,4.  [default: powers of 2]"),
    click.option(*CTX[:-1], "contexts", type=TOKEN_LIST, multiple=True,
                 help="Find the largest batch for these, such as 4k..128k.  [default: powers of 2]"),
    click.option("--preset", help="Only this named plan, such as quantspec.  [default: any that runs]"),
    new_tokens,
    limits,
    memory_utilization,
    memory_limit,
    host_memory,
    profile_file,
    yarn,
    click.option("--offload", is_flag=True, help="Also plans that keep layers of KV on the host, which are slow."),
    as_json,
)  # fmt: skip
def fit(
    model: str, gpu: str | None, gpu_option: str | None, batches: Sequence[tuple[int, ...]],
    contexts: Sequence[tuple[int, ...]], preset: str | None, as_json: bool, **search: Any,
) -> None:  # fmt: skip
    """The largest context per batch, and the largest batch per context, that fit MODEL on GPU.

    Of the plans that run, keep their KV on the GPU and are allowed by --quality, the one that reaches the most is
    named. Without GPU: every GPU of the catalog for one --ctx and --batch, and the smallest that does.
    """
    gpu, sizes, lengths, options = one_gpu(gpu, gpu_option), flat(batches), flat(contexts), SearchOptions(**search)
    if gpu is not None:
        _on_one(model, gpu, sizes or BATCHES, lengths, preset, options, as_json)
    else:
        _on_all(model, sizes or (1,), lengths, preset, options, as_json)


def _on_one(
    model: str, gpu: str, batches: Sequence[int], contexts: Sequence[int], preset: str | None, options: SearchOptions,
    as_json: bool,
) -> None:  # fmt: skip
    found = planner.fit(model, gpu, batches=batches, contexts=contexts, preset=preset, options=options)
    if as_json:
        print_json(found.to_dict())
        return
    usable = f"{size_text(found.memory_limit_bytes)} ({found.memory_limit_bytes / GIB:.1f} GiB)"
    click.echo(f"{found.model} on {found.hardware}, of which {usable} may be used")
    for note in found.notes:
        click.echo(f"  note: {note}")
    _print_rows("Largest context per batch", found.contexts)
    _print_rows("Largest batch per context", found.batches)


def _print_rows(title: str, rows: Iterable[FitRow]) -> None:
    cells = (
        (one.plan or "none fits", tokens_text(one.context), f"{one.batch}", f"{one.peak_bytes / GB:.2f}",
         one.limited_by)
        for one in rows
    )  # fmt: skip
    print_table(title, ("plan", "context", "batch", "GB", "limited by"), cells)


def _on_all(
    model: str, batches: Sequence[int], contexts: Sequence[int], preset: str | None, options: SearchOptions,
    as_json: bool,
) -> None:  # fmt: skip
    if len(batches) != 1 or len(contexts) != 1 or options.profile:
        raise click.UsageError("without a GPU, fit needs one --ctx and at most one --batch, and no --profile")
    found = fit_gpus(model, contexts[0], batches[0], preset=preset, options=options)
    if as_json:
        print_json([one.to_dict() for one in found])
        return
    rows = (
        (one.gpu, f"{one.memory_bytes / GB:.0f}", "yes" if one.fits else "no", tokens_text(one.context.context),
         f"{one.batch.batch}", one.batch.plan or "none fits")
        for one in found
    )  # fmt: skip
    asked = f"{tokens_text(contexts[0])} tokens x {batches[0]}"
    largest = (f"context at batch {batches[0]}", f"batch at {tokens_text(contexts[0])}")
    print_table(f"{model}, {asked}", ("GPU", "GB", "fits", *largest, "plan"), rows)
    smallest = next((one for one in found if one.fits), None)
    stricter = "" if options.quality == "lossy" else "; --quality lossy needs less"
    click.echo(f"smallest GPU that does: {smallest.gpu}" if smallest else f"no GPU of the catalog is enough{stricter}")
