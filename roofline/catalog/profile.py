"""Calibration profiles: how much of its datasheet a machine reaches, per class of kernel, and where that is from.

Utilizations are looked up, never invented. A class that a profile lacks is taken from its nearest relative, a
machine without a profile takes those of the nearest calibrated one, and both say so in `source`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog.checks import InvalidField, brief
from ridgeplan.roofline.catalog.hardware import FIGURES, Hardware

PROFILE_SCHEMA = 2  # 1 rated the merge of split-KV attention apart
_SHIPPED = Path(__file__).with_name("profiles")
SOURCES = ("measured", "calibrated", "transferred", "published", "prior")  # from strongest to weakest

# Where a class has no figure of its own: the class whose access pattern is nearest.
RELATIVES = {
    "linear_int8": "linear_int4",
    "linear_int4": "linear",
    "head": "linear",
    "attention_int8_d64": "attention_int8",
    "attention_int4_d64": "attention_int4",
    "attention_d64": "attention",
    "attention_int8": "attention_int4",
    "attention_int4": "attention",
    "attention": "linear",
    "rope": "elementwise",
    "quantize": "elementwise",
    "sampling": "elementwise",
    "gather": "attention",
    "prefill_attention": "prefill_linear",
    "prefill_linear": "linear",
}
# How much wider the band of a transferred or related class is, in relative time. A prior, not a measurement.
TRANSFER_SPREAD = 0.2


class ProfileError(ValueError):
    """A profile that is missing, damaged, of a newer schema or has a figure out of range."""


@dataclass(frozen=True)
class Rates:
    """What one class of kernels reaches: time = launch_s + max(bytes / (bandwidth x u), FLOPs / (peak x u)).

    `spread` is the relative standard deviation of the fit's residuals.
    """

    bandwidth_utilization: float
    compute_utilization: float
    launch_s: float
    spread: float
    source: str = "calibrated"

    def __post_init__(self) -> None:
        for name, high in (("bandwidth_utilization", 4), ("compute_utilization", 4)):
            _require_number(name, getattr(self, name), 1e-9, high)
        _require_number("launch_s", self.launch_s, 0, 1)
        _require_number("spread", self.spread, 0, 10)
        if self.source not in SOURCES:
            raise ProfileError(f"source is {brief(self.source)}; allowed: {', '.join(SOURCES)}")


@dataclass(frozen=True)
class Profile:
    """Calibrated rates of one machine. `hardware` holds its figures, so a profile stands for a machine by itself.

    `pass_dispatch_s` and `layer_dispatch_s` are what the host spends to issue one decode pass and one layer of it,
    `prefill_layer_dispatch_s` one layer of a prefill; `asynchronous` says whether the device works meanwhile, so that
    the slower of both counts.
    """

    hardware: Hardware
    device: str
    software: Mapping[str, str]
    date: str
    classes: Mapping[str, Rates]
    pass_dispatch_s: float = 0.0
    layer_dispatch_s: float = 0.0
    prefill_layer_dispatch_s: float = 0.0
    asynchronous: bool = True
    host_link_utilization: float = 1.0
    source: str = "calibrated"
    transferred_from: str = ""
    acceptance: tuple[Mapping[str, Any], ...] = field(default=())

    def rates(self, kind: str) -> Rates:
        """Rates of a kernel class, or of its nearest relative that has any. Raises ProfileError if none has."""
        name, borrowed = kind, False
        while name not in self.classes:
            if name not in RELATIVES:
                raise ProfileError(f"profile of {self.device} has no rates for {kind!r} or a related class")
            name, borrowed = RELATIVES[name], True
        found = self.classes[name]
        if not borrowed:
            return found
        return replace(found, spread=found.spread + TRANSFER_SPREAD, source="prior")

    def transferred_to(self, hardware: Hardware) -> Profile:
        """These rates applied to another machine's figures, marked and with a wider band."""
        classes = {
            name: replace(rates, spread=rates.spread + TRANSFER_SPREAD, source="transferred")
            for name, rates in self.classes.items()
        }
        return replace(self, hardware=hardware, classes=classes, source="transferred", transferred_from=self.device)

    def to_json(self) -> str:
        """JSON text that `Profile.from_json` reads back to an equal profile."""
        data = {
            "schema": PROFILE_SCHEMA,
            "device": self.device,
            "date": self.date,
            "software": dict(self.software),
            "hardware": {**_plain(self.hardware), "sources": dict(self.hardware.sources)},
            "pass_dispatch_s": self.pass_dispatch_s,
            "layer_dispatch_s": self.layer_dispatch_s,
            "prefill_layer_dispatch_s": self.prefill_layer_dispatch_s,
            "asynchronous": self.asynchronous,
            "host_link_utilization": self.host_link_utilization,
            "classes": {name: asdict(rates) for name, rates in self.classes.items()},
            "acceptance": [dict(row) for row in self.acceptance],
        }
        return json.dumps(data, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Profile:
        """Parse and validate untrusted JSON. Raises ProfileError naming what is wrong."""
        try:
            data = json.loads(text, parse_constant=_reject_constant)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProfileError(f"not a JSON profile: {error}") from error
        _require(isinstance(data, dict), "a profile is a JSON object")
        schema = data.get("schema")
        _require(type(schema) is int, f"profile schema is {brief(schema)}; allowed: {PROFILE_SCHEMA}")
        _require(
            schema <= PROFILE_SCHEMA,
            f"profile schema {schema} is newer than this version reads; allowed: up to {PROFILE_SCHEMA}",
        )
        _require(
            schema == PROFILE_SCHEMA,
            f"profile schema {schema} is older than this version reads; allowed: {PROFILE_SCHEMA}; "
            "make it again with `ridgeplan calibrate`",
        )
        try:
            return cls._from_fields(data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ProfileError(
                f"lacks or garbles a field: {error}; make it again with `ridgeplan calibrate`"
            ) from error
        except InvalidField as error:
            raise ProfileError(str(error)) from error

    @classmethod
    def _from_fields(cls, data: dict[str, Any]) -> Profile:
        for name in ("pass_dispatch_s", "layer_dispatch_s", "prefill_layer_dispatch_s", "host_link_utilization"):
            _require_number(name, data[name], 0, 10)
        _require(isinstance(data["asynchronous"], bool), "asynchronous must be true or false")
        hardware = dict(data["hardware"])
        hardware["aliases"] = tuple(hardware.get("aliases", ()))
        return cls(
            hardware=Hardware(**hardware),
            device=str(data["device"]),
            software={str(key): str(value) for key, value in data["software"].items()},
            date=str(data["date"]),
            classes={str(name): Rates(**rates) for name, rates in data["classes"].items()},
            pass_dispatch_s=data["pass_dispatch_s"],
            layer_dispatch_s=data["layer_dispatch_s"],
            prefill_layer_dispatch_s=data["prefill_layer_dispatch_s"],
            asynchronous=data["asynchronous"],
            host_link_utilization=data["host_link_utilization"],
            acceptance=tuple(dict(row) for row in data.get("acceptance", ())),
        )


def load_profile(path: str | Path) -> Profile:
    """A profile from a file. Raises ProfileError naming the file."""
    try:
        return Profile.from_json(Path(path).read_bytes())
    except OSError as error:
        raise ProfileError(f"cannot read profile {str(path)!r}: {error.strerror}") from error
    except ProfileError as error:
        raise ProfileError(f"profile {str(path)!r}: {error}") from error


def shipped_profiles() -> tuple[Profile, ...]:
    """The calibrated profiles that come with the package."""
    return tuple(load_profile(path) for path in sorted(_SHIPPED.glob("*.json")))


def user_profile_path() -> Path:
    """Where `ridgeplan calibrate` saves this machine's profile and `gpu="auto"` looks for it."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache, "ridgeplan", "profile.json")


def profile_for(hardware: Hardware, calibrated: tuple[Profile, ...]) -> Profile:
    """The profile of `hardware` among `calibrated`, or that of the nearest machine, marked as transferred.

    Nearest is the smallest distance of ridge point and bandwidth in octaves among machines of the same kind.
    Raises ProfileError where there is none.
    """
    for profile in calibrated:
        if profile.hardware.name == hardware.name:
            return profile
    alike = [profile for profile in calibrated if profile.hardware.kind == hardware.kind]
    if not alike:
        raise ProfileError(
            f"no calibrated profile of a {hardware.kind} to predict {hardware.name} from; "
            "run `ridgeplan calibrate` on one"
        )
    return min(alike, key=lambda profile: _distance(profile.hardware, hardware)).transferred_to(hardware)


def _distance(one: Hardware, other: Hardware) -> float:
    ridge = abs(math.log2(one.ridge_point / other.ridge_point))
    return ridge + abs(math.log2(one.bandwidth_bytes_per_s / other.bandwidth_bytes_per_s))


def _plain(hardware: Hardware) -> dict[str, Any]:
    names = (*FIGURES, "name", "kind", "compute_capability", "element_bytes", "aliases", "note")
    return {name: getattr(hardware, name) for name in names}


def _reject_constant(name: str) -> Any:
    raise ProfileError(f"number {name} in a profile; allowed: finite numbers")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ProfileError(message)


def _require_number(name: str, value: object, low: float, high: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    _require(number and low <= value <= high, f"{name} is {brief(value)}; allowed: {low:g} to {high:g}")  # type: ignore[operator]
