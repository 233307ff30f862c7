"""Device memory of a plan in bytes, and the layers that must be offloaded for it to fit.

First the memory of each part by plain sizes, then that of a `Strategy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ridgeplan.roofline import execution, ops
from ridgeplan.roofline.catalog.families import executable_architectures
from ridgeplan.roofline.catalog.layers import Attention
from ridgeplan.roofline.catalog.model_shape import KEPT_FORMAT, ModelShape
from ridgeplan.roofline.cost import Term, indicator, is_symbolic, maximum, minimum, where
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.passes import state_sizes, stored_bytes
from ridgeplan.roofline.strategy import UNLIMITED_BYTES, Strategy


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes on the device by purpose.

    prefill_workspace: excludes buffers that use the draft weights' memory. libraries: workspaces that libraries keep.
    """

    weights: Term
    draft_weights: Term
    kv: Term
    buffers: Term
    prefill_workspace: Term
    decode_workspace: Term
    libraries: Term = 0

    @property
    def resident(self) -> Term:
        """Bytes held for the whole generation."""
        return self.weights + self.draft_weights + self.kv + self.buffers + self.libraries

    @property
    def prefill_peak(self) -> Term:
        """Peak while prompts are processed."""
        return self.resident + self.prefill_workspace

    @property
    def decode_peak(self) -> Term:
        """Peak while tokens are generated."""
        return self.resident + self.decode_workspace

    @property
    def peak(self) -> Term:
        """The larger of both peaks, which must fit."""
        return self.resident + maximum(self.prefill_workspace, self.decode_workspace)

    @property
    def reserved_peak(self) -> Term:
        """Peak that torch reserves on a GPU, where a captured round keeps its workspace during later prompts."""
        return self.resident + self.prefill_workspace + self.decode_workspace


def layer_parameters(shape: ModelShape) -> int:
    """Parameters of the matrices that may be quantized: linear layers and experts.

    Not routers, embeddings, and the projections from latents, which are in full precision.
    """
    return shape.quantized_mixer_params + shape.dense_params + shape.expert_params


def matrix_memory(shape: ModelShape, weight_bytes: Term) -> Term:
    """The linear layers and experts at `weight_bytes` per parameter, or at the checkpoint's own bits where fewer."""
    bits = shape.weight_bits
    return (
        shape.quantized_mixer_params * stored_bytes(bits.attention, weight_bytes)
        + shape.dense_params * stored_bytes(bits.mlp, weight_bytes)
        + shape.expert_params * stored_bytes(bits.experts, weight_bytes)
    )


def weight_memory(
    shape: ModelShape, weight_bytes: Term, element_bytes: Term, head_bytes: Term = 0, separate_head: Term = 0,
    table_saved_bytes: Term = 0,
) -> Term:  # fmt: skip
    """The target's weights: matrices at `weight_bytes` per parameter, all others as the checkpoint has them.

    The others are embeddings and the head, and routers and vectors, which are in full precision. Where
    `separate_head` is 1 the head has `head_bytes` per parameter, and is no longer the embedding's table. That takes
    `table_saved_bytes` less per parameter.
    """
    tables = ("embedding",) if shape.tied_embeddings else ("embedding", "head")
    others = shape.parameters - layer_parameters(shape) - len(tables) * shape.embedding_params
    full_bytes = {part: shape.weight_bits.full_bytes(part, element_bytes) for part in tables}
    head = separate_head * (head_bytes - full_bytes.get("head", 0))  # beyond what it takes in full precision
    table_bytes = sum(full_bytes.values()) + head - table_saved_bytes
    return matrix_memory(shape, weight_bytes) + others * element_bytes + shape.embedding_params * table_bytes


def head_step_params(shape: ModelShape, draft_vocab: Term) -> Term:
    """Parameters that a step of a head reads: attention, whose inputs are two, MLP and output head (EAGLE-3)."""
    attention = 2 * shape.hidden * (shape.q_width + 2 * shape.kv_width) + shape.q_width * shape.hidden
    return attention + 3 * shape.hidden * shape.intermediate + minimum(draft_vocab, shape.vocab) * shape.hidden


def fuse_params(shape: ModelShape) -> Term:
    """Parameters of the product that fuses the target's stream at three depths."""
    return 3 * shape.hidden**2


def mtp_params(shape: ModelShape) -> Term:
    """Parameters of a model's own layer for multi-token prediction; embedding and output head are the model's.

    Its attention and MLP are those of the model's largest layers, and a product joins its two inputs.
    """
    kinds = (shape.attentions, shape.mlps)
    return 2 * shape.hidden**2 + sum(max(part.params(shape.hidden) for part, _ in parts) for parts in kinds)


