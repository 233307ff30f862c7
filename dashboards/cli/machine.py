"""`ridgeplan calibrate` and `ridgeplan dashboard`."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ridgeplan.dashboards.cli.options import OutputFile, as_json, options
from ridgeplan.dashboards.cli.output import print_json, print_table, progress, require_writable
from ridgeplan.dashboards.user_errors import FileProblem
from ridgeplan.roofline.catalog.profile import Profile, load_profile
from ridgeplan.roofline.catalog.profile_lookup import user_profile_path
from ridgeplan.validate.calibration.noise import NoiseCheck

APP = Path(__file__).parents[1] / "app.py"
ADDRESS = "127.0.0.1"


@click.command()
@options(
    click.option("--quick", is_flag=True, help="Under a minute, with a wider band."),
    click.option("--allow-noisy", is_flag=True, help="Keep classes whose readings differ, with a wider band."),
    click.option("--only", multiple=True, metavar="CLASS",
                 help="Measure this class of kernels again, into the profile that is there. May be repeated."),
    click.option("--output", type=OutputFile(), help="Where to save it.  [default: where --gpu auto looks for it]"),
    as_json,
)  # fmt: skip
def calibrate(quick: bool, allow_noisy: bool, only: tuple[str, ...], output: Path | None, as_json: bool) -> None:
    """Measure this machine's bandwidth, compute and kernels, and save the profile that predictions use.

    Every size is measured again until two readings agree. Where they do not, nothing is saved: exit code 4.
    """
    profile, noise = calibrate_with_progress(quick, output, allow_noisy, only)
    if as_json:
        path = str(output or user_profile_path())
        print_json({"path": path, "noise": noise.spreads, "profile": json.loads(profile.to_json())})
        return
    hardware = profile.hardware
    click.echo(
        f"{profile.device}: {hardware.bandwidth_bytes_per_s / 1e9:.4g} GB/s, "
        f"{hardware.compute_flops / 1e12:.3g} TFLOP/s, ridge point {hardware.ridge_point:.3g} FLOP/byte"
    )
    print_table(
        "Kernel classes, of these ceilings",
        ("class", "bandwidth", "compute", "launch us", "spread of the fit", "of readings", "source"),
        ((name, f"{rates.bandwidth_utilization:.0%}", f"{rates.compute_utilization:.0%}", f"{1e6 * rates.launch_s:.3g}",
          f"{rates.spread:.0%}", f"{noise.spreads[name]:.1%}" if name in noise.spreads else "", rates.source)
         for name, rates in profile.classes.items()),
    )  # fmt: skip
    click.echo(f"saved to {output or user_profile_path()}")


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), default=8501, show_default=True, help="Port on 127.0.0.1.")
def dashboard(port: int) -> None:
    """Serve the page to this machine's browser, and to nobody else."""
    _require_free(port)
    # -P keeps the working directory off sys.path, where a folder such as kernels/ would shadow installed packages.
    serve = [sys.executable, "-P", "-m", "streamlit", "run", str(APP)]
    local = ["--server.address", ADDRESS, "--server.port", str(port), "--server.headless", "true"]
    quiet = ["--browser.gatherUsageStats", "false", "--client.toolbarMode", "minimal"]
    # The server replaces this process, so that ending the command ends the server.
    os.execv(sys.executable, [*serve, *local, *quiet])


def _require_free(port: int) -> None:
    """Raises UsageError where the server could not listen."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that just ended leaves its port free
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            raise click.UsageError(f"--port {port} cannot be used: {error.strerror}; allowed: a free port") from None


def calibrate_with_progress(
    quick: bool, output: Path | None, allow_noisy: bool, only: Sequence[str] = ()
) -> tuple[Profile, NoiseCheck]:
    """The profile of this machine, measured with a progress bar and saved, and how noisy its classes were.

    only: classes that are measured again; the others are those of the profile that is there.
    Raises FileProblem, and NoisyMachine unless that is allowed; ProfileError where there is no profile to start from.
    """
    target = output or user_profile_path()
    require_writable(target)
    base = load_profile(target) if only else None
    from ridgeplan import validate

    noise = validate.NoiseCheck(allow_noisy)
    with progress() as bars:
        bar = bars.add_task("calibrating")

        def on_progress(what: str, done: int, total: int) -> None:
            bars.update(bar, description=f"calibrating {what}", completed=done, total=total)

        if base is None:
            profile = validate.calibrate(quick, noise=noise, on_progress=on_progress)
        else:
            profile = validate.recalibrate(base, only, quick, noise=noise, on_progress=on_progress)
    try:
        validate.save_profile(profile, output)
    except OSError as error:
        raise FileProblem(f"cannot write {str(target)!r}: {error.strerror}") from error
    return profile, noise
