"""`ridgeplan import-measurements`: corrects a machine's calibration by kernels that were timed elsewhere."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.output import echo, print_table
from ridgeplan.dashboards.files import FileProblem, locked, require_lockable
from ridgeplan.roofline.catalog.files import existing_path, read_document
from ridgeplan.roofline.catalog.profile import load_profile, save_profile, user_profile_path
from ridgeplan.roofline.catalog.validation import build
from ridgeplan.roofline.latency import KERNEL_CLASSES

REQUIRED = ("class", "seconds", "flops", "read_bytes", "write_bytes")
OPTIONAL = ("rows", "width", "depth")  # of a call, as `Rates` says; for classes whose time grows in steps


@command("import-measurements")
@click.argument("path", metavar="CSV", type=click.Path(path_type=Path))
@opt.profile_file
@click.option(
    "--output", type=opt.OutputFile(), help="Save the profile to this file.  [default: the file that --gpu auto reads]"
)
def import_measurements(path: Path, profile: str | None, output: Path | None) -> None:
    """Fit kernel classes of a calibration again to the timings in a CSV file, such as a profiler's.

    A row is a call: class (as `ridgeplan calibrate` lists them), seconds, flops, read_bytes and write_bytes, optionally
    rows, width and depth. Two rows or more of a class replace its rates, and five or more its spread; all others stay.
    Predictions for that machine then rest on them.

    Examples:
      ridgeplan import-measurements kernels.csv
      ridgeplan import-measurements kernels.csv --profile h100.json --output h100-corrected.json
      ridgeplan import-measurements attention.csv --output machine.json
    """
    saved = user_profile_path()
    target = output or saved
    require_lockable(target)
    if profile is None and not existing_path(str(saved)):
        raise click.UsageError("this machine is not calibrated; run `ridgeplan calibrate` first, or give --profile")
    base = load_profile(profile or saved)
    from ridgeplan.validate.calibration.fit import KernelSample, Samples
    from ridgeplan.validate.calibration.imported import TELLING_SAMPLES, corrected

    rows = tuple(build(KernelSample, row, where) for where, row in _rows(path))
    samples = Samples(base.device, base.date, 1.0, 1.0, rows)
    corrected_profile = corrected(base, samples)
    with locked(target):
        save_profile(corrected_profile, target)
    changed = [item for item in corrected_profile.classes.items() if item not in base.classes.items()]
    print_table(
        f"Corrected classes of {base.device}",
        ("class", "bandwidth", "compute", "launch us", "spread", "timings"),
        ((kind, f"{rates.bandwidth_utilization:.0%}", f"{rates.compute_utilization:.0%}", f"{1e6 * rates.launch_s:.3g}",
          f"{rates.spread:.0%}", str(len(samples.by_kind()[kind]))) for kind, rates in changed),
    )  # fmt: skip
    if any(len(timings) < TELLING_SAMPLES for timings in samples.by_kind().values()):
        echo(f"a class with fewer than {TELLING_SAMPLES} timings keeps its former spread unless theirs is wider")
    echo(f"saved to {target}")


def _rows(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Each row's place, for errors, and its values as numbers. Raises FileProblem, which names the line."""
    try:
        reader = csv.DictReader(io.StringIO(read_document(path).decode("utf-8-sig")))
        lines = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FileProblem(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    columns = set(reader.fieldnames or ())
    if not set(REQUIRED) <= columns <= {*REQUIRED, *OPTIONAL}:
        shown = ", ".join(reader.fieldnames or ()) or "none"
        raise FileProblem(f"columns of {str(path)!r} are {shown[:200]}; allowed: {', '.join(REQUIRED)}, and "
                          f"{', '.join(OPTIONAL)}")  # fmt: skip
    for number, line in enumerate(lines, 2):
        kind = line.pop("class")
        if kind not in KERNEL_CLASSES:
            raise FileProblem(f"line {number} of {str(path)!r}: class {kind!r:.60} is unknown; `ridgeplan calibrate` "
                              "lists the classes")  # fmt: skip
        try:
            values = {name: float(value) for name, value in line.items() if value}
        except (TypeError, ValueError) as error:
            raise FileProblem(f"line {number} of {str(path)!r}: {str(error)[:80]}; allowed: numbers") from error
        shape = {"width": 0.0, "depth": 0.0, "rows": int(values.pop("rows", 1))}
        yield f"line {number} of {str(path)!r}: ", {"kind": kind, **shape, **values}
