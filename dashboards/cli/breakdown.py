"""Tables of `--breakdown`: a round's time by class of kernels, measured and predicted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ridgeplan.dashboards.cli.output import number, print_table

if TYPE_CHECKING:
    from ridgeplan.validate.decode_bench.breakdown import Breakdown, ClassTime
    from ridgeplan.validate.decode_bench.report import DecodeRow


def print_breakdowns(rows: Sequence[DecodeRow], rounds: Sequence[Breakdown]) -> None:
    """Prints a table of each case's round."""
    for row, one in zip(rows, rounds, strict=True):
        print_breakdown(row, one)


def print_breakdown(row: DecodeRow, found: Breakdown) -> None:
    """Prints a table of a round's classes of operations, and the names of the kernels without a class."""
    case = row.case
    title = f"\n{case.preset}, context {case.context}, batch {case.batch}, gamma {row.gamma}: one round"
    columns = ("operation", "launches", "measured us", "predicted us", "other kernels")
    print_table(title, columns, map(breakdown_texts, found.rows))
    click.echo(
        f"kernels {number(found.kernels_us)} us, of which {number(found.overlap_us)} us beside others; a round takes "
        f"{number(found.round_us)} us ({number(found.traced_round_us)} us while traced), "
        f"predicted {number(found.predicted_us)} us"
    )


def breakdown_texts(row: ClassTime) -> tuple[str, ...]:
    """The cells of one class."""
    longest = sorted(row.kernels, key=lambda name: -row.kernels[name])
    names = ", ".join(f"{short_name(name)} {number(row.kernels[name])}" for name in longest)
    return (
        f"{row.part} {row.operation}",
        f"{row.launches:.4g}",
        number(row.measured_us),
        number(row.predicted_us),
        names if row.operation == "other" else "",
    )


def short_name(kernel: str) -> str:
    """A kernel's name without namespaces and without template arguments other than a functor."""
    plain = kernel.replace("(anonymous namespace)::", "")
    functor = re.search(r"\w+[Ff]unctor", plain)
    name = re.split(r"[<(]", plain)[0].split("::")[-1].removeprefix("void ")
    return f"{name} of {functor[0]}" if functor else name
