"""Device memory of a plan: weights, caches, buffers and workspaces, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeplan.roofline import ops
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.cost import Term, indicator, maximum, minimum
from ridgeplan.roofline.execution import (
    DENSE_COPY_BYTES,
    PREFILL_ATTENDED_TOKENS,
    PREFILL_CHUNK_TOKENS,
    WHOLE_WINDOW_ARCHITECTURES,
    padded_prompt,
)
from ridgeplan.roofline.passes import stored_bytes


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
    """Parameters of the matrices that may be quantized: linear layers and experts, without routers and embeddings."""
    dense = (shape.layers - shape.moe_layers) * shape.dense_mlp_params
    sparse = shape.moe_layers * (shape.experts * shape.expert_params + shape.shared_experts_params)
    return shape.layers * shape.attention_params_per_layer + dense + sparse


def matrix_memory(shape: ModelShape, weight_bytes: Term) -> Term:
    """The linear layers and experts at `weight_bytes` per parameter, or at the checkpoint's own bits where fewer."""
    bits, dense_layers = shape.weight_bits, shape.layers - shape.moe_layers
    mlps = dense_layers * shape.dense_mlp_params + shape.moe_layers * shape.shared_experts_params
    return (
        shape.layers * shape.attention_params_per_layer * stored_bytes(bits.attention, weight_bytes)
        + mlps * stored_bytes(bits.mlp, weight_bytes)
        + shape.moe_layers * shape.experts * shape.expert_params * stored_bytes(bits.experts, weight_bytes)
    )


def weight_memory(
    shape: ModelShape, weight_bytes: Term, element_bytes: Term, head_bytes: Term = 0, own_head: Term = 0
) -> Term:
    """The target's weights: matrices at `weight_bytes` per parameter, all others as the checkpoint has them.

    The others are embeddings and the head, and routers and vectors, which are in full precision. Where `own_head` is 1
    the head has `head_bytes` per parameter, and is no longer the embedding's table.
    """
    tables = ("embedding",) if shape.tied_embeddings else ("embedding", "head")
    others = shape.parameters - layer_parameters(shape) - len(tables) * shape.embedding_params
    full_bytes = {part: shape.weight_bits.full_bytes(part, element_bytes) for part in tables}
    head = own_head * (head_bytes - full_bytes.get("head", 0))  # beyond what it takes in full precision
    table_bytes = sum(full_bytes.values()) + head
    return matrix_memory(shape, weight_bytes) + others * element_bytes + shape.embedding_params * table_bytes


def draft_weight_memory(shape: ModelShape, weight_bytes: Term) -> Term:
    """The drafts' own copy of the linear layers and the head; embeddings and norms are the target's."""
    head_bytes = stored_bytes(shape.weight_bits.head, weight_bytes)
    return matrix_memory(shape, weight_bytes) + shape.embedding_params * head_bytes


def full_kv(shape: ModelShape, batch: Term, tokens: Term, element_bytes: Term) -> Term:
    """Full-precision keys and values of `tokens` tokens in every layer.

    Sliding-window layers store the whole context too where the runtime executes the model; they only read less of it.
    """
    return batch * shape.kv_elements_per_token_per_layer * _stored_tokens(shape, tokens) * element_bytes


def windowed_tokens(shape: ModelShape, tokens: Term) -> Term:
    """Tokens of a sequence that all layers store together, where those with a sliding window store no more than it."""
    if shape.window_tokens is None:
        return shape.layers * tokens
    full_layers = shape.layers - shape.window_layers
    return full_layers * tokens + shape.window_layers * minimum(tokens, shape.window_tokens)


def _stored_tokens(shape: ModelShape, tokens: Term) -> Term:
    whole = shape.architecture in WHOLE_WINDOW_ARCHITECTURES
    return shape.layers * tokens if whole else windowed_tokens(shape, tokens)


