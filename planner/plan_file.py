"""Plan files: a plan together with what is needed to load it again.

A plan names its model and its machine. Where no catalog knows them (a GGUF file, a TOML file, this machine as
calibrated), its file also holds the model's shape and the machine's profile, as "specs" beside the plan's axes. They
also name the engine that the plan was chosen for, where it is another than this package's runtime.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ridgeplan.planner.resolution import resolve, with_rows, within_context
from ridgeplan.roofline.catalog.files import parse_json
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import list_models, load_shape
from ridgeplan.roofline.catalog.profile import PROFILE_SCHEMA, Profile
from ridgeplan.roofline.catalog.sharding import ShardedShape
from ridgeplan.roofline.catalog.validation import brief, build
from ridgeplan.roofline.plan.plan import Plan, PlanError, require
from ridgeplan.roofline.plan.support import Backend

SPECS = ("model", "profile", "backend")


@dataclass(frozen=True)
class SavedPlan:
    """A plan from a file. shape and profile: what the file says of its model and its machine, None where catalogs do.

    backend: the engine that the plan was chosen for.

    All commands that read plans resolve them in this way, so that a plan means the same to each.
    """

    plan: Plan
    shape: ModelShape | None = None
    profile: Profile | None = None
    backend: Backend = Backend.RIDGEPLAN

    def to_json(self) -> str:
        """The file's text, which `read_plan` and `Plan.from_json` read."""
        specs: dict[str, Any] = {}
        if self.shape is not None:
            specs["model"] = asdict(self.shape)
        if self.profile is not None:
            specs["profile"] = {"schema": PROFILE_SCHEMA, **asdict(self.profile)}
        if self.backend is not Backend.RIDGEPLAN:
            specs["backend"] = self.backend
        document = self.plan.to_dict() | ({"specs": specs} if specs else {})
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    def resolve(
        self, model: str | ModelShape | None = None, gpu: str | None = None,
        profile: Profile | str | Path | None = None, acceptance: str | Path | None = None,
    ) -> tuple[ModelShape, Profile]:  # fmt: skip
        """Model and machine: those given, else the plan's own. Raises as `ridgeplan.planner.resolve` does."""
        named = self.plan.workload
        reference = model if model is not None else self.shape or named.model
        if gpu is None and profile is None and self.profile is not None:
            shape = reference if isinstance(reference, ModelShape) else load_shape(reference)
            return shape, with_rows(self.profile, acceptance)
        return resolve(reference, named.hardware if gpu is None else gpu, profile, acceptance)

    def on(self, shape: ModelShape, profile: Profile) -> Plan:
        """The plan for this model and machine. Raises PlanError where its context is beyond the model's."""
        workload = replace(self.plan.workload, model=shape.name, hardware=profile.hardware.name)
        return replace(self.plan, workload=within_context(workload, shape))


def plan_json(plan: Plan, shape: ModelShape, profile: Profile, backend: Backend = Backend.RIDGEPLAN) -> str:
    """The file of a plan for this model, machine and backend. Measured acceptance is the user's, not a plan's."""
    bare = replace(profile, acceptance=())
    shape = shape.whole if isinstance(shape, ShardedShape) else shape  # the plan has the degrees
    saved_shape = None if shape in list_models() else shape
    saved_profile = None if _by_name(plan.workload.hardware) == bare else bare
    return SavedPlan(plan, saved_shape, saved_profile, backend).to_json()


def read_plan(text: str | bytes) -> SavedPlan:
    """A plan's file, which is not trusted. Raises PlanError, one line."""
    plan = Plan.from_json(text)
    specs = parse_json(text).get("specs", {})
    known = isinstance(specs, dict) and set(specs) <= set(SPECS)
    require(known, f"specs is {brief(specs)}; allowed: an object with {' and '.join(SPECS)}")
    backend = specs.get("backend", Backend.RIDGEPLAN)
    require(backend in [*Backend], f"specs: backend is {brief(backend)}; allowed: {', '.join(Backend)}")
    try:
        shape = build(ModelShape, specs["model"], "specs: model: ") if "model" in specs else None
        profile = Profile.from_dict(specs["profile"]) if "profile" in specs else None
    except ValueError as error:
        raise PlanError(f"specs: {error}") from None
    return SavedPlan(plan, shape, profile, Backend(backend))


def _by_name(gpu: str) -> Profile | None:
    """The profile that a GPU's name stands for, without rows of acceptance; None where it stands for none."""
    try:
        return replace(resolve(list_models()[0], gpu)[1], acceptance=())
    except ValueError:
        return None