def head_memory(shape: ModelShape, strategy: Strategy, element_bytes: Term, tokens: Term) -> Term:
    """Bytes of a head's weights and of its keys and values for sequences of `tokens` tokens; 0 without one."""
    eagle3, mtp_head = head_step_params(shape, strategy.head_vocab) + fuse_params(shape), strategy.mtp_head_params
    params = where(minimum(mtp_head, 1), mtp_head, eagle3)
    kv = strategy.batch * tokens * 2 * shape.kv_width
    return strategy.uses_head * (params + kv) * element_bytes


def draft_weight_memory(shape: ModelShape, weight_bytes: Term) -> Term:
    """The drafts' own copy of the linear layers and the head; embeddings, norms and stored experts are the target's."""
    bits, kept = shape.weight_bits, shape.weight_bits.format == KEPT_FORMAT
    shared = shape.expert_params * stored_bytes(bits.experts, weight_bytes) if kept else 0
    return matrix_memory(shape, weight_bytes) - shared + shape.embedding_params * stored_bytes(bits.head, weight_bytes)


def full_kv(shape: ModelShape, batch: Term, tokens: Term, element_bytes: Term, final: Term | None = None) -> Term:
    """Full-precision keys and values of `tokens` tokens in every layer that caches them.

    final: tokens of a sequence at its end, in this package's cache. Layers whose window is shorter are left out.
    """
    return batch * stored_elements(shape, tokens, final) * element_bytes


def stored_elements(shape: ModelShape, tokens: Term, final: Term | None = None) -> Term:
    """Numbers that all layers cache of a sequence of `tokens` tokens, as `full_kv`.

    Without `final`, layers with a sliding window hold no more tokens than it.
    """
    return sum(
        attention.cached_elements * _stored_tokens(attention, layers, tokens, final)
        for attention, layers in shape.attentions
    )


def _stored_tokens(attention: Attention, layers: Term, tokens: Term, final: Term | None) -> Term:
    if attention.window_tokens is None:
        return layers * tokens
    if final is None:
        return layers * minimum(tokens, attention.window_tokens)
    return layers * tokens * (1 - indicator(attention.window_tokens + 1, final))


def window_kv(shape: ModelShape, strategy: Strategy, element_bytes: Term, final: Term | None) -> Term:
    """Keys and values of layers whose window hides tokens: it, a group that leaves at once, and a round's tokens."""
    if final is None:
        return 0
    beside = strategy.kv_group + strategy.max_queries
    elements = sum(
        attention.cached_elements * layers * indicator(attention.window_tokens + 1, final)
        * (attention.window_tokens + beside)
        for attention, layers in shape.attentions
        if attention.window_tokens is not None
    )  # fmt: skip
    return strategy.batch * elements * element_bytes


def final_tokens(shape: ModelShape, strategy: Strategy) -> Term | None:
    """Tokens of a sequence at its end, for models that this package executes; engines' caches are all alike."""
    return strategy.context + strategy.new_tokens if shape.architecture in executable_architectures() else None


def code_memory(
    shape: ModelShape, batch: Term, tokens: Term, planes: Term, group: Term, final: Term | None = None
) -> Term:
    """Codes of `tokens` tokens in every layer, in `planes` 4-bit planes with scales and minima; 0 without planes.

    final: as for `full_kv`.
    """
    codes: Term = 0
    for attention, layers in shape.attentions:
        heads, width, values = attention.coded_sizes
        stored = _stored_tokens(attention, layers, tokens, final)
        codes = codes + ops.quantized_bytes(batch, heads, width, stored, 4 * planes, group, values)
    return minimum(planes, 1) * codes


def rotated_keys(shape: ModelShape, strategy: Strategy, element_bytes: Term, tokens: Term) -> Term:
    """Full-precision keys with RoPE beside the latents of `tokens` tokens that are codes alone; 0 without latents."""
    elements = sum(layers * (attention.rope_head_dim or 0) for attention, layers in shape.attentions)
    return (1 - strategy.stores_full_kv) * strategy.batch * elements * tokens * element_bytes if shape.is_mla else 0


def coded_layers(shape: ModelShape, strategy: Strategy) -> Term:
    """Layers whose tokens become codes: not those whose window hides tokens, in this package's cache."""
    final = final_tokens(shape, strategy)
    windowed = [(attention, layers) for attention, layers in shape.attentions if attention.window_tokens is not None]
    if final is None or not windowed:
        return shape.kv_layers
    return shape.kv_layers - sum(layers * hides(attention.window_tokens or 0, final) for attention, layers in windowed)


