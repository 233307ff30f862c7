"""`ridgeplan sweep`: the fastest plan at every point of a grid, as CSV, JSON or a page of heat maps."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ridgeplan.dashboards.cli.lazy_group import examples
from ridgeplan.dashboards.cli.options import (
    TOKENS,
    OutputFile,
    as_json,
    options,
)
from ridgeplan.dashboards.cli.output import number, print_json, print_notes, print_table, write_atomically
from ridgeplan.dashboards.cli.planning.answer import LONGEST_NAME, shortened
from ridgeplan.dashboards.cli.planning.options import BATCH, CTX, GPU_HELP, limits, new_tokens, priced_by
from ridgeplan.planner.interface.quantities import GB, tokens_text
from ridgeplan.planner.interface.short_names import briefly
from ridgeplan.planner.questions.grid_sweep import AXES, TURNS, GridSweep, grid_sweep, parse_axes

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
def sweep(model: str, gpu: str | None, axes: str, ctx: int, output: Path | None, as_json: bool, **rest: Any) -> None:
    """The fastest plan for MODEL at every point of a grid."""
    over = parse_axes(axes)
    if gpu is None and "gpu" not in over:
        raise click.UsageError("sweep needs --gpu, or gpu=h100,h200 in --over")
    if output is not None and output.suffix not in FORMATS:
        raise click.UsageError(f"--output ends in {output.suffix!r}; allowed: {', '.join(FORMATS)}")
    found = grid_sweep(model, gpu or "", over, context=ctx, **rest)
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
    from ridgeplan.dashboards.sweep_page import sweep_page  # imports plotly

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
