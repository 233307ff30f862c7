"""`ridgeplan sweep` and `gamma`: the fastest plan, and the best number of drafts per round, over a grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.output import echo, number, print_answer, print_json, print_notes, print_table, write_page
from ridgeplan.dashboards.cli.table_file import RowTable, write_table
from ridgeplan.planner import SearchOptions
from ridgeplan.planner.quantities import GB, tokens_text
from ridgeplan.planner.queries.gamma import BATCHES, DEFAULT_PRESET, GammaCell
from ridgeplan.planner.queries.sweep import AXES, TURNS, GridSweep, grid_sweep, parse_axes
from ridgeplan.planner.question import Question, ask
from ridgeplan.planner.render.tables import Lines
from ridgeplan.planner.search import named_plan
from ridgeplan.roofline.plan.presets import short_name

SHOWN_ROWS = 20
SPEEDUP_CHART = Lines(("context",), "speedup", "speed-up over plain decoding", ("batch",))
COLUMNS = ("plan", "context", "batch", "gamma", "ms/token", "tokens/s", "GB", "speed-up", "")


@command()
@click.argument("model")
@opt.one_gpu(help=f"{opt.GPU_HELP} It can be an axis instead.")
@click.option(
    "--over", "axes", metavar="AXES", multiple=True, callback=lambda ctx, param, value: ",".join(value),
    help=f"Axes of the grid: {', '.join(AXES)}. 4k..1M doubles at each step; 4k..1M:64 has 64 values.",
)  # fmt: skip
@opt.context_list("Prompt lengths in tokens, if they are no axis.  [default: 8k]")
@opt.batch_list("Sequences that run together, if they are no axis.  [default: 1]")
@opt.only_preset
@opt.new_tokens
@opt.limits
@opt.priced_by
@click.option(
    "-o", "--output", type=opt.TABLE_OR_PAGE, help="Write all rows to this file: .csv, .md, .json, .png or .html."
)
@opt.as_json
def sweep(
    model: str, gpu: str | None, axes: str, contexts: Sequence[int], batches: Sequence[int], preset: str | None,
    output: Path | None, as_json: bool, **search: Any,
) -> None:  # fmt: skip
    """Find the fastest plan for MODEL at every point of a grid.

    Examples:
      ridgeplan sweep Llama-3.1-8B --gpu h200 --over ctx=4k..128k,batch=1..64 -o sweep.csv
      ridgeplan sweep Llama-3.1-8B --over gpu=h100,h200,ctx=4k..128k:32 -o sweep.html
      ridgeplan sweep Qwen3-8B --gpu h200 --ctx 32k --over quality=exact,near-lossless,batch=1..16 --json
    """
    sizes = {name: given for name, given in {"ctx": contexts, "batch": batches}.items() if given}
    if not axes and not sizes:
        raise click.UsageError("sweep needs an axis; allowed: such as --over ctx=4k..128k,batch=1..64, or --ctx 8k,32k")
    over = sizes | (parse_axes(axes) if axes else {})
    if gpu is None and "gpu" not in over:
        raise click.UsageError("sweep needs --gpu, or gpu=h100,h200 in --over")
    result = grid_sweep(model, gpu or "", over, preset=preset, options=SearchOptions(**search))
    if output is not None and output.suffix == ".html":
        write_page(output, "sweep_page", result)
    else:
        write_table(output, result, result.to_dict())
    print_answer(result.to_dict(), as_json, lambda: _print(result, output))


def _print(result: GridSweep, output: Path | None) -> None:
    """Prints the rows; of too many for a terminal, some that are spread evenly over the grid."""
    rows = result.table()
    print_notes(result.notes)
    step = math.ceil(len(rows) / SHOWN_ROWS)
    varying = [name for name in TURNS if len({row.get(name) for row in rows}) > 1]
    cells = (_cells(row, varying) for row in rows[::step])
    print_table("Fastest plans (tokens/s of the whole batch)", COLUMNS, cells)
    if any(row["plan"] and not row["plain_fits"] for row in rows[::step]):
        echo(opt.PLAIN_DOES_NOT_FIT)
    shown = len(rows[::step])
    part = f", {shown} of them shown" if shown < len(rows) else ""
    echo(f"{len(rows)} points{part}" + (f"; all are in {output}" if output else ""))


def _cells(row: dict[str, Any], varying: Sequence[str]) -> tuple[str, ...]:
    """The cells under `COLUMNS`. The first names the other axes' values and the plan, or why there is none."""
    values = [str(row[name]).rpartition("/")[2] for name in varying]  # a model without its owner
    name = short_name(row["plan"]) or row["why_not"].partition(" of ")[0]
    size = " ".join((*values, name)), tokens_text(row["context"]), str(row["batch"])
    if not row["plan"]:
        return (*size, *[""] * (len(COLUMNS) - len(size)))
    return (
        *size, str(row["gamma"]), number(row["tpot_ms"]), number(row["tokens_per_s"]),
        number(row["peak_memory_bytes"] / GB), opt.speedup_text(row["speedup"], row["plain_fits"]), row["why_not"],
    )  # fmt: skip


