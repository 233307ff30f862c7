"""From what a user names (a model, a GPU, a profile) to a model shape and a calibration profile."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from ridgeplan.planner.acceptance.drafter_rows import load_drafter_rows
from ridgeplan.planner.acceptance.rows import AcceptanceRow, load_rows, merged, saved_or_empty
from ridgeplan.planner.quantities import tokens_text
from ridgeplan.roofline.catalog.files import existing_path
from ridgeplan.roofline.catalog.hardware import detect_hardware, load_hardware
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import (
    Profile,
    ProfileError,
    load_profile,
    profile_for,
    shipped_profiles,
    user_acceptance_path,
    user_profile_path,
)
from ridgeplan.roofline.catalog.validation import together
from ridgeplan.roofline.plan.plan import MAX_TOKENS, MAX_YARN_FACTOR, Workload, require

Row = TypeVar("Row")


def resolve(
    model: str | ModelShape, gpu: str, profile: Profile | str | Path | None = None, acceptance: str | Path | None = None
) -> tuple[ModelShape, Profile]:
    """The model's shape and the profile to predict with.

    "auto" is this machine: the profile saved by `ridgeplan calibrate` if there is one, else its GPU by name.
    acceptance: a file of `ridgeplan acceptance`, by default the one that it saved, if any; its rows join the profile's.
    Raises UnknownModel, BadModelFile, UnknownHardware, BadHardwareFile, ProfileError or PlanError, or Mistakes
    where both are wrong (all ValueError).
    """
    shape, machine = together(
        [lambda: model if isinstance(model, ModelShape) else load_shape(model),
         lambda: _machine(gpu, profile, acceptance)]
    )  # fmt: skip
    return shape, machine


def _machine(gpu: str, profile: Profile | str | Path | None, acceptance: str | Path | None) -> Profile:
    """The profile to predict with, with the rows of acceptance."""
    user_profile = load_profile(profile) if isinstance(profile, (str, Path)) else profile
    if gpu == "auto":
        return with_rows(user_profile or _calibrated(), acceptance)
    hardware = load_hardware(gpu)
    return with_rows(profile_for(hardware, (user_profile,) if user_profile else shipped_profiles()), acceptance)


def with_rows(profile: Profile, path: str | Path | None = None) -> Profile:
    """The profile with the rows of a file of `ridgeplan acceptance`, by default the user's own if there is one.

    Raises PlanError for a damaged file; if it is the user's own, a warning names it.
    """
    saved = load_rows(path) if path else _saved_rows(load_rows)
    rows = merged(map(AcceptanceRow.read, profile.acceptance), saved)
    return replace(profile, acceptance=tuple(map(asdict, rows))) if saved else profile


def with_drafter_rows(workload: Workload, path: str | Path | None = None) -> Workload:
    """The workload with the file of `ridgeplan acceptance`, by default the user's own, if it has rows of its text.

    Raises PlanError for a damaged file; if it is the user's own, a warning names it.
    """
    rows = load_drafter_rows(path) if path else _saved_rows(load_drafter_rows)
    known = any(row.text == workload.text for row in rows if row.text)
    return replace(workload, drafter_rows=str(Path(path or user_acceptance_path()).absolute()) if known else "")


def _saved_rows(load: Callable[[Path], tuple[Row, ...]]) -> tuple[Row, ...]:
    """The rows that `ridgeplan acceptance` saved, if there are any."""
    return saved_or_empty(user_acceptance_path, load, "acceptance is predicted without what was measured here")


class NotCalibrated(ProfileError):
    """This machine is neither calibrated nor in the catalog."""


def this_machine(threads: int | None = None) -> Profile:
    """The profile of this machine, with the rows that `ridgeplan acceptance` saved.

    threads: as for `profile_path`. Raises NotCalibrated where there is none, and ProfileError for a damaged one.
    """
    return with_rows(_calibrated(threads))


def profile_path(threads: int | None = None) -> Path:
    """The file of this machine's calibration; of one with fewer `threads` than all of a CPU, a file beside it."""
    path = user_profile_path()
    return path if threads is None else path.with_stem(f"{path.stem}-{threads}-threads")


def _calibrated(threads: int | None = None) -> Profile:
    fewer = () if threads else range(os.cpu_count() or 1, 0, -1)  # which say more of a CPU than nothing
    for count in (threads, *fewer):
        if saved := existing_path(str(profile_path(count))):
            return load_profile(saved)
    name = detect_hardware()
    if name is None:
        raise NotCalibrated(
            "this machine is neither calibrated nor in the catalog: run `ridgeplan calibrate --quick`, "
            "or name a GPU or a profile"
        )
    return profile_for(load_hardware(name), shipped_profiles())


def workload_for(
    shape: ModelShape, profile: Profile, context: int, new_tokens: int, batch: int, *, yarn: bool
) -> Workload:
    """A validated workload; with `yarn`, RoPE is scaled in steps of 0.5 to reach its context.

    Raises PlanError, also for a context beyond the model's limit without YaRN.
    """
    workload = Workload(shape.name, profile.hardware.name, context, new_tokens, batch)
    factor = yarn_factor(shape, workload.final_context)
    if not yarn or factor == 1:
        return within_context(workload, shape)
    require(
        factor <= MAX_YARN_FACTOR,
        f"context {tokens_text(context)} is {factor:g}x the model's {tokens_text(shape.trained_context)}; "
        f"allowed: up to {MAX_YARN_FACTOR}x with YaRN",
    )
    return Workload(shape.name, profile.hardware.name, context, new_tokens, batch, factor)


def within_context(workload: Workload, shape: ModelShape) -> Workload:
    """The workload itself. Raises PlanError for a prompt beyond the model's context, as RoPE is scaled in it."""
    limit = int(workload.yarn_factor * shape.max_context)
    stretched = f", stretched {workload.yarn_factor:g}x by YaRN" if workload.yarn_factor > 1 else ""
    require(
        workload.context <= limit,
        f"context {tokens_text(workload.context)} is beyond the limit of {shape.name}{stretched}; allowed: up to "
        f"{tokens_text(limit)}, or a plan with `yarn=True`, which stretches its rotary embedding",
    )
    return workload


def longest_context(shape: ModelShape, new_tokens: int, *, yarn: bool) -> int:
    """The longest context that a workload may have."""
    reached = max(MAX_YARN_FACTOR * shape.trained_context - new_tokens, 1) if yarn else shape.max_context
    return min(reached, MAX_TOKENS)


def yarn_factor(shape: ModelShape, tokens: int) -> float:
    """YaRN's factor for sequences of that length, in steps of 0.5; 1 within the model's limit."""
    return math.ceil(2 * tokens / shape.trained_context) / 2 if tokens > shape.max_context else 1.0
