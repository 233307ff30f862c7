"""The question to the planner: model, machine, workload, limits and objective, resolved and checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

import numpy as np

from ridgeplan.planner.capacity import HOST_MEMORY_BYTES, MEMORY_UTILIZATION, usable_bytes, usable_host_bytes
from ridgeplan.planner.quality import Quality, losses, quality_of
from ridgeplan.planner.quantities import size_bytes, size_text, tokens
from ridgeplan.planner.resolution import resolve, workload_for
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import KVFormat, Plan, Workload, require
from ridgeplan.roofline.plan.support import Backend, as_loaded, is_converted, missing_architecture, unsupported

Choice = TypeVar("Choice", bound=StrEnum)


class Objective(StrEnum):
    """What is minimized: time per token, time of the whole request, or peak memory."""

    LATENCY = "latency"
    TOTAL = "total"
    MEMORY = "memory"


@dataclass(frozen=True)
class Question:
    """The inputs of a search. kv_format: the only one that is wanted, None for any.

    yarn: contexts beyond the model's limit are reached by YaRN, where others than the workload's are asked for too.
    """

    shape: ModelShape
    profile: Profile
    workload: Workload
    quality: Quality
    objective: Objective
    memory_limit_bytes: float
    backend: Backend = Backend.RIDGEPLAN
    kv_format: KVFormat | None = None
    offload: bool = True  # plans may leave KV on the host
    yarn: bool = False
    host_limit_bytes: float = HOST_MEMORY_BYTES  # of the host, for layers that plans leave there

    def misfit(self, peak_bytes: float, host_bytes: float) -> str | None:
        """Which memory is not enough for a plan that takes so much of the device and of the host; None if both are."""
        if peak_bytes > self.memory_limit_bytes:
            return f"does not fit: needs {size_text(peak_bytes)} of {size_text(self.memory_limit_bytes)}"
        if host_bytes > self.host_limit_bytes:
            return f"does not fit the host: needs {size_text(host_bytes)} of {size_text(self.host_limit_bytes)} there"
        return None

    def fitting(self, peak_bytes: np.ndarray, host_bytes: np.ndarray) -> np.ndarray:
        """Which of several plans have no misfit."""
        return np.asarray((peak_bytes <= self.memory_limit_bytes) & (host_bytes <= self.host_limit_bytes))

    def unwanted(self, plan: Plan) -> str | None:
        """Why a plan is no answer, on whatever backend; None if it may be one."""
        if not self.quality.allows(quality_of(plan)):
            return f"quality: {'; '.join(losses(plan))}"
        if self.kv_format not in (None, plan.kv.format):
            return f"KV format: {plan.kv.format.value}, not {self.kv_format.value}"
        return None

    def unsupported(self, plan: Plan) -> str | None:
        """What the backend lacks to execute a plan, or the profile to price it; None if nothing."""
        return unsupported(plan, self.backend, self.shape, self.profile)

    @cached_property
    def machine(self) -> Machine:
        """The profile's machine with the memory limit."""
        return replace(Machine.of(self.profile), memory_bytes=self.memory_limit_bytes)

    def notes(self, memory_limit: float | str | None = None) -> Iterator[str]:
        """Caveats of any answer; memory_limit: the one that was asked for."""
        return notes(self.shape, self.profile, self.workload, _bytes(memory_limit), self.memory_limit_bytes)

    @property
    def as_executed(self) -> Question:
        """The same for the weights that the runtime holds, which converts some formats when it loads them."""
        return replace(self, shape=as_loaded(self.shape)) if is_converted(self.shape) else self


def ask(
    model: str | ModelShape,
    gpu: str,
    context: int | str,
    *,
    batch: int = 1,
    new_tokens: int = 1024,
    quality: str = "near-lossless",
    objective: str = "latency",
    memory_limit: float | str | None = None,
    memory_utilization: float = MEMORY_UTILIZATION,
    profile: Profile | str | None = None,
    acceptance: str | None = None,
    yarn: bool = False,
    backend: str = "ridgeplan",
    kv_format: str | None = None,
    offload: bool = True,
    host_memory: float | str | None = None,
) -> Question:
    """A question from what a user gives, as `recommend` documents it. Raises ValueErrors that name what is wrong."""
    wanted, aim = choice(Quality, "quality", quality), choice(Objective, "objective", objective)
    runs_on = choice(Backend, "backend", backend)
    only = None if kv_format is None else choice(KVFormat, "kv_format", kv_format)
    shape, used = resolve(model, gpu, profile, acceptance)
    workload = workload_for(shape, used, tokens(context), new_tokens, batch, yarn=yarn)
    limit = usable_bytes(used.hardware.memory_bytes, memory_utilization, _bytes(memory_limit))
    own = gpu == "auto" and profile is None
    host_limit = usable_host_bytes(_bytes(host_memory), memory_utilization, own=own)
    return Question(shape, used, workload, wanted, aim, limit, runs_on, only, offload, yarn, host_limit)


def _bytes(limit: float | str | None) -> float | None:
    return size_bytes(limit) if isinstance(limit, str) else limit


def choice(kind: type[Choice], name: str, value: str) -> Choice:
    """The member of an enum by its value. Raises PlanError."""
    allowed = [str(member) for member in kind]
    require(value in allowed, f"{name} is {brief(value)}; allowed: {', '.join(allowed)}")
    return kind(value)


def notes(
    shape: ModelShape, profile: Profile, workload: Workload, memory_limit: float | None = None, usable: float = 0
) -> Iterator[str]:
    """Caveats of any prediction for this model, machine and workload, and of a memory limit that was asked for."""
    missing = missing_architecture(shape)
    if missing:
        yield missing
    elif is_converted(shape):
        stored = shape.weight_bits.format
        yield f"weights stored as {stored} are decoded and held in the plan's format"
    if workload.yarn_factor > 1:
        yield f"rotary embeddings are stretched {workload.yarn_factor:g}x by YaRN"
    elif workload.final_context > shape.max_context:
        yield f"{workload.final_context} tokens exceed the model's limit of {shape.max_context}; YaRN stretches it"
    if profile.hardware.is_amd:
        yield f"{profile.hardware.name} is an AMD GPU, on which this package's kernels have not run"
    if profile.transferred_from:
        yield f"{profile.hardware.name} is not calibrated: utilizations are those of {profile.transferred_from}"
    if memory_limit is not None and memory_limit > usable:
        yield (
            f"the memory limit of {size_text(memory_limit)} is more than {profile.hardware.name} may use, "
            f"{size_text(usable)} of {size_text(profile.hardware.memory_bytes)}"
        )
