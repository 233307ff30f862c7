"""`ridgeplan sweep` and `gamma`: the fastest plan, and the best number of drafts a round, over contexts and batches."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
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
    TOKENS,
    OutputFile,
    as_json,
    flat,
    limits,
    memory_limit,
    memory_utilization,
    new_tokens,
    one_gpu,
    options,
    priced_by,
    profile_file,
    yarn,
)
from ridgeplan.dashboards.cli.output import number, print_json, print_notes, print_table, write_atomically
from ridgeplan.dashboards.cli.plan import LONGEST_NAME, shortened
from ridgeplan.planner import SearchOptions
from ridgeplan.planner.quantities import GB, tokens_text
from ridgeplan.planner.queries.gamma import BATCHES, GammaCell
from ridgeplan.planner.queries.sweep import AXES, TURNS, GridSweep, grid_sweep, parse_axes
from ridgeplan.planner.question import Question, ask
from ridgeplan.planner.render.text import briefly

FORMATS = (".csv", ".json", ".html")
SHOWN_ROWS = 20
COLUMNS = ("plan", "context", "batch", "gamma", "ms/token", "tokens/s", "GB", "x plain", "")


@click.command(
    epilog=examples(
        "ridgeplan sweep Llama-3.1-8B --gpu h200 --over ctx=4k..128k,batch=1..64 -o sweep.csv",
        "ridgeplan sweep Llama-3.1-8B --over gpu=h100,h200,ctx=4k..128k:32 -o sweep.html",
        "ridgeplan sweep Qwen3-8B --gpu h200 --ctx 32k --over quality=exact,near-lossless,batch=1..16 --json",
    )
)
@click.argument("model")
@options(
    click.option("--gpu", help=GPU_HELP + " Or an axis."),
    click.option("--over", "axes", required=True, metavar="AXES",
                 help=f"What varies: {', '.join(AXES)}. 4k..1M doubles; 4k..1M:64 is 64 values."),
    click.option(*CTX, type=TOKENS, default=8192, show_default=True, help="Tokens of a prompt, where not an axis."),
    click.option(*BATCH, type=int, default=1, show_default=True, help="Sequences at a time, where not an axis."),
    click.option("--preset", help="Only this named plan, at its fastest gamma.  [default: the fastest that runs]"),
    new_tokens,
    limits,
    priced_by,
    click.option("-o", "--output", type=OutputFile(), help="Write all rows here, as .csv, .json or .html."),
    as_json,
)  # fmt: skip
def sweep(
    model: str, gpu: str | None, axes: str, ctx: int, preset: str | None, output: Path | None, as_json: bool,
    **search: Any,
) -> None:  # fmt: skip
    """The fastest plan for MODEL at every point of a grid."""
    over = parse_axes(axes)
    if gpu is None and "gpu" not in over:
        raise click.UsageError("sweep needs --gpu, or gpu=h100,h200 in --over")
    if output is not None and output.suffix not in FORMATS:
        raise click.UsageError(f"--output ends in {output.suffix!r}; allowed: {', '.join(FORMATS)}")
    found = grid_sweep(model, gpu or "", over, context=ctx, preset=preset, options=SearchOptions(**search))
    if output is not None:
        write_atomically(output, _document(found, output.suffix))
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found, output)


def _document(found: GridSweep, suffix: str) -> str:
    if suffix == ".json":
        return json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n"
    if suffix == ".csv":
        return csv_text(found.table())
    from ridgeplan.dashboards.html_pages import sweep_page  # imports plotly

    return sweep_page(found)


def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    """A table of flat rows, with their names in the first line."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _print(found: GridSweep, output: Path | None) -> None:
    """Rows spread evenly over the sweep, where there are too many for a terminal."""
    rows = found.table()
    print_notes(found.notes)
    step = math.ceil(len(rows) / SHOWN_ROWS)
    varying = [name for name in TURNS if len({row.get(name) for row in rows}) > 1]
    cells = (_cells(row, varying) for row in rows[::step])
    print_table("Fastest plans (tokens/s of the whole batch)", COLUMNS, cells)
    shown = len(rows[::step])
    rest = f", of which {shown} are shown" if shown < len(rows) else ""
    click.echo(f"{len(rows)} points{rest}" + (f"; all in {output}" if output else ""))


def _cells(row: dict[str, Any], varying: Sequence[str]) -> tuple[str, ...]:
    """The cells of `COLUMNS`; before the plan stands what varies besides sizes, a model without its owner.

    Where there is no answer, why stands in the plan's place.
    """
    turn = [str(row[name]).rpartition("/")[2] for name in varying]
    name = briefly(row["plan"]) or row["why_not"].partition(" of ")[0]
    size = " ".join((*turn, shortened(name, LONGEST_NAME))), tokens_text(row["context"]), str(row["batch"])
    if not row["plan"]:
        return (*size, *[""] * (len(COLUMNS) - len(size)))
    return (
        *size, str(row["gamma"]), number(row["tpot_ms"]), number(row["tokens_per_s"]),
        number(row["peak_memory_bytes"] / GB), f"{row['speedup']:.2f}x", row["why_not"],
    )  # fmt: skip


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
    batches: Sequence[tuple[int, ...]], as_json: bool, **search: Any,
) -> None:  # fmt: skip
    """The best gamma of a preset for MODEL on GPU, over contexts and batches, with its speed-up over plain decoding."""
    gpu = one_gpu(gpu, gpu_option)
    if gpu is None:
        raise click.UsageError("gamma needs a GPU; allowed: as the second word or by --gpu")
    lengths, sizes, options = flat(contexts), flat(batches) or BATCHES, SearchOptions(**search)
    cells = planner.best_gamma(model, gpu, preset=preset, contexts=lengths, batches=sizes, options=options)
    known = list(_notes(ask(model, gpu, max(cell.context for cell in cells), options), preset))
    if as_json:
        print_json({"preset": preset, "cells": [asdict(cell) for cell in cells], "notes": known})
        return
    print_notes(known)
    rows = [
        (tokens_text(context), *(_text(cell) for cell in cells if cell.context == context), "")
        for context in dict.fromkeys(cell.context for cell in cells)
    ]
    print_table(f"Best gamma of {preset}, and its speed-up", ("context", *(f"batch {one}" for one in sizes), ""), rows)


def _notes(question: Question, preset: str) -> Iterator[str]:
    """Caveats of the table's longest context, and of a preset that is only estimated or not calibrated."""
    yield from question.notes()
    yield from question.limit_notes()
    missing = question.as_executed.unsupported(planner.preset(preset, question.workload))
    if missing:
        yield missing


def _text(cell: GammaCell) -> str:
    """The gamma and its speed-up; no figures where the plan does not fit."""
    return f"{cell.gamma} ({cell.speedup:.2f}x)" if cell.fits else "does not fit"