def hides(window: Term, final: Term) -> Term:
    """1 where a sliding window hides tokens of a sequence that ends with `final`: its layers hold no codes."""
    return indicator(window + 1, final)


def index_memory(shape: ModelShape, batch: Term, tokens: Term) -> Term:
    """Keys of sparse indexers, which are cached for all tokens."""
    token_bytes = sum(layers * attention.index_key_bytes for attention, layers in shape.attentions)
    return batch * tokens * token_bytes if token_bytes else 0


def state_memory(shape: ModelShape, batch: Term, queries: Term, element_bytes: Term) -> Term:
    """Recurrent states of all sequences, whatever their length, and the inputs that passes of `queries` tokens replay.

    Drafts replay them, too, so they need no state of their own.
    """
    return batch * sum(
        layers * ops.held_state_bytes(queries, state_sizes(state), element_bytes) for state, layers in shape.states
    )


def prompt_buffers(shape: ModelShape, tokens: Term, element_bytes: Term, held: Term = 0) -> tuple[Term, ...]:
    """Bytes of the buffers of tokens that go through the layers together, in the order of their allocation.

    These are the tokens' hidden states, and one layer's queries, keys and values, at the length that attends. held:
    earlier tokens, whose keys and values are ahead of these.
    """
    kv_width, attending = _prompt_kv_width(shape), execution.padded_prompt(tokens)
    keys = (held + attending) * kv_width * element_bytes
    return tokens * shape.hidden * element_bytes, attending * shape.mixer_width * element_bytes, keys, keys


def _prompt_kv_width(shape: ModelShape) -> Term:
    """Width of a prompt's keys, and of its values; under MLA of all heads, which prompts make of the latents."""
    return shape.kv_width if shape.is_mla else _widest_kv(shape) / 2


def _widest_kv(shape: ModelShape) -> Term:
    """Numbers of a token's keys and values in the layers that have the most."""
    return max({attention.attended_elements for attention, _ in shape.attentions})


def arena_bytes(capacity_bytes: Term, buffers: Sequence[Term]) -> Term:
    """Bytes of the buffers that fit an arena: each in turn, if the rest of the capacity holds all of it."""
    taken_bytes: Term = 0
    for buffer in buffers:
        taken_bytes = taken_bytes + buffer * indicator(taken_bytes + buffer, capacity_bytes)
    return taken_bytes


def _dense_width(shape: ModelShape) -> Term:
    """Width of the widest dense MLP or of shared experts; the shape's own where no layer is routed."""
    if not shape.is_moe:
        return shape.intermediate
    return max(max(mlp.intermediate, mlp.shared_intermediate) for mlp, _ in shape.mlps)


def _routed_elements(shape: ModelShape, grouped: int = 0) -> Term:
    """Numbers that a token's routed experts hold at once: the activations and outputs of each, and router logits.

    Logits and weights are in fp32, which counts double. grouped: as of a `Device`; gates and ups are beside each
    expert's input, or a second copy of its output.
    """
    return max(
        mlp.experts_per_token * (mlp.expert_intermediate + (mlp.expert_hidden or shape.hidden))
        + grouped * mlp.experts_per_token * max(2 * mlp.expert_intermediate, mlp.expert_hidden or shape.hidden)
        + (shape.hidden if mlp.shared_intermediate else 0)
        + 4 * mlp.experts
        for mlp, _ in shape.mlps
    )


def dense_copy(shape: ModelShape, element_bytes: Term) -> Term:
    """The dense copy of a quantized weight that prefill multiplies by on a GPU: of the widest layer, or the largest."""
    outputs = 2 * _dense_width(shape)
    if shape.is_moe:  # whose experts are decoded within the product, or copied by themselves
        outputs = max(outputs, *(attention.in_width for attention, _ in shape.projections))
    return minimum(execution.DENSE_COPY_BYTES, outputs * shape.hidden * element_bytes)


def expert_copy(shape: ModelShape, element_bytes: Term) -> Term:
    """The dense copy of routed experts' gates and ups that grouped products take: of a layer, or the largest."""
    sizes = (2 * mlp.experts * mlp.expert_intermediate * (mlp.expert_hidden or shape.hidden) for mlp, _ in shape.mlps)
    return minimum(execution.EXPERT_COPY_BYTES, max(sizes) * element_bytes)


def prompt_expert_rows(shape: ModelShape, strategy: Strategy, asynchronous: Term) -> Term:
    """Rows of each routed expert, on average, in a piece of a prompt; 1 without experts."""
    most = execution.prefill_chunk_tokens(asynchronous, strategy.target.grouped_experts)
    tokens = minimum(strategy.prompt_chunks.tokens, most)
    return tokens * shape.experts_per_token / shape.experts if shape.is_moe else 1


