"""Lookup of calibration profiles: shipped, of the user, or transferred from the nearest calibrated machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog.hardware import Hardware
from ridgeplan.roofline.catalog.paths import cache_folder
from ridgeplan.roofline.catalog.profile import (
    LINK_CLASSES,
    MAX_PART_S,
    MIN_UTILIZATION,
    RELATIVES,
    Profile,
    ProfileError,
    Rates,
    RowStep,
    load_profile,
    transferred_spread,
)

# From this share of the most that kernels reach, a class is taken to be bound by memory, or by the peak; below it by
# instructions.
BOUND_SHARE = 0.85
# Classes whose rates on Hopper say nothing of other machines, where different kernels run. Without portable rates of
# their own they have those of the nearest relative, as priors.
HOPPER_CLASSES = ("linear_int8", "sparse_attention", "two_bit_scan", "progressive_attention")
# Of these, those whose kernels on other machines run on Hopper too, for many query heads of a KV head: classes there.
SAME_ON_HOPPER = {"two_bit_scan": "two_bit_scan_wide", "progressive_attention": "progressive_attention_wide"}


@dataclass(frozen=True)
class _Limits:
    """A class's largest shares of bandwidth and peak, and the other machine's speeds relative to the calibrated one."""

    streaming: float
    peak: float
    bandwidth: float
    compute: float
    issue: float  # of instructions: SMs x clock
    clock: float  # of instructions of one SM

    def inverse_utilization(self, found: float) -> float:
        """The inverse utilization there of one whose inverse here is `found`."""
        bound_by_memory = found * self.streaming <= 1 / BOUND_SHARE
        reached = min(max(1 / self.streaming, found * self.bandwidth / self.issue), 1 / MIN_UTILIZATION)
        return min(found, reached) if bound_by_memory else reached

    def parts(self, found: Rates | RowStep) -> dict[str, Any]:
        """The times there of what instructions bind: per tile of one SM, and per output of all SMs."""
        times = {"tile_s": found.tile_s / self.clock, "width_s": found.width_s / self.issue}
        return {name: min(seconds, MAX_PART_S) for name, seconds in times.items()}

    def compute_utilization(self, found: float) -> float:
        """The share there of a share here. None gets smaller: kernels are written anew for higher peaks."""
        bound_by_peak = found >= BOUND_SHARE * self.peak
        return found if bound_by_peak else max(found, min(self.peak, found * self.issue / self.compute))


def transferred(profile: Profile, hardware: Hardware) -> Profile:
    """A profile's rates applied to another machine, marked as transferred and with a wider band."""
    classes = {
        name: replace(rates, spread=transferred_spread(rates.spread), source="transferred")
        for name, rates in transferred_classes(profile, hardware).items()
    }
    return replace(profile, hardware=hardware, classes=classes, source="transferred", transferred_from=profile.device)


def transferred_classes(profile: Profile, hardware: Hardware) -> dict[str, Rates]:
    """Rates of every class on `hardware`, by what would run and bind there.

    Machines without this package's Hopper kernels get the portable ones' rates, and none of HOPPER_CLASSES. What memory
    or the peak binds keeps its share of it. What instructions bind (unpacking codes, softmax, many rows per byte, tiles
    of outputs) keeps its speed per SM and clock, as far as memory and the peak allow. Launches, and chains of dependent
    steps, keep their time; so does the class "gap", which moves no bytes. Transfers to the host keep their share of the
    link.
    """
    source = profile.hardware
    classes = _running(profile, hardware)
    kernels = {name: rates for name, rates in classes.items() if name not in ("gap", *LINK_CLASSES)}
    peak = max(rates.compute_utilization for rates in kernels.values())
    bandwidth = hardware.bandwidth_bytes_per_s / source.bandwidth_bytes_per_s
    compute = hardware.compute_flops / source.compute_flops
    issue = _issue_ratio(source, hardware) or compute
    clock = issue * source.num_sms / hardware.num_sms
    limits = {name: _Limits(_streaming(name, kernels), peak, bandwidth, compute, issue, clock) for name in kernels}
    return {**classes, **{name: _transferred(rates, limits[name]) for name, rates in kernels.items()}}


def _running(profile: Profile, hardware: Hardware) -> Mapping[str, Rates]:
    """The rates here of the kernels that run there."""
    if hardware.has_hopper_kernels or not profile.hardware.has_hopper_kernels or not profile.portable:
        return profile.classes
    classes = profile.classes
    kept = {name: rates for name, rates in classes.items() if name not in HOPPER_CLASSES}
    same = {name: classes[there] for name, there in SAME_ON_HOPPER.items() if there in classes}
    return kept | same | dict(profile.portable)


def _issue_ratio(source: Hardware, target: Hardware) -> float:
    """Speed of instructions relative to the source's; 0 where a clock is unknown."""
    return target.issue_rate / source.issue_rate if source.issue_rate else 0.0


def _streaming(name: str, kernels: Mapping[str, Rates]) -> float:
    """The most of the bandwidth that a class can reach: what it, or one of its relatives, does."""
    found = [kernels[name].bandwidth_utilization]
    while name in RELATIVES:
        name = RELATIVES[name]
        found += [kernels[name].bandwidth_utilization] if name in kernels else []
    return min(1.0, max(found))


def _transferred(rates: Rates, limits: _Limits) -> Rates:
    measured = 1 / rates.bandwidth_utilization
    first = total = limits.inverse_utilization(measured)
    steps = []
    for step in rates.steps:
        measured += step.inverse_utilization
        reached = max(total, limits.inverse_utilization(measured))
        steps.append(replace(step, inverse_utilization=reached - total, **limits.parts(step)))
        total = reached
    return replace(
        rates,
        bandwidth_utilization=1 / first,
        compute_utilization=limits.compute_utilization(rates.compute_utilization),
        steps=tuple(steps),
        **limits.parts(rates),
    )


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
