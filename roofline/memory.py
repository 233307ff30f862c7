"""Memory a plan takes, and SpeContext's model of it: Eq 6 to 8 and the offload thresholds of Algorithm 1."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Term
from ridgeplan.roofline.numbers import larger, smaller
from ridgeplan.roofline.shapes import ModelShape

PREFILL_CHUNK_TOKENS = 2048  # rows of one chunk of the layer-major prefill


@dataclass(frozen=True)
class MemoryParts:
    """Bytes on the device by purpose. Terms may be arrays or sympy expressions."""

    weights: Term
    draft_weights: Term
    kv: Term
    buffers: Term
    prefill_workspace: Term
    decode_workspace: Term

    @property
    def resident(self) -> Term:
        """What stays for the whole generation."""
        return self.weights + self.draft_weights + self.kv + self.buffers

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
        """The larger of both peaks: what must fit."""
        return self.resident + larger(self.prefill_workspace, self.decode_workspace)


def layer_parameters(shape: ModelShape) -> int:
    """Parameters of all matrices that weight quantization may touch: linear layers and experts, not the router."""
    dense = (shape.layers - shape.moe_layers) * shape.dense_mlp_params
    sparse = shape.moe_layers * (shape.experts * shape.expert_params + shape.shared_experts_params)
    return shape.layers * shape.attention_params_per_layer + dense + sparse


def weight_memory(shape: ModelShape, weight_bytes: Term, element_bytes: Term) -> Term:
    """One copy of the weights: matrices at `weight_bytes` per parameter, embeddings and vectors in full precision."""
    matrices = layer_parameters(shape)
    return matrices * weight_bytes + (shape.parameters - matrices) * element_bytes


def draft_weight_memory(shape: ModelShape, weight_bytes: Term) -> Term:
    """The drafts' second copy of the linear layers; embeddings, head and norms are shared with the target."""
    return layer_parameters(shape) * weight_bytes


def full_kv(shape: ModelShape, batch: Term, tokens: Term, element_bytes: Term) -> Term:
    """Full-precision keys and values of `tokens` tokens in every layer (window layers hold their window only)."""
    windowed = smaller(tokens, shape.window_tokens) if shape.window_tokens else 0
    layer_tokens = (shape.layers - shape.window_layers) * tokens + shape.window_layers * windowed
    return batch * shape.kv_elements_per_token_per_layer * layer_tokens * element_bytes


def code_memory(shape: ModelShape, batch: Term, tokens: Term, planes: Term, group: Term) -> Term:
    """Codes of `planes` 4-bit planes for `tokens` tokens per layer, with their scales and minima if any plane."""
    elements = shape.kv_elements_per_token_per_layer
    codes = ops.code_bytes(batch, elements, tokens, 4 * planes)
    metadata = ops.metadata_bytes(batch, shape.kv_heads, shape.head_dim, tokens, group) * smaller(planes, 1)
    return shape.layers * (codes + metadata)


def prefill_workspace(shape: ModelShape, tokens: Term, element_bytes: Term) -> Term:
    """Layer-major prefill, one sequence at a time: hidden states of the prompt, one layer's keys and values, and
    one chunk's queries, attention output and MLP activations."""
    chunk = smaller(tokens, PREFILL_CHUNK_TOKENS)
    width = larger(3 * shape.intermediate, 3 * shape.q_width + 2 * shape.hidden)
    per_token = shape.hidden + shape.kv_elements_per_token_per_layer
    return (tokens * per_token + chunk * width) * element_bytes


def decode_workspace(shape: ModelShape, batch: Term, queries: Term, splits: Term, element_bytes: Term) -> Term:
    """Logits and probabilities of one round, split-KV partials and activations of the widest layer."""
    rows = batch * queries
    logits = 3 * rows * shape.vocab * ops.LOGIT_BYTES
    partials = ops.partial_bytes(batch, queries, shape.q_heads, shape.value_dim, splits)
    return logits + partials + 4 * rows * larger(shape.intermediate, shape.hidden) * element_bytes


@dataclass(frozen=True)
class SpeContextMemory:
    """SpeContext's memory model, Table 1's symbols: Eq 6 and 7, and Algorithm 1's thresholds.

    `retrieval_layers` is the '+1' of Eq 6: the retrieval head's cache in units of a layer; the paper counts 1,
    but the pruned head keeps keys only, so 0.5 is exact (errata 4). `repeat_buffers` is alpha: one layer of
    repeat_kv per group of heads in the paper, 0 with kernels that group heads (errata 4).
    `paper_form` drops the factor 4 from Algorithm 1's offload term as the paper's line 3 does (errata 1).
    """

    model_bytes: Term
    retrieval_model_bytes: Term
    layers: int
    kv_heads: Term
    head_dim: Term
    requests: Term
    budget_tokens: Term
    retrieval_layers: Term = 0.5
    repeat_buffers: Term = 0
    runtime_factor: Term = 1.3  # runtime buffers are 30% of the models, section 6.2
    kv_bytes: Term = 4  # a key and a value element in 16 bits
    paper_form: bool = False

    @property
    def fixed_bytes(self) -> Term:
        """1.3 (M_O + M_D)."""
        return self.runtime_factor * (self.model_bytes + self.retrieval_model_bytes)

    @property
    def extra_layers(self) -> Term:
        """What Eq 6 adds to the layers of the model: 1 + alpha."""
        return self.retrieval_layers + self.repeat_buffers

    @property
    def row_bytes(self) -> Term:
        """One token of one layer for all requests: 4 R H D."""
        return self.kv_bytes * self.requests * self.kv_heads * self.head_dim

    def all_bytes(self, tokens: Term) -> Term:
        """Eq 6: everything on the GPU at sequence length `tokens`."""
        return self.part_bytes(tokens, 0)

    def part_bytes(self, tokens: Term, cpu_layers: Term) -> Term:
        """Eq 7: `cpu_layers` layers keep only the budget on the GPU."""
        gpu_layers = self.layers - cpu_layers
        return self.fixed_bytes + self.row_bytes * (
            (gpu_layers + self.extra_layers) * tokens + cpu_layers * self.budget_tokens
        )

    def thresholds(self, gpu_memory_bytes: float, reserved_tokens: int = 0) -> tuple[int, ...]:
        """Algorithm 1: S_0..S_L; from length S_i on, more than i layers must be on the CPU.

        Lengths never fall along the list and are never negative (errata 3): offloading a layer frees memory only
        where sequences are longer than the budget. `reserved_tokens` keeps gamma + 1 slots free (errata 2).
        """
        lengths: list[int] = []
        for cpu_layers in range(self.layers + 1):
            length = self._threshold(gpu_memory_bytes, cpu_layers) - reserved_tokens
            lengths.append(max(length, lengths[-1] if lengths else 0))
        return tuple(lengths)

    def _threshold(self, gpu_memory_bytes: float, cpu_layers: int) -> int:
        factor = self.row_bytes / self.kv_bytes if self.paper_form else self.row_bytes
        offloaded = cpu_layers * self.budget_tokens * factor
        gpu_layers = self.layers + self.extra_layers - cpu_layers
        if gpu_layers == 0:
            return 0
        return math.floor((gpu_memory_bytes - self.fixed_bytes - offloaded) / (gpu_layers * self.row_bytes))


def layers_to_offload(thresholds: tuple[int, ...], tokens: int) -> int:
    """Algorithm 2, lines 4 to 7: layers on the CPU at length `tokens`; the text's off-by-one is not followed
    (errata 2). Returns at most the number of layers."""
    return min(sum(tokens >= threshold for threshold in thresholds), len(thresholds) - 1)