def _copies_experts(shape: ModelShape, device: Device, strategy: Strategy) -> Term:
    """1 where a prompt's routed experts are grouped products of dense copies."""
    rows = prompt_expert_rows(shape, strategy, device.asynchronous)
    return strategy.target.copies_experts * indicator(strategy.target.grouped_rows, rows)


def prefill_workspace(
    shape: ModelShape,
    tokens: Term,
    element_bytes: Term,
    arena_capacity_bytes: Term = 0,
    copy_bytes: Term = 0,
    scored_bytes: Term = 0,
    buffers: Sequence[Term] | None = None,
    chunk_tokens: Term = execution.PREFILL_CHUNK_TOKENS,
    grouped: int = 0,
    expert_copy_bytes: Term = 0,
    asynchronous: Term = 1,
) -> Term:
    """Workspace of layer-major prefill, one sequence at a time, of which `tokens` go through the layers together.

    It holds the buffers, by default `prompt_buffers`, and either the attention output of a few heads or one chunk's
    activations. Buffers that fit the draft weights' memory, `arena_capacity_bytes`, are not counted.
    copy_bytes: `dense_copy` if the weights are quantized. scored_bytes: an eviction's, while it scores the tokens.
    chunk_tokens: most tokens that are projected together. grouped: as of a `Device`. expert_copy_bytes: `expert_copy`
    if there is one. asynchronous: 1 on a GPU, 0 on a CPU.
    """
    chunk = minimum(tokens, chunk_tokens)
    kv_width = _widest_kv(shape)
    # Rows before and after RoPE, or the product's copy of its weight; gate and up with what they become, or that copy.
    projected = chunk * (shape.hidden + shape.q_width + kv_width) * element_bytes
    projected = projected + maximum(chunk * shape.q_width * element_bytes, copy_bytes)
    if shape.is_mla:  # a layer's latent rows, of all tokens, and twice while they are joined
        projected = projected + (tokens + chunk) * kv_width * element_bytes
    width = _dense_width(shape)
    activated = chunk * (2 * shape.hidden + 2 * width) * element_bytes
    activated = activated + maximum(chunk * width * element_bytes, copy_bytes)
    if shape.is_moe:
        routed = chunk * (2 * shape.hidden + _routed_elements(shape, grouped)) * element_bytes
        activated = maximum(activated, routed + expert_copy_bytes)
    # Whole heads attend at once, at least one.
    attending = execution.padded_prompt(tokens)
    heads_tokens = minimum(maximum(attending, execution.PREFILL_ATTENDED_TOKENS), attending * shape.kv_heads)
    attended = heads_tokens * shape.q_width / shape.kv_heads * element_bytes
    if shape.states:
        activated = maximum(activated, _recurring_bytes(shape, chunk, element_bytes, asynchronous))
    buffers = prompt_buffers(shape, tokens, element_bytes) if buffers is None else buffers
    allocated = sum(buffers) - arena_bytes(arena_capacity_bytes, buffers)
    return allocated + maximum(maximum(projected, activated), maximum(attended, scored_bytes))


def _recurring_bytes(shape: ModelShape, chunk: Term, element_bytes: Term, asynchronous: Term) -> Term:
    """What a chunk of a prompt takes in a layer with a recurrent state: projections, outputs and the chunked form.

    A GPU's kernels keep, by token, what the convolution returns, and by value head both factors, scores, a row of the
    triangular system and three scales. Torch takes, by head and token and in float32: queries, keys and values twice,
    the system's right side and its solution, queries and keys with their decays, the output, and three rows of
    products within a chunk.
    """
    worst: Term = 0
    for state, _ in shape.states:
        factors = state.channels + state.value_heads * (state.key_dim + state.value_dim + ops.CHUNK_TOKENS)
        in_kernels = factors * element_bytes + 4 * state.value_heads * (ops.CHUNK_TOKENS + 3)
        by_head = 8 * state.key_dim + 5 * state.value_dim + 3 * ops.CHUNK_TOKENS
        in_torch = 4 * state.value_heads * by_head + 2 * state.channels * element_bytes
        projected = (shape.hidden + state.in_width + state.value_width) * element_bytes
        fused = asynchronous * (max(state.key_dim, state.value_dim) <= execution.MAX_STATE_WIDTH)
        recurring = where(fused, chunk * in_kernels, minimum(chunk, execution.TORCH_STATE_TOKENS) * in_torch)
        worst = maximum(worst, chunk * projected + recurring)
    return worst


