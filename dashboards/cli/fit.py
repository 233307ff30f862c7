"""`ridgeplan fit`: the largest contexts and batches that fit a GPU, and the smallest GPU that fits a workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.output import echo, print_answer, print_notes, print_table
from ridgeplan.dashboards.cli.table_file import write_table
from ridgeplan.planner import NothingFits, SearchOptions
from ridgeplan.planner.quantities import GB, size_text, tokens_text
from ridgeplan.planner.queries.fit import BATCHES, FitResult, GpuFit, fit_gpus, remedies
from ridgeplan.planner.recommendation import Fix
from ridgeplan.roofline.latency import GIB


@command()
@click.argument("model")
@opt.gpu_argument
@opt.batch_list("Find the largest context for these batches, such as 1..64 or 1,4.  [default: powers of 2]")
@opt.context_list("Find the largest batch for these contexts, such as 4k..128k.  [default: powers of 2]")
@opt.only_preset
@opt.new_tokens
@opt.limits
@opt.memory_utilization
@opt.memory_limit
@opt.host_memory
@opt.profile_file
@opt.yarn
@opt.drafting
@click.option("--offload", is_flag=True, help="Include plans that keep KV layers on the host, which are slow.")
@opt.table_output
@opt.as_json
def fit(
    model: str, gpu: str | None, gpu_option: str | None, batches: Sequence[int], contexts: Sequence[int],
    preset: str | None, output: Path | None, as_json: bool, **search: Any,
) -> None:  # fmt: skip
    """Find the largest context per batch, and the largest batch per context, that fit MODEL on GPU.

    Each row names the plan that reaches furthest among those that run, keep their KV on the GPU and meet --quality.
    Without GPU, every GPU of the catalog is checked for one --ctx and --batch, and the smallest that fits is named.

    Examples:
      ridgeplan fit Llama-3.1-8B h200
      ridgeplan fit Llama-3.1-8B h200 --batch 1..64 --ctx 32k,128k --quality lossy
      ridgeplan fit Llama-3.1-8B --ctx 128k --batch 4   # which GPU?
    """
    gpu, options = opt.gpu_of(gpu, gpu_option), SearchOptions(**search)
    if gpu is not None:
        _on_gpu(model, gpu, batches, contexts, preset, options, output, as_json)
    elif output:
        raise click.UsageError("--output needs a GPU; allowed without one: --json")
    else:
        _on_all_gpus(model, batches or (1,), contexts, preset, options, as_json)


def _on_gpu(
    model: str, gpu: str, batches: Sequence[int], contexts: Sequence[int], preset: str | None, options: SearchOptions,
    output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    result = planner.fit(model, gpu, batches=batches or BATCHES, contexts=contexts, preset=preset, options=options)
    write_table(output, result, result.to_dict())
    print_answer(result.to_dict(), as_json, lambda: _print_fits(result))
    rows = (*(result.contexts if batches or not contexts else ()), *(result.batches if contexts else ()))
    if not any(row.plan for row in rows):
        raise NothingFits(f"nothing fits: {result.model} on {gpu} at these sizes{_hint(result.fixes)}")


def _hint(fixes: Sequence[Fix], where: str = "") -> str:
    """What would make the smallest size fit."""
    return f"; allowed{where}: {', or '.join(fix.text for fix in fixes)}" if fixes else ""


def _print_fits(result: FitResult) -> None:
    usable = f"{size_text(result.memory_limit_bytes)} ({result.memory_limit_bytes / GIB:.1f} GiB)"
    echo(f"{result.model} on {result.hardware}; plans may use {usable}")
    print_notes(result.notes)
    for title, fits in (("Largest context per batch", result.contexts), ("Largest batch per context", result.batches)):
        rows = (
            (row.plan or "none fits", tokens_text(row.context), str(row.batch), f"{row.peak_bytes / GB:.2f}",
             row.limited_by)
            for row in fits
        )  # fmt: skip
        print_table(title, ("plan", "context", "batch", "GB", "limited by"), rows)


def _on_all_gpus(
    model: str, batches: Sequence[int], contexts: Sequence[int], preset: str | None, options: SearchOptions,
    as_json: bool,
) -> None:  # fmt: skip
    if len(batches) != 1 or len(contexts) != 1 or options.profile:
        raise click.UsageError("without a GPU, fit needs one --ctx and at most one --batch, and no --profile")
    gpus = fit_gpus(model, contexts[0], batches[0], preset=preset, options=options)
    print_answer(list(map(asdict, gpus)), as_json, lambda: _print_gpus(model, batches[0], contexts[0], gpus))
    if not any(gpu.fits for gpu in gpus):
        largest = gpus[-1].gpu
        fixes = remedies(model, largest, contexts[0], batches[0], preset=preset, options=options)
        where = _hint(fixes, f" on {largest}")
        raise NothingFits(f"no GPU in the catalog fits {model}, {contexts[0]} tokens x {batches[0]}{where}")


def _print_gpus(model: str, batch: int, context_tokens: int, gpus: Sequence[GpuFit]) -> None:
    rows = (
        (_counted(gpu), f"{gpu.memory_bytes / GB:.0f}", "yes" if gpu.fits else "no", tokens_text(gpu.context.context),
         str(gpu.batch.batch), gpu.batch.plan or "none fits")
        for gpu in gpus
    )  # fmt: skip
    context = tokens_text(context_tokens)
    largest = f"context at batch {batch}", f"batch at {context}"
    print_table(f"{model}, {context} tokens x {batch}", ("GPU", "GB", "fits", *largest, "plan"), rows)
    fitting = [gpu for gpu in gpus if gpu.fits]
    if fitting:
        echo(f"smallest GPU that fits: {_counted(min(fitting, key=lambda gpu: gpu.gpus))}")
    if any(gpu.gpus > 1 for gpu in fitting):
        echo("several GPUs: vLLM executes such plans")


def _counted(gpu: GpuFit) -> str:
    return gpu.gpu if gpu.gpus == 1 else f"{gpu.gpus} x {gpu.gpu}"