@command()
@click.argument("model")
@opt.gpu_argument
@click.option(
    "--preset",
    help=f"A preset or plan that drafts.  [default: {DEFAULT_PRESET}; where it does not fit, the fastest that does]",
)
@opt.context_list("Contexts, such as 4k..128k.  [default: 4k to the model's limit]")
@opt.batch_list("Batches, such as 1..64.  [default: 1..32]")
@opt.new_tokens
@opt.memory_utilization
@opt.memory_limit
@opt.profile_file
@opt.yarn
@opt.routing_skew
@opt.drafting
@opt.table_output
@opt.as_json
def gamma(
    model: str, gpu: str | None, gpu_option: str | None, preset: str | None, contexts: Sequence[int],
    batches: Sequence[int], output: Path | None, as_json: bool, **search: Any,
) -> None:  # fmt: skip
    """Find the best gamma of a preset or plan for MODEL on GPU, over contexts and batches.

    Each cell also shows the speed-up over plain decoding.

    Examples:
      ridgeplan gamma Llama-3.1-8B h200
      ridgeplan gamma Llama-3.1-8B h200 --ctx 4k..128k --batch 1..64
      ridgeplan gamma Qwen3-8B h100 --preset quantspec-weights --json
      ridgeplan gamma Llama-3.1-8B h200 --preset suffix --text code
      ridgeplan gamma model.gguf rtx4060-laptop --preset stored+int4x2+upper
    """
    gpu, batches = opt.gpu_of(gpu, gpu_option), batches or BATCHES
    if gpu is None:
        raise click.UsageError("gamma needs a GPU; allowed: as the second argument or by --gpu")
    options = SearchOptions(**search)
    cells = planner.best_gamma(model, gpu, preset=preset, contexts=contexts, batches=batches, options=options)
    preset = cells[0].plan
    caveats = list(_notes(ask(model, gpu, max(cell.context for cell in cells), options), preset))
    rows_of_cells = [asdict(cell) for cell in cells]
    document = {"preset": preset, "cells": rows_of_cells, "notes": caveats}
    title = f"Best gamma of {preset} for {model} on {gpu}"
    write_table(output, RowTable(title, rows_of_cells, SPEEDUP_CHART), document)
    if as_json:
        print_json(document)
        return
    print_notes(caveats)
    rows = [
        (tokens_text(context), *(_text(cell) for cell in cells if cell.context == context), "")
        for context in dict.fromkeys(cell.context for cell in cells)
    ]
    print_table(
        f"Best gamma{'/passes/proposals' * bool(cells[0].passes)} of {preset}, and its speed-up",
        ("context", *(f"batch {batch}" for batch in batches), ""),
        rows,
    )
    if not all(cell.plain_fits for cell in cells if cell.fits):
        echo(opt.PLAIN_DOES_NOT_FIT)


def _notes(question: Question, preset: str) -> Iterator[str]:
    """Caveats of the longest context, and of a preset that is only estimated or not calibrated."""
    yield from question.notes()
    yield from question.limit_notes()
    missing = question.as_executed.unsupported(named_plan(preset, question.workload))
    if missing:
        yield missing


def _text(cell: GammaCell) -> str:
    """The gamma, with a cascade's passes and depth, and the speed-up."""
    tiers = f"/{cell.passes}/{cell.depth}" * bool(cell.passes)
    return f"{cell.gamma}{tiers} ({opt.speedup_text(cell.speedup, cell.plain_fits)})" if cell.fits else "does not fit"
