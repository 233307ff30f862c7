"""What is asked of a search: model, machine, workload, and what a plan may take and give up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from ridgeplan.planner.capacity import MEMORY_UTILIZATION, usable_bytes
from ridgeplan.planner.plan import Workload, require
from ridgeplan.planner.quality import Quality
from ridgeplan.planner.resolution import resolve, workload_for
from ridgeplan.planner.support import as_loaded, missing_architecture
from ridgeplan.roofline.catalog.mistakes import brief
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.device import GIB
from ridgeplan.roofline.latency import Machine

Choice = TypeVar("Choice", bound=StrEnum)


class Objective(StrEnum):
    """What is minimized: time per token, time of the whole request, or peak memory."""

    LATENCY = "latency"
    TOTAL = "total"
    MEMORY = "memory"


@dataclass(frozen=True)
class Question:
    """The inputs of a search."""

    shape: ModelShape
    profile: Profile
    workload: Workload
    quality: Quality
    objective: Objective
    memory_limit_bytes: float
    offload: bool = True  # plans may leave KV on the host

    @property
    def machine(self) -> Machine:
        """The profile's machine with the memory limit."""
        return replace(Machine.of(self.profile), memory_bytes=self.memory_limit_bytes)

    @property
    def as_executed(self) -> Question:
        """The same for the weights that the runtime holds, which converts some formats when it loads them."""
        return replace(self, shape=as_loaded(self.shape)) if self.shape.weight_bits.converted else self


def ask(
    model: str | ModelShape,
    gpu: str,
    context: int,
    *,
    batch: int = 1,
    new_tokens: int = 1024,
    quality: str = "near-lossless",
    objective: str = "latency",
    memory_limit: float | None = None,
    memory_utilization: float = MEMORY_UTILIZATION,
    profile: Profile | str | None = None,
    acceptance: str | None = None,
    yarn: bool = False,
    offload: bool = True,
) -> Question:
    """A question from what a user gives, as `recommend` documents it. Raises ValueErrors that name what is wrong."""
    wanted, aim = choice(Quality, "quality", quality), choice(Objective, "objective", objective)
    shape, used = resolve(model, gpu, profile, acceptance)
    workload = workload_for(shape, used, context, new_tokens, batch, yarn=yarn)
    limit = usable_bytes(used.hardware.memory_bytes, memory_utilization, memory_limit)
    return Question(shape, used, workload, wanted, aim, limit, offload)


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
    elif shape.weight_bits.converted:
        stored = shape.weight_bits.format
        yield f"the runtime decodes this checkpoint's {stored} weights and holds them in the plan's format"
    if workload.yarn_factor > 1:
        yield f"rotary embeddings are stretched {workload.yarn_factor:g}x by YaRN"
    elif workload.final_context > shape.max_context:
        yield (
            f"{workload.final_context} tokens are beyond the model's limit of {shape.max_context}; "
            "ask for YaRN to stretch its rotary embedding"
        )
    if profile.transferred_from:
        yield f"{profile.hardware.name} is not calibrated: utilizations are those of {profile.transferred_from}"
    if memory_limit is not None and memory_limit > usable:
        yield (
            f"the memory limit of {memory_limit / GIB:.1f} GiB is more than {profile.hardware.name} may use, "
            f"{usable / GIB:.1f} GiB of {profile.hardware.memory_bytes / GIB:.1f}"
        )
