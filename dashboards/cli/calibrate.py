"""`ridgeplan calibrate`: measures this machine and saves its profile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.calibrate_engine import calibrate_engine
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.output import echo, print_json, print_table, progress
from ridgeplan.dashboards.cli.threads import limit_threads
from ridgeplan.dashboards.files import FileProblem, locked, require_lockable, require_writable, write_atomically
from ridgeplan.planner.engines.measurements import WEIGHTS
from ridgeplan.planner.resolution import NotCalibrated, profile_path, this_machine
from ridgeplan.roofline.catalog.profile import Profile, load_profile
from ridgeplan.validate.calibration.noise import NoiseCheck, require_plausible

if TYPE_CHECKING:
    from ridgeplan.validate.calibration.fit import Samples


@command()
@click.option("--quick", is_flag=True, help="Take a minute or two and widen the bands.")
@click.option("--allow-noisy", is_flag=True, help="Keep kernel classes whose readings differ, with wider bands.")
@opt.repeated("--only", "only", str, "Measure only this kernel class again in the saved profile", metavar="CLASS")
@click.option("--samples", type=opt.OutputFile(), help="Also save the measurements for a later --refit.")
@click.option(
    "--refit", type=click.Path(path_type=Path), metavar="FILE",
    help="Fit the saved profile again to the samples of a full calibration, without measuring.",
)  # fmt: skip
@click.option("--engine", type=click.Choice(["vllm", "sglang"]), help="Measure this serving engine's steps instead.")
@click.option("--url", help="Its running server, such as http://localhost:8000.  [default: vLLM in this process]")
@click.option("--model", help="The model that the engine serves, as `ridgeplan plan` takes it.")
@click.option("--served-model", help="The engine's name or path of that model.  [default: the first one it serves]")
@click.option("--gpu", help="The engine's GPU.  [default: this machine's]")
@opt.context_list("Prompts to measure the engine at.  [default: 2k,8k,32k]")
@opt.batch_list("Batches to measure the engine at.  [default: 1,2,4,6,8,12,16]")
@click.option("--quantization", type=click.Choice(WEIGHTS), default="auto", help="The engine's own --quantization.")
@click.option("--kv-cache-dtype", default="auto", metavar="DTYPE", help="The engine's own --kv-cache-dtype.")
@click.option("--load-format", default="auto", metavar="FORMAT", help="vLLM's; dummy needs a config.json alone.")
@click.option(
    "--output", type=opt.OutputFile(), help="Save the profile to this file.  [default: the file that --gpu auto reads]"
)
@opt.as_json
def calibrate(
    quick: bool, allow_noisy: bool, only: tuple[str, ...], samples: Path | None, refit: Path | None,
    engine: str | None, output: Path | None, as_json: bool, **measured: Any,
) -> None:  # fmt: skip
    """Measure this machine's bandwidth, compute and kernels, and save the profile that predictions use.

    Every size is measured until two readings agree. If they never do, nothing is saved and the exit code is 4; --quick
    takes the quieter half of the readings instead, if these differ by at most half, and widens the bands. On a CPU, all
    kernel classes are read again after the others, as other programs may slow all readings of a class alike, and scaled
    so that whole rounds of a model take what was measured. Beside other programs, calibrate, demo, run, chat and serve
    use one thread for each free core; OMP_NUM_THREADS overrides this. Each number of threads has its own calibration.

    With --engine, the decode steps of vLLM (in this process) or of any running OpenAI-compatible server are measured in
    minutes: their profile is what `plan`, `cost`, `compare`, `sweep`, `fit` and `export` then use for that engine.

    Examples:
      ridgeplan calibrate --engine vllm --model meta-llama/Llama-3.1-8B
      ridgeplan calibrate --engine sglang --url http://localhost:30000 --model Qwen/Qwen3-8B --gpu h100
      ridgeplan calibrate --quick
      ridgeplan calibrate --output machine.json
      ridgeplan calibrate --allow-noisy --json
      ridgeplan calibrate --samples samples.json
      ridgeplan calibrate --only link --only rope
    """
    if engine is not None:
        if quick or allow_noisy or only or samples or refit:
            raise click.UsageError("--engine measures an engine alone; allowed: with its own options and --output")
        calibrate_engine(engine, output, as_json=as_json, **measured)
        return
    if any(measured[name] for name in ("url", "model", "served_model", "gpu", "contexts", "batches")):
        raise click.UsageError("--url, --model, --served-model, --gpu, --ctx and --batch need --engine")
    if refit and (quick or only or samples):
        raise click.UsageError("--refit measures nothing; allowed: without --quick, --only and --samples")
    if only and samples:
        raise click.UsageError("--samples needs all kernel classes; allowed: without --only")
    if refit:
        path = output or profile_path()
        profile, noise = _refitted(refit, path), NoiseCheck()
    else:
        path = output or profile_path(limit_threads())
        profile, noise = calibrate_with_progress(quick, path, allow_noisy, only, samples)
    if as_json:
        print_json({"path": str(path), "noise": noise.spreads, "profile": json.loads(profile.to_json())})
        return
    hardware = profile.hardware
    echo(
        f"{profile.device}: {hardware.bandwidth_bytes_per_s / 1e9:.4g} GB/s, "
        f"{hardware.compute_flops / 1e12:.3g} TFLOP/s, ridge point {hardware.ridge_point:.3g} FLOP/byte"
    )
    print_table(
        "Kernel classes, as shares of these ceilings",
        ("class", "bandwidth", "compute", "launch us", "spread of the fit", "of readings", "source"),
        ((name, f"{rates.bandwidth_utilization:.0%}", f"{rates.compute_utilization:.0%}", f"{1e6 * rates.launch_s:.3g}",
          f"{rates.spread:.0%}", f"{noise.spreads[name]:.1%}" if name in noise.spreads else "", rates.source)
         for name, rates in profile.classes.items()),
    )  # fmt: skip
    echo(f"saved to {path}")


def _refitted(samples: Path, target: Path) -> Profile:
    """The profile that is there, fitted to samples again and saved in its place."""
    require_lockable(target)
    from ridgeplan import validate
    from ridgeplan.validate.calibration.calibrate import refit

    with locked(target):
        profile = refit(load_profile(target), samples)
        validate.save_profile(profile, target)
    return profile


def machine_profile(given: Profile | None = None) -> tuple[Profile, Path | None]:
    """The profile to compute with here: `given`, else this machine's, which is measured now, quickly, if none is known.

    It chooses the number of threads: fewer than all have a calibration of their own. The path is the new file's, if
    there is one: a calibration of all cores that other programs disturbed is not kept.
    """
    threads = limit_threads()
    reason = f"not calibrated for a thread count of {threads}" if threads else "neither calibrated nor in the catalog"
    with suppress(NotCalibrated):
        profile = given or this_machine(threads)
        other = other_threads(profile)
        if given and other:
            echo(f"note: the profile is {other}, so predictions do not hold", err=True)
        if given or not other:
            return profile, None
        reason = other
    echo(f"note: this machine is {reason}; measuring it now, once", err=True)
    path = profile_path(threads)
    profile, _ = calibrate_with_progress(quick=True, target=path, allow_noisy=True)
    if threads or not profile.disturbed:  # beside programs that stay, another one would be no better
        return profile, path
    path.unlink(missing_ok=True)
    echo("note: this calibration is not kept, as other programs disturbed it", err=True)
    return profile, None


def other_threads(profile: Profile) -> str:
    """How to say that a CPU's profile is of another number of threads than torch computes with; else empty."""
    import torch

    threads, measured = torch.get_num_threads(), profile.hardware.num_sms
    differs = profile.hardware.kind == "cpu" and measured != threads
    return f"calibrated for {measured} thread{'s' * (measured != 1)}, not for this process's {threads}" * differs


