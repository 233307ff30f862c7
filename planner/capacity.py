"""Memory capacity: how much memory plans may use, their peaks, and the largest contexts and batches that fit."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ridgeplan.planner.lowering import stack, strategy_of
from ridgeplan.planner.quantities import GB, MIN_BARE_BYTES, size_text, tokens_text
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.execution import DRAFT_SWAP_PROMPT_TOKENS, MAX_TOKENS
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.memory import MemoryBreakdown, offload_layers, resident_memory
from ridgeplan.roofline.plan.plan import MAX_BATCH, MAX_MEMORY_BYTES, Plan, Workload, require
from ridgeplan.roofline.strategy import Strategy

MEMORY_UTILIZATION = 0.9  # vLLM's default; the rest is for the driver, fragments and other processes
NOMINAL = 1.05  # a GPU sold with 24 GiB reports a little less, and a limit of 24GiB still means all of it
# Default for an unknown host: one GPU's share of a host with eight GPUs and 2 TB, such as AWS's p5.48xlarge.
HOST_MEMORY_BYTES = 256e9
CERTAIN = 1.0  # memory does not depend on acceptance
ModelReference = str | ModelShape


def usable_bytes(
    memory_bytes: float, memory_utilization: float = MEMORY_UTILIZATION, memory_limit: float | None = None,
    device: str = "the GPU",
) -> float:  # fmt: skip
    """Bytes of a device that plans may use: a share of its memory, or the limit if that is less.

    Raises PlanError, with the device's name, for values out of range and for a limit above what the device has.
    """
    check_memory_options(memory_utilization, memory_limit)
    usable = memory_utilization * memory_bytes
    limit = 0 if memory_limit is None else memory_limit
    allowed = f"allowed: up to {size_text(memory_bytes)}, the memory of {device}"
    require(limit <= NOMINAL * memory_bytes, f"memory_limit is {size_text(limit)}; {allowed}")
    return usable if memory_limit is None else min(usable, float(memory_limit))


def usable_host_bytes(host_memory: float | None, memory_utilization: float, *, this_machine: bool) -> float:
    """Bytes of the host that plans may use: `host_memory` if it is set.

    Otherwise it is a share of this machine's memory, or HOST_MEMORY_BYTES for any other machine.
    """
    if host_memory is not None:
        return float(host_memory)
    if this_machine:
        return memory_utilization * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return HOST_MEMORY_BYTES


def check_memory_options(
    memory_utilization: float, memory_limit: float | None = None, host_memory: float | None = None
) -> None:
    """Raises PlanError for a share outside (0, 1] or a size in bytes out of range."""
    share = f"memory_utilization is {brief(memory_utilization)}; allowed: above 0 up to 1"
    require(_is_number(memory_utilization) and 0 < memory_utilization <= 1, share)
    if memory_limit is not None:
        allowed = f"memory_limit is {brief(memory_limit)}; allowed: bytes above 0 up to {MAX_MEMORY_BYTES:.0e}"
        require(_is_number(memory_limit) and 0 < memory_limit <= MAX_MEMORY_BYTES, allowed)
        unit = f"allowed: {MIN_BARE_BYTES:.0e} or more, or a text such as '24GB'"
        require(memory_limit >= MIN_BARE_BYTES, f"memory_limit is {memory_limit:g} bytes; {unit}")
    if host_memory is not None:
        allowed = f"host_memory is {brief(host_memory)}; allowed: bytes from 0 to {MAX_MEMORY_BYTES:.0e}"
        require(_is_number(host_memory) and 0 <= host_memory <= MAX_MEMORY_BYTES, allowed)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Capacity:
    """The memory of several plans at once, against the limits of a device and its host."""

    plans: Sequence[Plan]
    shape: ModelShape
    device: Device
    host_limit_bytes: float = math.inf

    def peaks(self, context: np.ndarray | None = None, batch: np.ndarray | None = None) -> np.ndarray:
        """Peak bytes of each plan, at its workload's context and batch or at others: [plans]."""
        return self._needed(context, batch)[0]

    def fits(
        self, context: np.ndarray | None = None, batch: np.ndarray | None = None, device: Device | None = None
    ) -> np.ndarray:
        """Which plans fit the device and the host, at their workload's context and batch or at others: [plans].

        device: another one, with elements of the same size.
        """
        peaks, on_host = self._needed(context, batch, device)
        return (peaks <= (device or self.device).memory_bytes) & (on_host <= self.host_limit_bytes)

    def smallest(self) -> int:
        """The plan with the lowest peak, of those that fit the host."""
        peaks, on_host = self._needed()
        return int(np.argmin(np.where(on_host <= self.host_limit_bytes, peaks, math.inf)))

    def largest_contexts(self, limits: np.ndarray) -> np.ndarray:
        """The longest context of each plan that fits, up to its limit; 0 where none does."""
        # Memory grows with the context, except at the length from which prompts reuse the draft weights' memory. The
        # bisection starts there.
        return _largest(lambda tokens: self.fits(context=tokens), limits, DRAFT_SWAP_PROMPT_TOKENS)

    def largest_batches(self) -> np.ndarray:
        """The largest batch of each plan that fits; 0 where none does."""
        limits = np.full(len(self.plans), MAX_BATCH)
        return _largest(lambda rows: self.fits(batch=rows), limits)

    @cached_property
    def _strategy(self) -> Strategy:
        """The plans' strategies, at their own workloads."""
        strategies = [strategy_of(plan, self.shape, self.device, CERTAIN) for plan in self.plans]
        return stack(strategies, [1] * len(strategies))

    def _needed(
        self, context: np.ndarray | None = None, batch: np.ndarray | None = None, device: Device | None = None
    ) -> tuple[np.ndarray, ...]:
        """Bytes of the device, at the peak, and of the host: each [plans]."""
        if batch is not None:
            batch = np.ceil(batch / self.shape.parallel.data)
        sizes = {name: size for name, size in (("context", context), ("batch", batch)) if size is not None}
        layout = offload_layers(self.shape, device or self.device, self._strategy.with_terms(**sizes))
        both = (np.asarray(value, dtype=float) for value in (layout.memory.peak, layout.host_bytes))
        return tuple(np.broadcast_to(value, (len(self.plans),)) for value in both)


