"""`ridgeplan calibrate` and `ridgeplan dashboard`."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeplan.dashboards.cli.groups import examples
from ridgeplan.dashboards.cli.options import OutputFile, as_json, options
from ridgeplan.dashboards.cli.output import print_json, print_table, progress, require_writable, write_atomically
from ridgeplan.dashboards.user_errors import FileProblem
from ridgeplan.roofline.catalog.profile import Profile, load_profile, user_profile_path
from ridgeplan.validate.calibration.noise import NoiseCheck

if TYPE_CHECKING:
    from ridgeplan.validate.calibration.fit import Samples

APP = Path(__file__).parents[1] / "app.py"
ADDRESS = "127.0.0.1"
FIRST_PORT, PORTS = 8501, 50
# Streamlit's settings, whatever a config.toml of the user or of the working directory says.
SERVER = {
    "server.headless": "true",
    "server.baseUrlPath": "",
    "server.fileWatcherType": "none",
    "browser.gatherUsageStats": "false",
    "client.toolbarMode": "minimal",
    "client.showErrorDetails": "full",
    "global.disableWidgetStateDuplicationWarning": "true",  # fix cards and sliders set texts that have defaults
    "theme.light.primaryColor": "#0072b2",
    "theme.dark.primaryColor": "#3d9bd6",
}


@click.command(
    epilog=examples(
        "ridgeplan calibrate --quick",
        "ridgeplan calibrate --output machine.json",
        "ridgeplan calibrate --allow-noisy --json",
        "ridgeplan calibrate --samples samples.json",
        "ridgeplan calibrate --only link --only rope",
    )
)
@options(
    click.option("--quick", is_flag=True, help="Under a minute, with a wider band."),
    click.option("--allow-noisy", is_flag=True, help="Keep classes whose readings differ, with a wider band."),
    click.option("--only", multiple=True, metavar="CLASS",
                 help="Measure this class of kernels again, into the profile that is there. May be repeated."),
    click.option("--samples", type=OutputFile(), help="Also save what was measured, for a later --refit."),
    click.option("--refit", type=click.Path(path_type=Path), metavar="FILE",
                 help="Measure nothing: fit the profile that is there again to the samples of a full calibration."),
    click.option("--output", type=OutputFile(), help="Where to save it.  [default: where --gpu auto looks for it]"),
    as_json,
)  # fmt: skip
def calibrate(
    quick: bool,
    allow_noisy: bool,
    only: tuple[str, ...],
    samples: Path | None,
    refit: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure this machine's bandwidth, compute and kernels, and save the profile that predictions use.

    Every size is measured again until two readings agree. Where they do not, nothing is saved: exit code 4.
    """
    if refit and (quick or only or samples):
        raise click.UsageError("--refit measures nothing; it takes neither --quick, --only nor --samples")
    if only and samples:
        raise click.UsageError("--samples needs all classes; it does not go with --only")
    if refit:
        profile, noise = _refitted(refit, output), NoiseCheck()
    else:
        profile, noise = calibrate_with_progress(quick, output, allow_noisy, only, samples)
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


@click.command(
    epilog=examples(
        "ridgeplan dashboard",
        "ridgeplan dashboard --port 8600",
        "ridgeplan dashboard --help",
    )
)
@click.option("--port", type=click.IntRange(1, 65535), help="Port on 127.0.0.1.  [default: the first free from 8501]")
def dashboard(port: int | None) -> None:
    """Serve the page to this machine's browser, and to nobody else. Ctrl-C or closing the terminal ends it."""
    found = _free_port() if port is None else _require_free(port)
    # -P keeps the working directory off sys.path, where a folder such as kernels/ would shadow installed packages.
    serve = [sys.executable, "-P", "-m", "streamlit", "run", str(APP)]
    settings = {**SERVER, "server.address": ADDRESS, "server.port": str(found)}
    # The server replaces this process, so that ending the command ends the server.
    os.execv(sys.executable, [*serve, *(word for name, value in settings.items() for word in (f"--{name}", value))])


def _free_port() -> int:
    """The first free port from `FIRST_PORT` on. Raises UsageError where many in a row are in use."""
    for port in range(FIRST_PORT, FIRST_PORT + PORTS):
        if not _why_not(port):
            return port
    raise click.UsageError(f"ports {FIRST_PORT} to {FIRST_PORT + PORTS - 1} are all in use; give a free --port")


def _require_free(port: int) -> int:
    """The port itself. Raises UsageError where the server could not listen."""
    problem = _why_not(port)
    if problem:
        raise click.UsageError(f"--port {port} cannot be used: {problem}; allowed: a free port")
    return port


def _why_not(port: int) -> str:
    """Why the server could not listen on a port; "" if it could."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that just ended leaves its port free
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _refitted(samples: Path, output: Path | None) -> Profile:
    """The profile that is there, fitted to samples again and saved in its place."""
    target = output or user_profile_path()
    require_writable(target)
    from ridgeplan import validate
    from ridgeplan.validate.calibration.calibrate import refit

    profile = refit(load_profile(target), samples)
    validate.save_profile(profile, target)
    return profile


def calibrate_with_progress(
    quick: bool, output: Path | None, allow_noisy: bool, only: Sequence[str] = (), samples: Path | None = None
) -> tuple[Profile, NoiseCheck]:
    """The profile of this machine, measured with a progress bar and saved, and how noisy its classes were.

    only: classes that are measured again; the others are those of the profile that is there. samples: where to save
    what was measured.
    Raises FileProblem, and NoisyMachine unless that is allowed; ProfileError where there is no profile to start from.
    """
    target = output or user_profile_path()
    for path in (target, samples) if samples else (target,):
        require_writable(path)
    base = load_profile(target) if only else None
    from ridgeplan import validate

    noise = validate.NoiseCheck(allow_noisy)
    with progress() as bars:
        bar = bars.add_task("calibrating")

        def on_progress(what: str, done: int, total: int) -> None:
            bars.update(bar, description=f"calibrating {what}", completed=done, total=total)

        def keep(found: Samples) -> None:
            if samples:
                write_atomically(samples, found.to_json())

        if base is None:
            profile = validate.calibrate(quick, noise=noise, on_progress=on_progress, keep=keep)
        else:
            profile = validate.recalibrate(base, only, quick, noise=noise, on_progress=on_progress)
    try:
        validate.save_profile(profile, output)
    except OSError as error:
        raise FileProblem(f"cannot write {str(target)!r}: {error.strerror}") from error
    return profile, noise
