"""What a strategy holds in memory, which layers must leave the device, and what that costs a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ridgeplan.roofline import memory
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.cost import Term
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.memory import MemoryParts
from ridgeplan.roofline.strategy import UNLIMITED_TOKENS, Strategy
from ridgeplan.roofline.term_math import is_symbolic, maximum, minimum, where

# Share of an offloaded layer's budget that the last step already loaded (SpeContext, section 5.4 and Fig 6b).
ELASTIC_OVERLAP = 0.9
MAX_LENGTH = 1 << 24  # tokens, the longest context a plan may have


@dataclass(frozen=True)
class Placed:
    """Memory with as many layers offloaded as needed, and the traffic they cause at every target step."""

    memory: MemoryParts
    offloaded_layers: Term
    transfer_s: Term


def place(shape: ModelShape, machine: Machine, strategy: Strategy) -> Placed:
    """Offload just enough layers for the peak to fit (SpeContext, Eq 8), where the strategy lets any leave."""
    parts = resident_memory(shape, machine, strategy)
    saving = _layer_saving(shape, strategy, parts)
    excess = maximum(parts.peak - machine.memory_bytes, 0)
    layers = strategy.offload * minimum(_ceiling(excess / maximum(saving, 1)), shape.layers)
    return Placed(
        memory=replace(parts, kv=parts.kv - layers * saving),
        offloaded_layers=layers,
        transfer_s=layers * _layer_transfer(shape, machine, strategy, parts),
    )


def offload_thresholds(
    shape: ModelShape, machine: Machine, strategy: Strategy, reserved_tokens: int = 0
) -> tuple[int, ...]:
    """Algorithm 1 of SpeContext on this package's own memory model: S_0..S_L for one strategy in numbers.

    From length S_i on, more than i layers must be off the device. The largest length that fits is found by
    bisection for all layers at once, as memory grows with length but for where prompts begin to borrow, where it
    starts. Lengths never fall along the list (errata 3); `reserved_tokens` keeps slots free, gamma + 1 of them when
    speculating (errata 2).
    """
    layers = np.arange(shape.layers + 1)
    fits, too_long = np.zeros(layers.size), np.full(layers.size, float(MAX_LENGTH))
    middle = np.full(layers.size, float(memory.DRAFT_SWAP_PROMPT_TOKENS))
    while (too_long - fits > 1).any():
        held = replace(strategy, context=middle, new_tokens=0)
        parts = resident_memory(shape, machine, held)
        peak = parts.peak - layers * _layer_saving(shape, held, parts)
        ok = peak <= machine.memory_bytes
        fits, too_long = np.where(ok, middle, fits), np.where(ok, too_long, middle)
        middle = np.floor((fits + too_long) / 2)
    lengths = np.maximum.accumulate(np.maximum(fits - reserved_tokens, 0))
    return tuple(int(length) for length in lengths)


def resident_memory(shape: ModelShape, machine: Machine, strategy: Strategy) -> MemoryParts:
    """Memory with everything on the device, at the longest the sequences get."""
    element_bytes, batch = machine.element_bytes, strategy.batch
    tokens = minimum(strategy.context, strategy.eviction_budget) + strategy.new_tokens
    slots = strategy.keeps_full * (tokens + strategy.queries)
    buffered = (1 - strategy.keeps_full) * (2 * strategy.kv_group + strategy.queries)
    codes = memory.code_memory(shape, batch, tokens, strategy.code_planes, strategy.kv_group)
    return MemoryParts(
        weights=memory.weight_memory(shape, strategy.target_weight_bytes, element_bytes),
        draft_weights=_draft_weights(shape, strategy),
        kv=memory.full_kv(shape, batch, slots, element_bytes) + codes,
        buffers=memory.full_kv(shape, batch, buffered, element_bytes),
        prefill_workspace=memory.prefill_workspace(
            shape, strategy.context, element_bytes, _arena_capacity(shape, machine, strategy)
        ),
        decode_workspace=memory.decode_workspace(shape, batch, strategy.queries, strategy.splits, element_bytes),
    )


def swapped_bytes(shape: ModelShape, machine: Machine, strategy: Strategy) -> Term:
    """Bytes of the draft's weights that prompts overwrite and that come back from the host before the first round."""
    buffers = memory.prompt_buffers(shape, strategy.context, machine.element_bytes)
    return memory.arena_bytes(_arena_capacity(shape, machine, strategy), buffers)


def _draft_weights(shape: ModelShape, strategy: Strategy) -> Term:
    return strategy.has_draft_weights * memory.draft_weight_memory(shape, strategy.draft_weight_bytes)


def _arena_capacity(shape: ModelShape, machine: Machine, strategy: Strategy) -> Term:
    """Bytes that prompts may borrow. On a host, which does not run beside another, there is nothing to gain."""
    return machine.asynchronous * memory.uses_draft_swap(strategy.context) * _draft_weights(shape, strategy)


def _layer_saving(shape: ModelShape, strategy: Strategy, parts: MemoryParts) -> Term:
    """Bytes that one layer's KV frees by leaving the device, its budget staying behind (SpeContext, Eq 7)."""
    kept = minimum(strategy.offload_budget / (strategy.context + strategy.new_tokens), 1)
    return parts.kv / shape.layers * (1 - kept)


def _layer_transfer(shape: ModelShape, machine: Machine, strategy: Strategy, parts: MemoryParts) -> Term:
    """Seconds to bring one offloaded layer's tokens: the changed part of its budget, or all where all are read.

    They travel in the format they are stored in.
    """
    reads_all = minimum(strategy.target_budget / UNLIMITED_TOKENS, 1)  # 1 without a budget, about 0 with one
    budget = minimum(strategy.offload_budget, strategy.context)
    tokens = where(reads_all, strategy.context, budget * (1 - ELASTIC_OVERLAP))
    token_bytes = parts.kv / shape.layers / (strategy.context + strategy.new_tokens)
    return tokens * token_bytes / machine.host_link_bytes_per_s


def _ceiling(value: Term) -> Term:
    if is_symbolic(value):
        from sympy import ceiling

        return ceiling(value)
    return np.ceil(value)
