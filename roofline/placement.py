"""A strategy's memory, and the layers that must be offloaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ridgeplan.roofline import memory
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.cost import Term, indicator, is_symbolic, maximum, minimum, where
from ridgeplan.roofline.eviction import PromptChunks, appended_tokens, chunk_buffers, eviction_workspace
from ridgeplan.roofline.execution import (
    CUBLAS_WORKSPACE_BYTES,
    CUDA_LARGE_GEMM_ROWS,
    DRAFT_SWAP_PROMPT_TOKENS,
    MAX_TOKENS,
    choose_splits,
    uses_draft_swap,
)
from ridgeplan.roofline.host_link import HostLayers, reads_all
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.memory import MemoryBreakdown
from ridgeplan.roofline.ops import METADATA_BYTES, TWO_BITS, UPPER_BITS
from ridgeplan.roofline.strategy import Strategy


@dataclass(frozen=True)
class Offloading:
    """Memory with as many layers offloaded as needed, and these layers. host_bytes: what they take of the host."""

    memory: MemoryBreakdown
    host: HostLayers
    host_bytes: Term


def offload_layers(shape: ModelShape, device: Device, strategy: Strategy) -> Offloading:
    """Offloads just enough layers for the peak to fit (SpeContext, Eq 8), where the strategy allows any."""
    parts = resident_memory(shape, device, strategy)
    memory, layers = _offloaded(shape, device, strategy, parts)
    layer_bytes = _host_bytes_per_layer(shape, strategy, parts)
    return Offloading(memory, HostLayers(layers, layer_bytes / strategy.final_tokens), layers * layer_bytes)


def _offloaded(
    shape: ModelShape, device: Device, strategy: Strategy, parts: MemoryBreakdown
) -> tuple[MemoryBreakdown, Term]:
    """`parts` without the layers that must be offloaded, and the number of these; none where that frees nothing."""
    kv_bytes, plane_bytes = _freed_kv_bytes(shape, device, strategy, parts), _value_plane_bytes(shape, strategy)
    staged_bytes = _staged_bytes(shape, strategy, parts)
    limit_bytes = minimum(device.memory_bytes, strategy.offload.memory_limit_bytes)
    excess_bytes = maximum(parts.peak - limit_bytes, 0)
    freed_bytes = maximum(kv_bytes + plane_bytes, 0)
    some = strategy.offload.active * minimum(excess_bytes, 1) * minimum(freed_bytes, 1)
    wanted = _ceiling((excess_bytes + some * staged_bytes) / maximum(freed_bytes, 1))
    layers = some * minimum(where(strategy.offload.all_at_once, shape.layers, wanted), shape.layers)
    buffers = parts.buffers + some * staged_bytes - layers * plane_bytes
    return replace(parts, kv=parts.kv - layers * kv_bytes, buffers=buffers), layers


def offload_thresholds(
    shape: ModelShape, device: Device, strategy: Strategy, reserved_tokens: int = 0
) -> tuple[int, ...]:
    """Algorithm 1 of SpeContext on this package's own memory model: S_0..S_L for one strategy in numbers.

    From length S_i on, more than i layers must be offloaded. The largest length that fits is found by bisection, for
    all layers at once. Memory grows with the length except where prompts begin to use the draft weights' memory, so
    the bisection starts there. Lengths never fall along the list (SpeContext-3); `reserved_tokens` keeps slots free,
    gamma + 1 of them when speculating (SpeContext-2).
    """
    layers = np.arange(shape.layers + 1)
    fits, too_long = np.zeros(layers.size), np.full(layers.size, float(MAX_TOKENS))
    middle = np.full(layers.size, float(DRAFT_SWAP_PROMPT_TOKENS))
    while (too_long - fits > 1).any():
        at_length = replace(strategy, context=middle, new_tokens=0)
        parts = resident_memory(shape, device, at_length)
        freed = _freed_kv_bytes(shape, device, at_length, parts) + _value_plane_bytes(shape, at_length)
        peak = parts.peak - layers * freed
        peak = peak + np.minimum(layers, 1) * _staged_bytes(shape, at_length, parts)
        ok = peak <= min(device.memory_bytes, strategy.offload.memory_limit_bytes)
        fits, too_long = np.where(ok, middle, fits), np.where(ok, too_long, middle)
        middle = np.floor((fits + too_long) / 2)
    lengths = np.maximum.accumulate(np.maximum(fits - reserved_tokens, 0))
    return tuple(int(length) for length in lengths)


def resident_memory(shape: ModelShape, device: Device, strategy: Strategy) -> MemoryBreakdown:
    """Memory with everything on the device, at the sequences' full length."""
    element_bytes, batch = device.element_bytes, strategy.batch
    tokens = strategy.kept_tokens + strategy.new_tokens
    slots = strategy.stores_full_kv * (tokens + strategy.max_queries)
    buffered = (1 - strategy.stores_full_kv) * (2 * strategy.kv_group + strategy.max_queries)
    codes = memory.code_memory(shape, batch, tokens, strategy.code_planes, strategy.kv_group)
    arena_capacity_bytes = _arena_capacity_bytes(shape, device, strategy)
    copy_bytes = device.asynchronous * (1 - strategy.target.dense) * memory.dense_copy(shape, element_bytes)
    splits = choose_splits(batch, shape.kv_heads, strategy.kept_tokens, device.num_sms)
    together = PromptChunks.of(strategy).longest + appended_tokens(strategy)
    return MemoryBreakdown(
        weights=_target_weights(shape, device, strategy),
        draft_weights=_draft_weights(shape, strategy),
        kv=memory.full_kv(shape, batch, slots, element_bytes) + codes,
        buffers=memory.full_kv(shape, batch, buffered, element_bytes)
        + _selection_state(shape, device, strategy, tokens),
        prefill_workspace=memory.prefill_workspace(
            shape,
            together,
            element_bytes,
            arena_capacity_bytes,
            copy_bytes,
            eviction_workspace(shape, strategy, element_bytes),
            chunk_buffers(shape, strategy, element_bytes),
        ),
        decode_workspace=memory.decode_workspace(shape, batch, strategy.max_queries, splits, element_bytes),
        libraries=device.asynchronous * _library_streams(strategy) * CUBLAS_WORKSPACE_BYTES,
    )