def decode_workspace(shape: ModelShape, batch: Term, queries: Term, splits: Term, element_bytes: Term) -> Term:
    """Logits and distributions of one round, split-KV partials, and activations of the widest layer."""
    rows = batch * queries
    logits = 5 * rows * shape.vocab * element_bytes
    partials = ops.partial_bytes(batch, queries, shape.q_heads, shape.value_dim, splits)
    activations = 4 * maximum(_dense_width(shape), shape.hidden)
    if shape.is_moe:
        activations = maximum(activations, 2 * shape.hidden + _routed_elements(shape))
    return logits + partials + rows * activations * element_bytes


@dataclass(frozen=True)
class HostLayers:
    """Layers on the host. token_bytes: of the tokens of all sequences there, per token position and layer."""

    layers: Term
    token_bytes: Term

    @property
    def some(self) -> Term:
        """1 if there are any, else 0."""
        return minimum(self.layers, 1)


NO_LAYERS = HostLayers(0, 0)


@dataclass(frozen=True)
class Departures:
    """Layers that leave one by one for the memory that those on the device share (SpeContext, Algorithms 1 and 2).

    final: the number of layers on the host when generation ends. memory_bytes: shared. A layer on the device takes
    `unit_bytes` of it for each token that its rows hold, or for each group of `unit_tokens` held as codes; one on the
    host keeps `host_bytes`. queries: tokens that a pass adds to a row before any is dropped.
    """

    adaptive: Term
    layers: Term
    final: Term
    memory_bytes: Term
    unit_bytes: Term
    unit_tokens: Term
    host_bytes: Term
    queries: Term
    coded: Term

    def layer_bytes(self, tokens: Term) -> Term:
        """Bytes of one layer on the device, of rows of `tokens` tokens and those of a pass."""
        held = tokens + self.queries
        return self.unit_bytes * maximum(_floor(held / self.unit_tokens) - self.coded, 0)

    def final_bytes(self, tokens: Term) -> Term:
        """Bytes of the memory that are needed in the end, of rows of `tokens` tokens."""
        return (self.layers - self.final) * self.layer_bytes(tokens) + self.final * self.host_bytes

    def layers_at(self, tokens: Term) -> Term:
        """Layers on the host before a pass over rows of `tokens` tokens; all of them where none leaves later."""
        layer_bytes = self.layer_bytes(tokens)
        excess_bytes = maximum(self.layers * layer_bytes - self.memory_bytes, 0)
        needed = minimum(_ceiling(excess_bytes / maximum(layer_bytes - self.host_bytes, 1)), self.final)
        return where(self.adaptive, needed, self.final)

    def threshold(self, away: Term) -> Term:
        """S_i: the length from which on `away` layers on the host are too few (Algorithm 1)."""
        units = _floor((self.memory_bytes - away * self.host_bytes) / ((self.layers - away) * self.unit_bytes))
        return (units + 2 * self.coded) * self.unit_tokens - self.coded - self.queries + 1


@dataclass(frozen=True)
class Offloading:
    """Memory with as many layers offloaded as needed, these layers, and the memory that they take of the host.

    spare_bytes: of the memory that may be used, what is left; layers that leave later use it until then.
    """

    memory: MemoryBreakdown
    host: HostLayers
    host_bytes: Term
    spare_bytes: Term
    departures: Departures

    def host_at(self, tokens: Term) -> HostLayers:
        """The layers on the host before a pass over rows of `tokens` tokens."""
        return replace(self.host, layers=self.departures.layers_at(tokens))


def offload_layers(shape: ModelShape, device: Device, strategy: Strategy) -> Offloading:
    """Offloads just enough layers for the peak to fit (SpeContext, Eq 8), where the strategy allows any.

    None where that frees nothing. Where layers leave one by one, those that do so use the whole limit until then.
    """
    parts = resident_memory(shape, device, strategy)
    kv_bytes, plane_bytes = _freed_kv_bytes(shape, device, strategy, parts), _value_plane_bytes(shape, strategy)
    staged_bytes = _staged_bytes(shape, strategy, parts)
    limit_bytes = minimum(device.memory_bytes, strategy.offload.memory_limit_bytes)
    excess_bytes = maximum(parts.peak - limit_bytes, 0)
    freed_bytes = maximum(kv_bytes + plane_bytes, 0)
    some = strategy.offload.active * minimum(excess_bytes, 1) * minimum(freed_bytes, 1)
    needed = _ceiling((excess_bytes + some * staged_bytes) / maximum(freed_bytes, 1))
    layers = some * minimum(where(strategy.offload.all_at_once, shape.kv_layers, needed), shape.kv_layers)
    buffers = parts.buffers + some * staged_bytes - layers * plane_bytes
    memory = replace(parts, kv=parts.kv - layers * kv_bytes, buffers=buffers)
    layer_bytes = _host_bytes_per_layer(shape, strategy, parts)
    spare_bytes = maximum(limit_bytes - memory.peak, 0)
    departures = _departures(shape, device, strategy, layers, spare_bytes)
    kept_bytes = departures.final_bytes(strategy.final_tokens)
    shared_bytes = strategy.offload.adaptive * minimum(layers, 1) * (departures.memory_bytes - kept_bytes)
    memory = replace(memory, kv=memory.kv + shared_bytes)
    host = HostLayers(layers, layer_bytes / strategy.final_tokens)
    return Offloading(memory, host, layers * layer_bytes, spare_bytes, departures)


