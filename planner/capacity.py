"""Whether a plan fits into the memory that is free, and the largest workload that would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ridgeplan.planner.lowering import strategy_of
from ridgeplan.planner.plan import MAX_BATCH, Plan, Workload
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile_lookup import shipped_profiles
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.memory import DRAFT_SWAP_PROMPT_TOKENS, uses_draft_swap
from ridgeplan.roofline.placement import MAX_LENGTH, resident_memory

GB = 1e9
ModelReference = str | ModelShape


@dataclass(frozen=True)
class Room:
    """What a device offers: bytes that are free, of a full-precision element, and its processors."""

    free_bytes: int
    element_bytes: int
    num_sms: int


def missing_memory(plan: Plan, model: ModelReference, room: Room) -> str | None:
    """Why the plan's workload does not fit into `room`, with the largest that would; None if it fits.

    Raises UnknownModel or BadModelFile (ValueErrors) for a model that cannot be read.
    """
    shape = model if isinstance(model, ModelShape) else load_shape(model)
    workload = plan.workload

    def needed(sized: Workload) -> float:
        return peak_bytes(replace(plan, workload=sized), shape, room)

    def fits(sized: Workload) -> bool:
        return needed(sized) <= room.free_bytes

    if fits(workload):
        return None

    def context_with(batch: int) -> int:
        longest = MAX_LENGTH - workload.new_tokens
        # Memory grows with the context but for where prompts begin to borrow, so a bisection starts there.
        return _largest(
            lambda tokens: fits(replace(workload, context=tokens, batch=batch)), longest, DRAFT_SWAP_PROMPT_TOKENS
        )

    options = _options(workload, context_with, _largest(lambda rows: fits(replace(workload, batch=rows)), MAX_BATCH))
    allowed = f"allowed: {', or '.join(options)}" if options else "no context fits with these formats"
    sizes = f"the plan needs {needed(workload) / GB:.1f} GB and {room.free_bytes / GB:.1f} GB are free"
    return f"{sizes}; {allowed}"


def swaps_draft_weights(plan: Plan) -> bool:
    """Whether on a GPU prompts of the plan take their long buffers from the memory of the draft's weights."""
    return plan.weights.draft_differs and bool(uses_draft_swap(plan.workload.context))


def peak_bytes(plan: Plan, shape: ModelShape, room: Room) -> float:
    """Predicted peak of weights, caches, buffers and workspaces, everything on the device."""
    # Rates do not matter to memory, so any profile's will do.
    any_device = replace(Machine.of(shipped_profiles()[0]), asynchronous=1)
    machine = replace(any_device, element_bytes=room.element_bytes, num_sms=room.num_sms)
    return float(resident_memory(shape, machine, strategy_of(plan, shape, machine, 1.0)).peak)


def _options(workload: Workload, context_with: Callable[[int], int], batch: int) -> list[str]:
    """The largest workloads that differ in one size; where none fits, in both."""

    def contexts(batch: int) -> list[str]:
        longest = context_with(batch)
        # Of a plan that does not fit, longer ones may only where their prompts borrow.
        first = f"from {DRAFT_SWAP_PROMPT_TOKENS}" if longest > workload.context else "up"
        return [f"context {first} to {longest} with batch {batch}"] if longest else []

    options = contexts(workload.batch)
    if batch:
        options.append(f"batch up to {batch} with context {workload.context}")
    return options or contexts(1)


def _largest(fits: Callable[[int], bool], limit: int, first: int = 1) -> int:
    """The largest value up to `limit` that fits, by bisection that tries `first` first; 0 if none does."""
    low, high, middle = 0, limit + 1, min(first, limit)
    while high - low > 1:
        low, high = (middle, high) if fits(middle) else (low, middle)
        middle = (low + high) // 2
    return low