def _library_streams(strategy: Strategy) -> Term:
    """Streams that call a library's products: of prompts, and of rounds with too many rows for this package's head."""
    return 1 + indicator(CUDA_LARGE_GEMM_ROWS + 1, strategy.batch * strategy.max_queries)


def _selection_state(shape: ModelShape, device: Device, strategy: Strategy, tokens: Term) -> Term:
    """What tokens are chosen by: bounds or keys of few bits, scores, projections, and values gathered by token."""
    elements = shape.kv_elements_per_token_per_layer / 2
    key_bytes = elements * (strategy.held_keys * device.element_bytes + strategy.held_plane_bits / 8)
    projections = maximum(strategy.draft.projected_params, strategy.target.projected_params) * device.element_bytes
    return strategy.batch * tokens * (key_bytes + strategy.held_score_bytes) + projections


def swapped_bytes(shape: ModelShape, device: Device, strategy: Strategy) -> Term:
    """Bytes of the draft's weights that prompts overwrite and the host restores before the first round."""
    buffers = chunk_buffers(shape, strategy, device.element_bytes)
    return memory.arena_bytes(_arena_capacity_bytes(shape, device, strategy), buffers)


def _target_weights(shape: ModelShape, device: Device, strategy: Strategy) -> Term:
    head = strategy.target.head_bytes, 1 - strategy.target.head_dense
    return memory.weight_memory(shape, strategy.target.weight_bytes, device.element_bytes, *head)


def _draft_weights(shape: ModelShape, strategy: Strategy) -> Term:
    return strategy.draft.has_weights * memory.draft_weight_memory(shape, strategy.draft.weight_bytes)