def _departures(shape: ModelShape, device: Device, strategy: Strategy, final: Term, spare_bytes: Term) -> Departures:
    """Layers of which `final` are on the host in the end, with `spare_bytes` more than they need then."""
    full, group = strategy.stores_full_kv, strategy.kv_group
    code_bytes = code_memory(shape, strategy.batch, group, strategy.code_planes, group)
    unit_bytes = where(full, full_kv(shape, strategy.batch, 1, device.element_bytes), code_bytes) / shape.kv_layers
    departures = Departures(
        adaptive=strategy.offload.adaptive,
        layers=shape.kv_layers,
        final=final,
        memory_bytes=0,
        unit_bytes=unit_bytes,
        unit_tokens=where(full, 1, group),
        host_bytes=full * _host_slots(strategy) * unit_bytes,
        queries=strategy.max_queries,
        coded=1 - full,
    )
    whole_bytes = shape.kv_layers * departures.layer_bytes(strategy.final_tokens)
    kept_bytes = departures.final_bytes(strategy.final_tokens)
    spare_units = _floor(minimum(spare_bytes, UNLIMITED_BYTES) / unit_bytes)
    return replace(departures, memory_bytes=minimum(kept_bytes + spare_units * unit_bytes, whole_bytes))


def offload_thresholds(
    shape: ModelShape, device: Device, strategy: Strategy, reserved_tokens: int = 0
) -> tuple[int, ...]:
    """Algorithm 1 of SpeContext on this package's own memory model: S_0..S_L for one strategy in numbers.

    From length S_i on, more than i layers must be offloaded. The largest length that fits is found by bisection, for
    all layers at once. Memory grows with the length except where prompts begin to use the draft weights' memory, so
    the bisection starts there. Lengths never fall along the list (SpeContext-3); `reserved_tokens` keeps slots free,
    gamma + 1 of them when speculating (SpeContext-2).
    """
    layers = np.arange(shape.kv_layers + 1)
    fits, too_long = np.zeros(layers.size), np.full(layers.size, float(execution.MAX_TOKENS))
    middle = np.full(layers.size, float(execution.DRAFT_SWAP_PROMPT_TOKENS))
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
    if device.engine is not None:
        return device.engine.memory(shape, strategy)
    element_bytes, batch = device.element_bytes, strategy.batch
    tokens = strategy.kept_tokens + strategy.new_tokens
    slots = strategy.stores_full_kv * (tokens + strategy.max_queries)
    buffered = (1 - strategy.stores_full_kv) * (2 * strategy.kv_group + strategy.max_queries)
    final = final_tokens(shape, strategy)
    codes = code_memory(shape, batch, tokens, strategy.code_planes, strategy.kv_group, final)
    arena_capacity_bytes = _arena_capacity_bytes(shape, device, strategy)
    copy_bytes = device.asynchronous * (1 - strategy.target.dense) * dense_copy(shape, element_bytes)
    splits = execution.choose_splits(batch, shape.kv_heads, strategy.kept_tokens, device.num_sms)
    separate_head = strategy.target.head_bytes, 1 - strategy.target.head_dense, strategy.target.table_saved_bytes
    # Streams that call a library's products: of prompts, and of rounds with too many rows for this package's head.
    streams = 1 + indicator(execution.CUDA_LARGE_GEMM_ROWS + 1, batch * strategy.max_queries)
    together = strategy.prompt_chunks.longest + strategy.appended_tokens
    states = state_memory(shape, batch, strategy.max_queries, element_bytes)
    return MemoryBreakdown(
        weights=weight_memory(shape, strategy.target.weight_bytes, element_bytes, *separate_head),
        draft_weights=_draft_weights(shape, strategy),
        kv=full_kv(shape, batch, slots, element_bytes, final)
        + window_kv(shape, strategy, element_bytes, final)
        + codes
        + rotated_keys(shape, strategy, element_bytes, tokens + strategy.max_queries)
        + index_memory(shape, batch, tokens),
        buffers=full_kv(shape, batch, buffered, element_bytes, final)
        - rotated_keys(shape, strategy, element_bytes, buffered)
        + _selection_state(shape, device, strategy, tokens)
        + head_memory(shape, strategy, element_bytes, tokens)
        + states,
        prefill_workspace=prefill_workspace(
            shape,
            together,
            element_bytes,
            arena_capacity_bytes,
            copy_bytes,
            eviction_workspace(shape, strategy, element_bytes),
            chunk_buffers(shape, strategy, element_bytes),
            execution.prefill_chunk_tokens(device.asynchronous, strategy.target.grouped_experts),
            device.grouped_experts,
            _copies_experts(shape, device, strategy) * expert_copy(shape, element_bytes),
            device.asynchronous,
        ),
        decode_workspace=decode_workspace(shape, batch, strategy.max_queries, splits, element_bytes),
        libraries=device.asynchronous * streams * execution.CUBLAS_WORKSPACE_BYTES,
    )


