"""Finding profiles: those that ship, the user's own, and the nearest machine's for an uncalibrated one."""

import math
from pathlib import Path

from ridgeplan.roofline.catalog.hardware import Hardware
from ridgeplan.roofline.catalog.profile import Profile, ProfileError, load_profile
from ridgeplan.roofline.catalog.profile_transfer import transferred
from ridgeplan.roofline.catalog.user_folders import cache_folder

_SHIPPED = Path(__file__).with_name("profiles")


def shipped_profiles() -> tuple[Profile, ...]:
    """The calibrated profiles that ship with the package."""
    return tuple(load_profile(path) for path in sorted(_SHIPPED.glob("*.json")))


def user_profile_path() -> Path:
    """The file in which `ridgeplan calibrate` saves this machine's profile, and which `gpu="auto"` reads."""
    return cache_folder() / "profile.json"


def user_acceptance_path() -> Path:
    """The file in which `ridgeplan acceptance` saves its rows, which all predictions read.

    It is not part of the profile: acceptance belongs to models and texts, and holds without a calibration.
    """
    return cache_folder() / "acceptance.json"


def user_quality_path() -> Path:
    """The file in which `ridgeplan quality` saves its rows, which `recommend` and `estimate` show."""
    return cache_folder() / "quality.json"


def profile_for(hardware: Hardware, calibrated: tuple[Profile, ...]) -> Profile:
    """The profile of `hardware` among `calibrated`, or that of the nearest machine, marked as transferred.

    A known name with other figures, from a user's own file, is another machine.
    The nearest machine is of the same kind, GPU or CPU, and differs the fewest octaves (factors of 2) in ridge point
    and bandwidth together. Raises ProfileError if there is none.
    """
    for profile in calibrated:
        if profile.hardware.name == hardware.name and _distance(profile.hardware, hardware) == 0:
            return profile
    alike = [profile for profile in calibrated if profile.hardware.kind == hardware.kind]
    if not alike:
        raise ProfileError(
            f"no calibrated profile of a {hardware.kind} to predict {hardware.name} from; "
            "run `ridgeplan calibrate` on one"
        )
    nearest = min(alike, key=lambda profile: _distance(profile.hardware, hardware))
    return transferred(nearest, hardware)


def _distance(one: Hardware, other: Hardware) -> float:
    ridge = abs(math.log2(one.ridge_point / other.ridge_point))
    return ridge + abs(math.log2(one.bandwidth_bytes_per_s / other.bandwidth_bytes_per_s))
