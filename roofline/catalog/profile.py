"""Calibration profiles: how much of its datasheet a machine reaches, for each class of kernels.

`profile_for` finds a machine's profile, or transfers that of the nearest calibrated machine.

Utilizations are looked up, never invented. A class that a profile lacks uses the rates of its nearest relative, and
`source` then says "prior".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from ridgeplan.roofline.catalog import validation as check
from ridgeplan.roofline.catalog.files import (
    cache_folder,
    fields_of_schema,
    json_or,
    naming_file,
    parse_toml,
    read_document,
    replacing,
)
from ridgeplan.roofline.catalog.hardware import Hardware
from ridgeplan.roofline.catalog.validation import Checked, build

PROFILE_SCHEMA = 3
# From strongest to weakest. "extrapolated" is a prediction outside the data that it was fitted to.
SOURCES = ("measured", "calibrated", "transferred", "published", "extrapolated", "prior")
RECALIBRATE = "make it again with `ridgeplan calibrate`"

# Classes of kernels that move bytes over the link to the host: copies of whole layers, gathers of chosen tokens, and
# writes.
LINK_CLASSES = ("host_copy", "host_gather", "host_store")

# For a class that a profile lacks: the class with the most similar access pattern, whose rates it uses.
RELATIVES: Mapping[str, str] = parse_toml(read_document(Path(__file__).with_name("relatives.toml")))
# Classes whose kernels are Triton's on every machine: without rates of their own they have those of related kernels
# that run on every machine as well, not those of Hopper's.
TRITON_CLASSES = ("grouped_linear", "attention_mla", "linear_stored")
# On a CPU products with stored weights decode a copy: about 5 times the time of dense float32 ones, which read 6 times
# the bytes (two EPYC cores, 4096 x 4096, one row: 0.8 times for Q8_0, 4.8 to 5.1 for 4 bits, 7.2 to 8.1 for 5 and 6; a
# model in Q4_K_M 5.3).
STORED_SHARE_ON_CPU = 1 / 26

# What routed experts take beyond a dense product of their bytes, as they are several kernels: in steps of Qwen3-30B-A3B
# in 16 bits 13 to 16 us per layer on an H200, in 4 and 8 bits 6 to 19 us at one row (docs/kernels/experts.md). Of it,
# the router's product in float32 and the choice, which calibration does not time with the experts.
ROUTED_S, ROUTER_S = 15e-6, 7e-6

# How much the band widens, in relative time, for rates of another class or machine. A prior.
TRANSFER_SPREAD = 0.2
MAX_SPREAD = 10.0
DISTURBED_SPREAD = 0.4  # an undisturbed CPU's classes have one of 0.1 at the median
MIN_UTILIZATION = 1e-9
MAX_PART_S = 1.0  # of a launch, an output or a step of a chain
MAX_UTILIZATION = 4.0  # above 1 where a cache serves part of the bytes
MAX_ROW_STEPS = 9


class ProfileError(ValueError):
    """A profile that is missing, damaged, of another schema, or has a figure out of range."""


@dataclass(frozen=True)
class RowStep(Checked):
    """What a call with more than `above_rows` rows takes beyond one with fewer: none of it can be negative.

    Rows are those of a product's input, or an attention's query rows per KV head (queries x query heads of a group).
    Kernels process them in tiles, so time grows in steps. Fields as in `Rates`; inverse_utilization is added to the
    inverse of its bandwidth utilization.
    """

    error = ProfileError
    above_rows: int = check.whole(1, 1 << 20)
    launch_s: float = check.number(0, MAX_PART_S, default=0.0)
    inverse_utilization: float = check.number(0, 1 / MIN_UTILIZATION, default=0.0)
    tile_s: float = check.number(0, MAX_PART_S, default=0.0)
    fill_s: float = check.number(0, MAX_PART_S, default=0.0)
    width_s: float = check.number(0, MAX_PART_S, default=0.0)
    depth_s: float = check.number(0, MAX_PART_S, default=0.0)


@dataclass(frozen=True)
class Rates(Checked):
    """What one class of kernels reaches for one row; `steps` say what more rows add.

    time = launch_s + fill x fill_s + hypot(max(bytes / (bandwidth x u), FLOPs / (peak x v)), tiles x tile_s)
    + width x width_s + depth x depth_s.
    tiles: what each SM works on, `ridgeplan.roofline.execution.product_tiles` and `attention_tiles` over the SMs. Their
    instructions overlap with the reading of others, so the longer of the two counts most. fill: tiles / FULL_TILES, at
    most 1: how far pipelines are filled, and partial results of splits are merged.
    width: outputs of a product, (batch row, KV head) pairs of an attention, rows of logits that are sampled from: what
    takes time of its own, however few bytes it reads. depth: inputs of a product, tokens of an attention, queries that
    are verified: the length of each output's chain.
    `spread` is the relative standard deviation of the fit's residuals.
    """

    error = ProfileError
    bandwidth_utilization: float = check.number(MIN_UTILIZATION, MAX_UTILIZATION)
    compute_utilization: float = check.number(MIN_UTILIZATION, MAX_UTILIZATION)
    launch_s: float = check.number(0, MAX_PART_S)
    spread: float = check.number(0, MAX_SPREAD)
    source: str = check.one_of(SOURCES, default="calibrated")
    tile_s: float = check.number(0, MAX_PART_S, default=0.0)
    fill_s: float = check.number(0, MAX_PART_S, default=0.0)
    width_s: float = check.number(0, MAX_PART_S, default=0.0)
    depth_s: float = check.number(0, MAX_PART_S, default=0.0)
    steps: tuple[RowStep, ...] = check.parts(RowStep, default=())

    def _contradiction(self) -> str | None:
        above = [step.above_rows for step in self.steps]
        if len(above) > MAX_ROW_STEPS or sorted(set(above)) != above:
            return f"steps rise from {above}; allowed: at most {MAX_ROW_STEPS} of rising above_rows"
        return None


NO_GAP = Rates(1.0, 1.0, 0.0, 0.0)


@dataclass(frozen=True)
class Profile(Checked):
    """Calibrated rates of one machine. `hardware` holds its figures, so a profile fully describes a machine.

    `pass_dispatch_s` and `layer_dispatch_s` are the host's time to launch one decode pass and one layer of it,
    `prefill_layer_dispatch_s` one layer of a prefill. `asynchronous`: the device works meanwhile, so the slower of the
    two counts. The class `gap` is what a layer of a decode pass takes on the device beyond the sum of its kernels,
    `draft_gap_s` and `target_gap_s` what a draft's pass and the target's take, `round_s` what a round takes beyond its
    passes: small operations, and waits between kernels.
    `portable` holds rates of the kernels that run where this machine's own cannot (Triton's and libraries', on GPUs
    older than Hopper). `acceptance` holds rows for `ridgeplan.planner.acceptance`.
    """

    error = ProfileError
    hardware: Hardware = check.part(Hardware, required=True)
    device: str = check.text()
    software: Mapping[str, str] = check.texts_by_name()
    date: str = check.text()
    classes: Mapping[str, Rates] = check.parts_by_name(Rates)
    pass_dispatch_s: float = check.number(0, 10, default=0.0)
    layer_dispatch_s: float = check.number(0, 10, default=0.0)
    prefill_layer_dispatch_s: float = check.number(0, 10, default=0.0)
    asynchronous: bool = check.flag(True)
    draft_gap_s: float = check.number(0, 1, default=0.0)
    target_gap_s: float = check.number(0, 1, default=0.0)
    round_s: float = check.number(0, 1, default=0.0)
    portable: Mapping[str, Rates] = check.parts_by_name(Rates, default_factory=dict)
    host_link_utilization: float = check.number(1e-9, 10, default=1.0)
    source: str = check.one_of(SOURCES, default="calibrated")
    transferred_from: str = check.text("")
    acceptance: tuple[Mapping[str, Any], ...] = check.tables()

    @property
    def disturbed(self) -> bool:
        """Whether other programs made half of the calibrated classes' bands wider than DISTURBED_SPREAD."""
        return bool(self.classes) and median(each.spread for each in self.classes.values()) > DISTURBED_SPREAD

    def rates(self, kind: str) -> Rates:
        """Rates of a kernel class, or of its nearest relative that has any. Raises ProfileError if none has."""
        if kind == "gap" and kind not in self.classes:
            return NO_GAP
        if kind == "linear_stored" and self.hardware.kind == "cpu" and kind not in self.classes:
            dense = self.rates("linear")
            share = max(dense.bandwidth_utilization * STORED_SHARE_ON_CPU, MIN_UTILIZATION)
            spread = transferred_spread(dense.spread)
            return replace(dense, bandwidth_utilization=share, spread=spread, source="prior", steps=())
        # Other GPUs have portable kernels' rates in their classes.
        portable = self.portable if kind in TRITON_CLASSES and self.hardware.has_hopper_kernels else {}
        name = kind
        while name not in self.classes:
            if name not in RELATIVES:
                raise ProfileError(f"profile of {self.device} has no rates for {kind!r} or a related class")
            name = RELATIVES[name]
        rates, routes = self.classes[name], kind.startswith("grouped")
        if name == kind:
            return replace(rates, launch_s=min(rates.launch_s + ROUTER_S, MAX_PART_S)) if routes else rates
        rates = portable.get(name, rates)
        launch_s = min(rates.launch_s + (ROUTED_S if routes else 0), MAX_PART_S)
        return replace(rates, launch_s=launch_s, spread=transferred_spread(rates.spread), source="prior")

    def to_json(self) -> str:
        """JSON text that `Profile.from_json` reads back to an equal profile."""
        return json.dumps({"schema": PROFILE_SCHEMA, **asdict(self)}, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Profile:
        """Parse and validate untrusted JSON. Raises ProfileError, one line that lists what is wrong."""
        return cls.from_dict(json_or(ProfileError, text, "a JSON profile"))

    @classmethod
    def from_dict(cls, document: object) -> Profile:
        """Validate parsed JSON that is not trusted. Raises ProfileError."""
        data = fields_of_schema(document, PROFILE_SCHEMA, RECALIBRATE, ProfileError)
        # Code may omit fields with defaults; a file that lacks a field is damaged.
        missing = [item.name for item in fields(cls) if item.name not in data]
        if missing:
            raise ProfileError(f"{', '.join(missing)} is missing; {RECALIBRATE}")
        return build(cls, data)


def load_profile(path: str | Path) -> Profile:
    """A profile from a file. Raises ProfileError naming the file."""
    with naming_file("profile", path, ProfileError):
        return Profile.from_json(read_document(Path(path)))


def save_profile(profile: Profile, path: str | Path | None = None) -> Path:
    """Writes `profile` as JSON, completely or not at all; by default to the path that `gpu="auto"` reads."""
    target = Path(path) if path is not None else user_profile_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as staging:
        staging.write_text(profile.to_json() + "\n", encoding="utf-8")
    return target


def transferred_spread(spread: float) -> float:
    """The spread of rates taken from another class or machine."""
    return min(spread + TRANSFER_SPREAD, MAX_SPREAD)


# From this share of the most that kernels reach, a class is taken to be bound by memory, or by the peak; below it by
# instructions.
BOUND_SHARE = 0.85
# Classes whose rates on Hopper say nothing of other machines, where different kernels run. Without portable rates of
# their own they have those of the nearest relative, as priors.
HOPPER_CLASSES = (
    "linear_int8", "linear_int8_integer", "linear_int4_integer", "grouped_linear_int8", "grouped_linear_int4",
    "sparse_attention", "two_bit_scan", "progressive_attention",
)  # fmt: skip
# Of these, those whose kernels on other machines run on Hopper too, or are like one that does: classes there.
SAME_ON_HOPPER: Mapping[str, str] = parse_toml(read_document(Path(__file__).with_name("before_hopper.toml")))


@dataclass(frozen=True)
class _Limits:
    """A class's largest shares of bandwidth and peak, and the other machine's speeds relative to the calibrated one."""

    streaming: float
    peak: float
    bandwidth: float
    compute: float
    issue: float  # of instructions: SMs x clock
    clock: float  # of instructions of one SM

    def inverse_utilization(self, inverse: float) -> float:
        """The inverse utilization there of one whose inverse here is `inverse`."""
        bound_by_memory = inverse * self.streaming <= 1 / BOUND_SHARE
        reached = min(max(1 / self.streaming, inverse * self.bandwidth / self.issue), 1 / MIN_UTILIZATION)
        return min(inverse, reached) if bound_by_memory else reached

    def parts(self, rates: Rates | RowStep) -> dict[str, Any]:
        """The times there of what instructions bind: per tile of one SM, and per output of all SMs."""
        times = {"tile_s": rates.tile_s / self.clock, "width_s": rates.width_s / self.issue}
        return {name: min(seconds, MAX_PART_S) for name, seconds in times.items()}

    def compute_utilization(self, share: float) -> float:
        """What `share` of the peak here becomes there. It never shrinks: higher peaks get new kernels."""
        bound_by_peak = share >= BOUND_SHARE * self.peak
        return share if bound_by_peak else max(share, min(self.peak, share * self.issue / self.compute))


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
    utilizations = [kernels[name].bandwidth_utilization]
    while name in RELATIVES:
        name = RELATIVES[name]
        utilizations += [kernels[name].bandwidth_utilization] if name in kernels else []
    return min(1.0, max(utilizations))


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


def _distance(first: Hardware, second: Hardware) -> float:
    ridge = abs(math.log2(first.ridge_point / second.ridge_point))
    return ridge + abs(math.log2(first.bandwidth_bytes_per_s / second.bandwidth_bytes_per_s))