def calibrate_with_progress(
    quick: bool, target: Path, allow_noisy: bool, only: Sequence[str] = (), samples: Path | None = None
) -> tuple[Profile, NoiseCheck]:
    """The profile of this machine, measured with a progress bar and saved, and how noisy its classes were.

    only: classes that are measured again; the others are those of the profile that is there. samples: where to save
    what was measured.
    Raises FileProblem, and NoisyMachine unless that is allowed; ProfileError where there is no profile to start from.
    """
    require_lockable(target)
    if samples:
        require_writable(samples)
    base = load_profile(target) if only else None
    if base is not None and (other := other_threads(base)):
        raise click.UsageError(f"the profile is {other}; allowed: --only with as many (OMP_NUM_THREADS sets them)")
    from ridgeplan import validate
    from ridgeplan.validate.calibration.calibrate import merge_recalibrated

    noise = validate.NoiseCheck(allow_noisy, quick)
    with progress("calibrating") as on_progress:

        def keep(measured: Samples) -> None:
            if samples:
                write_atomically(samples, measured.to_json())

        if base is None:
            profile = validate.calibrate(quick, noise=noise, on_progress=on_progress, keep=keep)
        else:
            profile = validate.recalibrate(base, only, quick, noise=noise, on_progress=on_progress)
    require_plausible(profile)
    try:
        with locked(target):
            if base is not None:  # others may have measured other classes meanwhile
                profile = merge_recalibrated(load_profile(target), base, profile)
            validate.save_profile(profile, target)
    except OSError as error:
        raise FileProblem(f"cannot write {str(target)!r}: {error.strerror}") from error
    if note := noise.note():
        echo(f"note: {note}", err=True)
    return profile, noise
