"""Calibration: what this machine reaches, by class of kernel, measured through the package's own code."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.catalog.profile_lookup import user_profile_path
from ridgeplan.validate.progress import Progress, silent

if TYPE_CHECKING:
    from ridgeplan.validate.calibration.sizes import Suite


def calibrate(
    quick: bool, device: str | None = None, on_progress: Progress | None = None, suite: Suite | None = None
) -> Profile:
    """This machine's profile. `quick` takes well under a minute, else a few.

    device: "cuda" where there is one, else "cpu". suite: other sizes than the device's own.
    Raises ValueError for a device that is not there.
    """
    # Importing torch takes seconds, which those who only compare or load a profile should not pay.
    from ridgeplan.validate.calibration.profile import measure_profile

    return measure_profile(quick, device, on_progress or silent, suite)


def save_profile(profile: Profile, path: str | Path | None = None) -> Path:
    """Writes `profile` as JSON, whole or not at all; by default where `gpu="auto"` looks for it."""
    target = Path(path) if path is not None else user_profile_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    text = profile.to_json() + "\n"
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    written = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        written.chmod(0o644)  # mkstemp makes files that only their owner may read
        written.replace(target)
    finally:
        written.unlink(missing_ok=True)
    return target