def chunk_buffers(shape: ModelShape, strategy: Strategy, element_bytes: Term) -> tuple[Term, ...]:
    """Bytes of the buffers that live through a prompt's prefill, in the order of their allocation.

    Those of the longest chunk and of what a layer holds ahead of it; and what all layers hold between chunks, where
    the cache has codes alone: in full precision it lies in the cache.
    """
    chunks = strategy.prompt_chunks
    several = minimum(chunks.count - 1, 1)
    held = several * strategy.kept_tokens
    buffers = prompt_buffers(shape, chunks.longest + strategy.appended_tokens, element_bytes, held)
    between = (1 - strategy.stores_full_kv) * full_kv(shape, 1, held, element_bytes)
    return (*buffers, between)


def eviction_workspace(shape: ModelShape, strategy: Strategy, element_bytes: Term) -> Term:
    """The maximum of three: a block of scores, the ranking of a layer's tokens, and a copy of those that stay."""
    ratio, tokens = shape.q_heads / shape.kv_heads, strategy.scored_tokens
    block = minimum(
        strategy.scoring_queries * ratio * tokens, maximum(execution.EVICTION_SCORE_ELEMENTS, ratio * tokens)
    )
    block_bytes = block * (element_bytes + ops.SCORE_BYTES)
    copied_bytes = strategy.kept_tokens * shape.kv_elements_per_token_per_layer * element_bytes
    ranked_bytes = shape.kv_heads * tokens * ops.RANKING_BYTES
    return strategy.evicts * maximum(maximum(block_bytes, ranked_bytes), copied_bytes)


def _selection_state(shape: ModelShape, device: Device, strategy: Strategy, tokens: Term) -> Term:
    """What tokens are chosen by: bounds or keys of few bits, scores, projections, and values gathered by token."""
    elements = shape.kv_elements_per_token_per_layer / 2
    key_bytes = elements * (strategy.held_keys * device.element_bytes + strategy.held_plane_bits / 8)
    projections = maximum(strategy.draft.projected_params, strategy.target.projected_params) * device.element_bytes
    score_bytes = strategy.held_score_bytes + (strategy.max_queries - 1) * strategy.draft.query_score_bytes
    return strategy.batch * tokens * (key_bytes + score_bytes) + projections


def swapped_bytes(shape: ModelShape, device: Device, strategy: Strategy) -> Term:
    """Bytes of the draft's weights that prompts overwrite and the host restores before the first round."""
    buffers = chunk_buffers(shape, strategy, device.element_bytes)
    return arena_bytes(_arena_capacity_bytes(shape, device, strategy), buffers)


def _draft_weights(shape: ModelShape, strategy: Strategy) -> Term:
    return strategy.draft.has_weights * draft_weight_memory(shape, strategy.draft.weight_bytes)


def _arena_capacity_bytes(shape: ModelShape, device: Device, strategy: Strategy) -> Term:
    """The draft weights' bytes if prompts may overwrite them; 0 on a CPU, where a host copy would save nothing."""
    return device.asynchronous * execution.uses_draft_swap(strategy.context) * _draft_weights(shape, strategy)


