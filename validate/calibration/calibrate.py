"""Calibration of this machine: the rates of each kernel class, measured with the package's own kernels."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeplan.roofline.catalog.profile import Profile, user_profile_path
from ridgeplan.validate.calibration.noise import NoiseCheck
from ridgeplan.validate.measure import Progress, silent

if TYPE_CHECKING:
    from ridgeplan.validate.calibration.fit import Samples
    from ridgeplan.validate.calibration.sizes import Suite


def calibrate(
    quick: bool,
    device: str | None = None,
    on_progress: Progress | None = None,
    suite: Suite | None = None,
    noise: NoiseCheck | None = None,
    keep: Callable[[Samples], object] | None = None,
) -> Profile:
    """This machine's profile. Takes a few minutes, with `quick` well under one.

    device: by default "cuda" if available, else "cpu". suite: overrides the device's sizes. noise: how noisy classes
    are treated, by default refused; it holds every class's spread afterwards. keep: called with what was measured,
    before it is fitted.
    Raises ValueError for a device that does not exist, NoisyMachine where readings do not agree.
    """
    # Importing torch takes seconds, which loading or comparing profiles should not need.
    from ridgeplan.validate.calibration.profile import measure_profile

    return measure_profile(
        quick, device, on_progress or silent, suite, noise or NoiseCheck(), keep or (lambda samples: None)
    )


def refit(base: Profile, samples: Path) -> Profile:
    """`base` with its rates fitted again to the samples of an earlier full calibration of the same machine.

    Raises SamplesError for a file that is missing, damaged or of another machine.
    """
    from ridgeplan.validate.calibration.fit import read_samples
    from ridgeplan.validate.calibration.profile import fitted_again
    from ridgeplan.validate.calibration.sizes import suite_for

    kind = "cpu" if base.hardware.kind == "cpu" else "cuda"
    return fitted_again(base, read_samples(samples), suite_for(kind, quick=False))


def recalibrate(
    base: Profile,
    kinds: Sequence[str],
    quick: bool,
    on_progress: Progress | None = None,
    suite: Suite | None = None,
    noise: NoiseCheck | None = None,
) -> Profile:
    """`base`, this machine's profile, with the classes `kinds` measured again.

    kinds: "portable" are those of older GPUs, "link" those of the link to the host. What is fitted to whole rounds
    stays as it is. Raises CalibrationError for another machine's profile and for an unknown class, NoisyMachine where
    readings do not agree.
    """
    from ridgeplan.validate.calibration.profile import measure_again

    return measure_again(base, kinds, quick, on_progress or silent, suite, noise or NoiseCheck())


def save_profile(profile: Profile, path: str | Path | None = None) -> Path:
    """Writes `profile` as JSON, completely or not at all; by default to the path that `gpu="auto"` reads."""
    target = Path(path) if path is not None else user_profile_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    text = profile.to_json() + "\n"
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    written = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        written.chmod(0o644)  # mkstemp's files are readable by their owner only
        written.replace(target)
    finally:
        written.unlink(missing_ok=True)
    return target
