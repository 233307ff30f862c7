"""`ridgeplan bench kernels` and `planner`: kernels beside their peers, and the planner's speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.output import echo, number, print_json, print_table, progress
from ridgeplan.dashboards.files import write_json
from ridgeplan.validate.kernel_calls.sizes import KERNELS


@command()
@opt.repeated(
    "--only", "only", click.Choice(KERNELS), f"One of {', '.join(KERNELS)}", otherwise="all", metavar="KERNEL"
)
@click.option("--once", is_flag=True, help="Run each kernel once at a tiny size without timing, for memory checkers.")
@opt.json_output
@opt.as_json
def kernels(only: tuple[str, ...], once: bool, output: Path | None, as_json: bool) -> None:
    """Time the package's kernels beside their peers on this machine's GPU.

    Targets are for an H200. Kernels of FlashInfer and vLLM are peers if installed; a note names those that do not run.

    Examples:
      ridgeplan bench kernels
      ridgeplan bench kernels --only attention --output kernels.json
      ridgeplan bench kernels --once
    """
    report = run_once(only or KERNELS) if once else measure(only or KERNELS)
    write_json(output, report)
    if as_json:
        print_json(report)
    elif once:
        rows = ((row["kernel"], error_text(row["error"]), row["shape"]) for row in report["rows"])
        print_table("Every kernel once", ("kernel", "error", "shape"), rows)
    else:
        print_report(report)


@command()
@click.option("--runs", type=click.IntRange(min=1), default=5, help="Processes to time.")
@opt.json_output
@opt.as_json
def planner(runs: int, output: Path | None, as_json: bool) -> None:
    """Time the planner's answers: cold, warm, and in plans per second.

    Examples:
      ridgeplan bench planner
      ridgeplan bench planner --runs 9 --json
      ridgeplan bench planner --output planner.json
    """
    from ridgeplan.validate.planner_speed import CONTEXT, GPU, MODEL, measure_planner

    def show(stage: str, done: int, total: int) -> None:
        echo(f"timing {stage} ({done + 1} of {total})", err=True)  # at once, as each takes up to a minute

    speed = measure_planner(runs, show)
    write_json(output, speed.to_dict())
    if as_json:
        print_json(speed.to_dict())
        return
    echo(f"plan {MODEL} --gpu {GPU} --ctx {CONTEXT}, medians:")
    echo(f"  new process            {1e3 * speed.cold_s:.0f} ms ({1e3 * speed.help_s:.0f} ms for --help)")
    echo(f"  first call             {1e3 * speed.first_s:.0f} ms")
    echo(f"  further calls          {1e3 * speed.warm_s:.1f} ms for {speed.searched_plans:,} plans")
    echo(f"  map of 64 x 16 sizes   {1e3 * speed.map_s:.0f} ms")
    echo(f"  1,000 questions        {speed.grid_s:.2f} s, on 5 GPUs at 2 qualities")
    echo(f"  whole search           {speed.searched_plans_per_s / 1e6:.2f} million plans per second")
    echo(f"  compiled sweep         {speed.swept_plans_per_s / 1e6:.1f} million plans per second")


def measure(chosen: Sequence[str]) -> dict[str, Any]:
    """The report on kernels, measured with a progress bar."""
    # Importing torch takes seconds, so the options are checked first.
    from ridgeplan.validate.kernel_bench import bench_kernels

    with progress("measuring") as on_progress:
        return bench_kernels(chosen, on_progress).to_dict()


def run_once(chosen: Sequence[str]) -> dict[str, Any]:
    """The errors of kernels run once; null if not finite, as in reports."""
    from ridgeplan.validate.kernel_bench import run_kernels_once

    results = run_kernels_once(chosen)
    return {
        "rows": [
            {"kernel": kernel, "shape": shape, "error": error if math.isfinite(error) else None}
            for kernel, shape, error in results
        ]
    }


def print_report(report: Mapping[str, Any]) -> None:
    """Prints a table of a report's rows, and how many meet their targets."""
    columns = ("kernel", "ours us", "peer us", "ratio", "roof", "error", "target us", "", "peer")
    roof = f"{report['copy_bytes_per_s'] / 1e12:.3g} TB/s, {report['matmul_flops'] / 1e12:.3g} TFLOP/s"
    rows = report["rows"]
    print_table(f"{report['device']}, {roof}, {report['date']}", columns, map(row_texts, rows))
    for name, reason in {note: None for row in rows for note in row.get("notes", {}).items()}:
        echo(f"{name} was not timed: {reason}")
    echo(f"{sum(row['met'] for row in rows)} of {len(rows)} meet the targets for an H200")


def error_text(error: float | None) -> str:
    """The text of an error in tables."""
    return "not finite" if error is None else f"{error:.1e}"


def row_texts(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of one row; unmeasured figures are empty."""
    peer_us, ratio, error, target_us = (row[name] for name in ("peer_us", "ratio", "error", "target_us"))
    return (
        f"{row['kernel']} {row['shape']}", number(row["ours_us"]), "" if peer_us is None else number(peer_us),
        "" if ratio is None else f"{ratio:.2f}x", f"{row['roof']:.0%}", error_text(error),
        "" if target_us is None else number(target_us), "met" if row["met"] else "missed", row["peer"] or "none",
    )  # fmt: skip