def _host_bytes_per_layer(shape: ModelShape, strategy: Strategy, parts: MemoryBreakdown) -> Term:
    """Bytes of one offloaded layer that lie on the host: all of its old tokens, or their lower codes.

    Of a target that has what it chooses loaded, codes beside full precision only served to choose, and are not kept;
    others are stored token by token.
    """
    tokens, code_planes, group = strategy.final_tokens, strategy.code_planes, strategy.kv_group
    codes = strategy.target_loads * code_memory(shape, strategy.batch, tokens, code_planes, group)
    lower = strategy.batch * tokens * shape.kv_elements_per_token_per_layer / 2
    rows = strategy.batch * tokens * _row_bytes(shape)
    all_tokens = where(strategy.loads_codes, rows, (parts.kv - codes) / shape.kv_layers)
    return strategy.offload.lower_only * lower + (1 - strategy.offload.lower_only) * all_tokens


def _row_bytes(shape: ModelShape) -> Term:
    """Bytes of a token of one layer whose codes are stored token by token."""
    return 2 * shape.cached_heads * execution.token_row_bytes(shape.head_dim)


def _freed_kv_bytes(shape: ModelShape, device: Device, strategy: Strategy, parts: MemoryBreakdown) -> Term:
    """Bytes of KV freed by offloading one layer. What drafts or the target read at a step stays (SpeContext, Eq 7)."""
    kept = minimum(strategy.offload.budget / (strategy.context + strategy.new_tokens), 1)
    of_codes = strategy.draft.bits / maximum(4 * strategy.code_planes, 1)
    draft_share = minimum(strategy.gamma, 1) * where(minimum(strategy.draft.bits, 1), of_codes, 1)
    stays = (1 - strategy.offload.lower_only) * kept * draft_share
    streamed = _host_bytes_per_layer(shape, strategy, parts) * (1 - stays)
    loaded = parts.kv / shape.kv_layers - _slots_bytes(shape, device, strategy)
    return where(strategy.target_loads, loaded, streamed)


def _slots_bytes(shape: ModelShape, device: Device, strategy: Strategy) -> Term:
    """Slots of a layer on the host whose chosen tokens are loaded: a budget for each query, and recent ones.

    And the tables of what the slots hold, and the scales of keys that are chosen by, or read, as codes. Recent tokens
    of a layer of codes are in its buffer; one group of it is staged while it is flushed.
    """
    batch, group = strategy.batch, strategy.kv_group
    tables = strategy.final_tokens * strategy.offload.slot_table_bytes
    scales = minimum(strategy.code_planes, 1) * 2 * ops.METADATA_BYTES / group
    full_bytes = _host_slots(strategy) * shape.kv_elements_per_token_per_layer * device.element_bytes
    code_bytes = (_host_slots(strategy) - 2 * group - strategy.max_queries) * _row_bytes(shape)
    slots = batch * (where(strategy.loads_codes, code_bytes, full_bytes) + tables)
    staged = strategy.loads_codes * code_memory(shape, batch, group, strategy.code_planes, group) / shape.kv_layers
    return slots + staged + _key_elements(shape, strategy) * scales


def _host_slots(strategy: Strategy) -> Term:
    """Slots of a row on the device, of a full-precision layer on the host: for some old tokens, then for recent ones.

    The old ones are what each query of the target chooses, what a draft does, or the latest groups, which drafts read.
    """
    group, queries = strategy.kv_group, strategy.max_queries
    budget = minimum(strategy.offload.budget, execution.MAX_TOKENS)
    chosen = _ceiling(budget / group) * group
    window = minimum(strategy.gamma, 1) * maximum(_floor(budget / group), 2) * group
    old = where(strategy.target_loads, queries * chosen, where(strategy.draft.loads, chosen, window))
    return old + 2 * group + queries


def _value_plane_bytes(shape: ModelShape, strategy: Strategy) -> Term:
    """Bytes by token of a layer's values in 4 bits, which leave with it: only the 2-bit keys beside them stay."""
    bits = strategy.held_plane_bits / shape.kv_layers * ops.UPPER_BITS / (ops.UPPER_BITS + ops.TWO_BITS)
    return strategy.target_loads * _key_elements(shape, strategy) * bits / 8


def _key_elements(shape: ModelShape, strategy: Strategy) -> Term:
    """Of a layer's old tokens; the values have as many."""
    return strategy.batch * strategy.final_tokens * shape.kv_elements_per_token_per_layer / 2


def _staged_bytes(shape: ModelShape, strategy: Strategy, parts: MemoryBreakdown) -> Term:
    """Slots that layers are copied to from the host, if the target reads all of them."""
    slots = strategy.offload.prefetch + 1
    return strategy.target_reads_all * slots * _host_bytes_per_layer(shape, strategy, parts)


def _ceiling(value: Term) -> Term:
    if is_symbolic(value):
        from sympy import ceiling

        return ceiling(value)
    return np.ceil(value)


def _floor(value: Term) -> Term:
    if is_symbolic(value):
        from sympy import floor

        return floor(value)
    return np.floor(value)