def missing_memory(plan: Plan, model: ModelReference, device: Device) -> str | None:
    """Why the workload does not fit into the device's memory, with the largest sizes that would; None if it fits.

    Raises UnknownModel or BadModelFile (ValueErrors) for a model that cannot be read.
    """
    shape = model if isinstance(model, ModelShape) else load_shape(model)
    needed = peak_bytes(plan, shape, device)
    if needed <= device.memory_bytes:
        return None
    options = _options(plan, shape, device)
    allowed = f"allowed: {', or '.join(options)}" if options else "no context fits with these formats"
    digits = 1 if needed - device.memory_bytes > GB / 10 else 3
    sizes = f"the plan needs {needed / GB:.{digits}f} GB and {device.memory_bytes / GB:.{digits}f} GB may be used"
    return f"{sizes}; {allowed}"


def predicted_memory(plan: Plan, shape: ModelShape, device: Device) -> MemoryBreakdown:
    """Bytes by purpose, with nothing offloaded."""
    return resident_memory(shape, device, strategy_of(plan, shape, device, CERTAIN))


class Offloaded(NamedTuple):
    """The last layers, which are offloaded, and the bytes that the others leave to them, if they leave one by one."""

    layers: int = 0
    spare_bytes: int = 0


def offloaded_layers(plan: Plan, shape: ModelShape, device: Device) -> Offloaded:
    """Layers to offload so that the workload fits until its generation ends, and the usable bytes that remain.

    The number of layers is 0 if the plan may not offload.
    """
    strategy = strategy_of(plan, shape, device, CERTAIN)
    layout = offload_layers(shape, device, strategy)
    return Offloaded(int(layout.host.layers), int(layout.spare_bytes))


def departure_lengths(plan: Plan, shape: ModelShape, device: Device) -> tuple[int, ...]:
    """S_0, S_1, ...: the lengths at which layers leave for the host, of a plan whose placement adapts (Algorithm 1)."""
    departures = offload_layers(shape, device, strategy_of(plan, shape, device, CERTAIN)).departures
    return tuple(int(departures.threshold(away)) for away in range(int(departures.final)))


def peak_bytes(plan: Plan, shape: ModelShape, device: Device) -> float:
    """Predicted peak of weights, caches, buffers and workspaces."""
    return float(Capacity([plan], shape, device).peaks()[0])


def _options(plan: Plan, shape: ModelShape, device: Device) -> list[str]:
    """The contexts that fit the plan's batch and the batches that fit its context; if none, contexts for batch 1."""
    workload = plan.workload

    def contexts(batch: int) -> list[str]:
        resized = replace(plan, workload=replace(workload, batch=batch))
        limit = np.array([MAX_TOKENS - workload.new_tokens])
        longest = int(Capacity([resized], shape, device).largest_contexts(limit)[0])
        return [described_contexts(longest, workload, batch)] if longest else []

    options = contexts(workload.batch)
    batch = int(Capacity([plan], shape, device).largest_batches()[0])
    if batch:
        options.append(described_batches(batch, workload))
    return options or contexts(1)


def described_batches(largest: int, workload: Workload) -> str:
    """The batches that would fit, in words."""
    return f"batch {'up to ' * (largest > 1)}{largest} with context {tokens_text(workload.context)}"


def described_contexts(longest: int, workload: Workload, batch: int) -> str:
    """The contexts that would fit, in words."""
    # Only a prompt that reuses the draft weights' memory can fit where a shorter one does not.
    first = f"from {DRAFT_SWAP_PROMPT_TOKENS}" if longest > workload.context else "up"
    return f"context {first} to {longest} with batch {batch}"


def _largest(fit: Callable[[np.ndarray], np.ndarray], limits: np.ndarray, first: int = 1) -> np.ndarray:
    """The largest integers up to `limits` that fit, by bisection starting at `first`; 0 if none fits."""
    low, high = np.zeros(len(limits)), limits + 1.0
    middle = np.minimum(float(first), limits)
    while (high - low > 1).any():
        fitting = fit(np.maximum(middle, 1))
        low, high = np.where(fitting, middle, low), np.where(fitting, high, middle)
        middle = np.floor((low + high) / 2)
    return low.astype(int)