def code_memory(shape: ModelShape, batch: Term, tokens: Term, planes: Term, group: Term) -> Term:
    """Codes of `tokens` tokens in every layer, in `planes` 4-bit planes with scales and minima; 0 without planes."""
    stored = _stored_tokens(shape, tokens)
    codes = ops.quantized_bytes(batch, shape.cached_heads, shape.head_dim, stored, 4 * planes, group)
    return minimum(planes, 1) * codes


def prompt_buffers(shape: ModelShape, tokens: Term, element_bytes: Term, held: Term = 0) -> tuple[Term, ...]:
    """Bytes of the buffers of tokens that go through the layers together, in the order of their allocation.

    These are the tokens' hidden states, and one layer's queries, keys and values, at the length that attends. held:
    earlier tokens, whose keys and values are ahead of these.
    """
    kv_width, attending = shape.kv_elements_per_token_per_layer / 2, padded_prompt(tokens)
    keys = (held + attending) * kv_width * element_bytes
    return tokens * shape.hidden * element_bytes, attending * shape.q_width * element_bytes, keys, keys


def arena_bytes(capacity_bytes: Term, buffers: Sequence[Term]) -> Term:
    """Bytes of the buffers that fit an arena: each in turn, if the rest of the capacity holds all of it."""
    taken_bytes: Term = 0
    for buffer in buffers:
        taken_bytes = taken_bytes + buffer * indicator(taken_bytes + buffer, capacity_bytes)
    return taken_bytes


def dense_copy(shape: ModelShape, element_bytes: Term) -> Term:
    """The dense copy of a quantized weight that prefill multiplies by on a GPU: of the widest layer, or the largest."""
    return minimum(DENSE_COPY_BYTES, 2 * shape.intermediate * shape.hidden * element_bytes)


def prefill_workspace(
    shape: ModelShape,
    tokens: Term,
    element_bytes: Term,
    arena_capacity_bytes: Term = 0,
    copy_bytes: Term = 0,
    scored_bytes: Term = 0,
    buffers: Sequence[Term] | None = None,
) -> Term:
    """Workspace of layer-major prefill, one sequence at a time, of which `tokens` go through the layers together.

    It holds the buffers, by default `prompt_buffers`, and either the attention output of a few heads or one chunk's
    activations. Buffers that fit the draft weights' memory, `arena_capacity_bytes`, are not counted.
    copy_bytes: `dense_copy` if the weights are quantized. scored_bytes: an eviction's, while it scores the tokens.
    """
    chunk = minimum(tokens, PREFILL_CHUNK_TOKENS)
    kv_width = shape.kv_elements_per_token_per_layer
    # Rows before and after RoPE, or the product's copy of its weight; gate and up with what they become, or that copy.
    projected = chunk * (shape.hidden + shape.q_width + kv_width) * element_bytes
    projected = projected + maximum(chunk * shape.q_width * element_bytes, copy_bytes)
    activated = chunk * (2 * shape.hidden + 2 * shape.intermediate) * element_bytes
    activated = activated + maximum(chunk * shape.intermediate * element_bytes, copy_bytes)
    # Whole heads attend at once, at least one.
    attending = padded_prompt(tokens)
    heads_tokens = minimum(maximum(attending, PREFILL_ATTENDED_TOKENS), attending * shape.kv_heads)
    attended = heads_tokens * shape.q_width / shape.kv_heads * element_bytes
    buffers = prompt_buffers(shape, tokens, element_bytes) if buffers is None else buffers
    allocated = sum(buffers) - arena_bytes(arena_capacity_bytes, buffers)
    return allocated + maximum(maximum(projected, activated), maximum(attended, scored_bytes))


def decode_workspace(shape: ModelShape, batch: Term, queries: Term, splits: Term, element_bytes: Term) -> Term:
    """Logits and distributions of one round, split-KV partials, and activations of the widest layer."""
    rows = batch * queries
    logits = 5 * rows * shape.vocab * element_bytes
    partials = ops.partial_bytes(batch, queries, shape.q_heads, shape.value_dim, splits)
    return logits + partials + 4 * rows * maximum(shape.intermediate, shape.hidden) * element_bytes