def _arena_capacity_bytes(shape: ModelShape, device: Device, strategy: Strategy) -> Term:
    """The draft weights' bytes if prompts may overwrite them; 0 on a CPU, where a host copy would save nothing."""
    return device.asynchronous * uses_draft_swap(strategy.context) * _draft_weights(shape, strategy)


def _host_bytes_per_layer(shape: ModelShape, strategy: Strategy, parts: MemoryBreakdown) -> Term:
    """Bytes of one offloaded layer that lie on the host: all of its old tokens, or their lower codes.

    Of a target that has what it chooses loaded, none are codes: these only served to choose.
    """
    tokens, code_planes, group = strategy.final_tokens, strategy.code_planes, strategy.kv_group
    codes = strategy.target_loads * memory.code_memory(shape, strategy.batch, tokens, code_planes, group)
    lower = strategy.batch * tokens * shape.kv_elements_per_token_per_layer / 2
    return strategy.offload.lower_only * lower + (1 - strategy.offload.lower_only) * (parts.kv - codes) / shape.layers


def _freed_kv_bytes(shape: ModelShape, device: Device, strategy: Strategy, parts: MemoryBreakdown) -> Term:
    """Bytes of KV freed by offloading one layer. What drafts or the target read at a step stays (SpeContext, Eq 7)."""
    kept = minimum(strategy.offload.budget / (strategy.context + strategy.new_tokens), 1)
    of_codes = strategy.draft.bits / maximum(4 * strategy.code_planes, 1)
    draft_share = minimum(strategy.gamma, 1) * where(minimum(strategy.draft.bits, 1), of_codes, 1)
    stays = (1 - strategy.offload.lower_only) * kept * draft_share
    streamed = _host_bytes_per_layer(shape, strategy, parts) * (1 - stays)
    loaded = parts.kv / shape.layers - _slots_bytes(shape, device, strategy)
    return where(strategy.target_loads, loaded, streamed)


def _slots_bytes(shape: ModelShape, device: Device, strategy: Strategy) -> Term:
    """Slots of a layer on the host whose chosen tokens are loaded: a budget for each query, and recent ones.

    And the tables of what the slots hold, and the scales of 2-bit keys, if there are any.
    """
    group, queries = strategy.kv_group, strategy.max_queries
    budget = minimum(strategy.offload.budget, MAX_TOKENS)
    slots = queries * _ceiling(budget / group) * group + 2 * group + queries
    token_bytes = shape.kv_elements_per_token_per_layer * device.element_bytes
    tables = strategy.final_tokens * strategy.offload.slot_table_bytes
    scales = minimum(strategy.code_planes, 1) * 2 * METADATA_BYTES / group
    return strategy.batch * (slots * token_bytes + tables) + _key_elements(shape, strategy) * scales


def _value_plane_bytes(shape: ModelShape, strategy: Strategy) -> Term:
    """Bytes by token of a layer's values in 4 bits, which leave with it: only the 2-bit keys beside them stay."""
    bits = strategy.held_plane_bits / shape.layers * UPPER_BITS / (UPPER_BITS + TWO_BITS)
    return strategy.target_loads * _key_elements(shape, strategy) * bits / 8


def _key_elements(shape: ModelShape, strategy: Strategy) -> Term:
    """Of a layer's old tokens; the values have as many."""
    return strategy.batch * strategy.final_tokens * shape.kv_elements_per_token_per_layer / 2


def _staged_bytes(shape: ModelShape, strategy: Strategy, parts: MemoryBreakdown) -> Term:
    """Slots that layers are copied to from the host, if the target reads all of them."""
    slots = strategy.offload.prefetch + 1
    return reads_all(strategy) * slots * _host_bytes_per_layer(shape, strategy, parts)


def _ceiling(value: Term) -> Term:
    if is_symbolic(value):
        from sympy import ceiling

        return ceiling(value)
    return np.ceil(value)
