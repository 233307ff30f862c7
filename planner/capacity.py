"""Whether a plan fits into free memory, and the largest workload that would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ridgeplan.planner.lowering import strategy_of
from ridgeplan.planner.plan import MAX_BATCH, Plan, Workload
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.device import Device
from ridgeplan.roofline.execution import DRAFT_SWAP_PROMPT_TOKENS, MAX_TOKENS, uses_draft_swap
from ridgeplan.roofline.placement import resident_memory

GB = 1e9
ModelReference = str | ModelShape


def missing_memory(plan: Plan, model: ModelReference, device: Device) -> str | None:
    """Why the plan's workload does not fit into the device's memory, and the largest that would; None if it fits.

    Raises UnknownModel or BadModelFile (ValueErrors) for a model that cannot be read.
    """
    shape = model if isinstance(model, ModelShape) else load_shape(model)
    workload = plan.workload

    def needed(resized: Workload) -> float:
        return peak_bytes(replace(plan, workload=resized), shape, device)

    def fits(resized: Workload) -> bool:
        return needed(resized) <= device.memory_bytes

    if fits(workload):
        return None

    def context_with(batch: int) -> int:
        longest = MAX_TOKENS - workload.new_tokens
        # Memory grows with the context except where prompts begin to use the draft weights' memory, so the bisection
        # starts there.
        return _largest(
            lambda tokens: fits(replace(workload, context=tokens, batch=batch)), longest, DRAFT_SWAP_PROMPT_TOKENS
        )

    options = _options(workload, context_with, _largest(lambda rows: fits(replace(workload, batch=rows)), MAX_BATCH))
    allowed = f"allowed: {', or '.join(options)}" if options else "no context fits with these formats"
    sizes = f"the plan needs {needed(workload) / GB:.1f} GB and {device.memory_bytes / GB:.1f} GB are free"
    return f"{sizes}; {allowed}"


def swaps_draft_weights(plan: Plan) -> bool:
    """Whether, on a GPU, the plan's prompts use the memory of the draft's weights for their long buffers."""
    return plan.weights.draft_differs and bool(uses_draft_swap(plan.workload.context))


def peak_bytes(plan: Plan, shape: ModelShape, device: Device) -> float:
    """Predicted peak of weights, caches, buffers and workspaces, with nothing offloaded."""
    certain = 1.0  # memory does not depend on acceptance
    return float(resident_memory(shape, device, strategy_of(plan, shape, device, certain)).peak)


def _options(workload: Workload, context_with: Callable[[int], int], batch: int) -> list[str]:
    """The contexts that fit the plan's batch and the batches that fit its context; if none, contexts for batch 1."""

    def contexts(batch: int) -> list[str]:
        longest = context_with(batch)
        # Where a plan does not fit, a longer one may fit only because its prompts use the draft weights' memory.
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
