"""`ridgeplan gamma`: the best number of drafts a round over contexts and batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli.lazy_group import examples
from ridgeplan.dashboards.cli.options import (
    COUNT_LIST,
    TOKEN_LIST,
    as_json,
    memory_utilization,
    options,
    profile_file,
    yarn,
)
from ridgeplan.dashboards.cli.output import print_json, print_notes, print_table
from ridgeplan.dashboards.cli.planning.options import BATCH, CTX, GPU_HELP, flat, memory_limit, new_tokens, one_gpu
from ridgeplan.planner.capacity import usable_bytes
from ridgeplan.planner.interface.quantities import tokens_text
from ridgeplan.planner.search import notes
from ridgeplan.planner.search.best_gamma import BATCHES, GammaCell
from ridgeplan.planner.support import Backend, as_loaded, unsupported


@click.command(
    epilog=examples(
        "ridgeplan gamma Llama-3.1-8B h200",
        "ridgeplan gamma Llama-3.1-8B h200 --ctx 4k..128k --batch 1..64",
        "ridgeplan gamma Qwen3-8B h100 --preset quantspec-weights --json",
    )
)
@click.argument("model")
@click.argument("gpu", required=False)
@options(
    click.option("--gpu", "gpu_option", help=GPU_HELP),
    click.option("--preset", default="quantspec", show_default=True, help="A named plan that drafts."),
    click.option(*CTX[:-1], "contexts", type=TOKEN_LIST, multiple=True,
                 help="Tokens of a prompt, such as 4k..128k.  [default: 4k to the model's limit]"),
    click.option(*BATCH[:-1], "batches", type=COUNT_LIST, multiple=True,
                 help="Sequences at a time, such as 1..64.  [default: 1..32]"),
    new_tokens,
    memory_utilization,
    memory_limit,
    profile_file,
    yarn,
    as_json,
)  # fmt: skip
def gamma(
    model: str, gpu: str | None, gpu_option: str | None, preset: str, contexts: Sequence[tuple[int, ...]],
    batches: Sequence[tuple[int, ...]], as_json: bool, **more: Any,
) -> None:  # fmt: skip
    """The best gamma of a preset for MODEL on GPU, over contexts and batches, with its speed-up over plain decoding."""
    gpu = one_gpu(gpu, gpu_option)
    if gpu is None:
        raise click.UsageError("gamma needs a GPU; allowed: as the second word or by --gpu")
    lengths, sizes = flat(contexts), flat(batches) or BATCHES
    cells = planner.best_gamma(model, gpu, preset=preset, contexts=lengths, batches=sizes, **more)
    known = list(_notes(model, gpu, preset, max(cell.context for cell in cells), **more))
    if as_json:
        print_json({"preset": preset, "cells": [asdict(cell) for cell in cells], "notes": known})
        return
    print_notes(known)
    rows = [
        (tokens_text(context), *(_text(cell) for cell in cells if cell.context == context), "")
        for context in dict.fromkeys(cell.context for cell in cells)
    ]
    print_table(f"Best gamma of {preset}, and its speed-up", ("context", *(f"batch {one}" for one in sizes), ""), rows)


def _notes(
    model: str, gpu: str, preset: str, context: int, *, new_tokens: int, memory_utilization: float,
    memory_limit: float | None, profile: str | None, yarn: bool,
) -> Iterator[str]:  # fmt: skip
    """Caveats of the table's longest context, and of a preset that is only estimated or not calibrated."""
    shape, used = planner.resolve(model, gpu, profile)
    workload = planner.workload_for(shape, used, context, new_tokens, 1, yarn=yarn)
    usable = usable_bytes(used.hardware.memory_bytes, memory_utilization, memory_limit)
    yield from notes(shape, used, workload, memory_limit, usable)
    plan = planner.preset(preset, workload)
    missing = unsupported(plan, Backend.RIDGEPLAN, as_loaded(shape), used)
    if missing:
        yield missing


def _text(cell: GammaCell) -> str:
    """The gamma and its speed-up; no figures where the plan does not fit."""
    return f"{cell.gamma} ({cell.speedup:.2f}x)" if cell.fits else "does not fit"
