"""Student and teacher of distillation: the one-layer model that is trained, and the model that it learns from."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.runtime.buffers import Arena
from ridgeplan.runtime.model.checkpoint import UNTRUSTED, StateDict
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.prefill_layer import (
    LayerBuffers,
    Parts,
    TextPass,
    attend_layer,
    finish_layer,
    project_layer,
)
from ridgeplan.runtime.model.weights import AttentionWeights, DecoderWeights, LayerWeights
from ridgeplan.runtime.retrieval.head import Head, HeadConfig, HeadWeights, probe_of

SINKS, RECENT = 4, 128  # tokens that selections read in any case
TEMPERATURE = 2.0  # of the attention that is taught: a budget holds far more tokens than the few with most of it


def visible_tokens(queries: Tensor, tokens: int) -> Tensor:
    """bool [queries, tokens]: the tokens up to each query, int64 [queries]."""
    return torch.arange(tokens, device=queries.device) <= queries[:, None]


def distant_tokens(queries: Tensor, tokens: int) -> Tensor:
    """bool [queries, tokens]: the visible tokens that are neither sinks nor recent for each query."""
    places = torch.arange(tokens, device=queries.device)
    return (places >= SINKS) & (queries[:, None] - places >= RECENT)


@dataclass(frozen=True, eq=False)
class Teacher:
    """The model to learn from. Its logits are computed a few tokens at a time, as a whole passage's are large."""

    decoder: Decoder
    weights: DecoderWeights

    @torch.no_grad()
    def read(self, tokens: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        """The normed last hidden states [tokens, hidden] of a passage [tokens], and the attention of some queries.

        queries: int64 [queries], places in the passage; each has distant tokens. The attention is float32 [kv_heads,
        layers, queries, tokens], softened: the weights of distant tokens, mean over the query heads of a KV head, to
        the power 1 / TEMPERATURE and as shares of their own sum.
        """
        shape, hidden = self.decoder.config.shape, functional.embedding(tokens, self.weights.embedding)
        buffers = LayerBuffers.take(Arena.without_memory(hidden.device), shape, hidden)
        parts, masses = Parts(len(hidden), len(hidden)), list[Tensor]()
        text = _ReadPass(self.decoder, buffers, parts, queries, masses)
        for index, layer in enumerate(self.weights.layers):
            mixed = layer.mixer.prefill(text, index, layer, hidden)
            finish_layer(layer, hidden, mixed, parts)
        return self.weights.norm(hidden, None)[1], torch.stack(masses, dim=1)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [tokens, vocab] of some of the hidden states."""
        return self.weights.logits(hidden).float()


@dataclass(frozen=True, eq=False)
class _ReadPass(TextPass):
    """A passage on its way through the layers; `masses` receives each layer's attention of `queries`."""

    queries: Tensor
    masses: list[Tensor]

    def attend(self, index: int, layer: LayerWeights, attention: AttentionWeights, hidden: Tensor) -> Tensor:
        project_layer(self.decoder, index, layer, attention, hidden, self.buffers, self.parts)
        self.masses.append(softened_attention(self.buffers.queries[self.queries], self.buffers.keys, self.queries))
        attend_layer(self.buffers, self.parts, self.decoder.config.layers[index], attention.sinks)
        return self.buffers.queries


def softened_attention(target_queries: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
    """What is taught of one layer, float32 [kv_heads, queries, tokens], as `Teacher.read` has it.

    target_queries: [queries, q_heads, head_dim], of the tokens at `queries`; keys: [kv_heads, tokens, head_dim].
    """
    tokens = keys.shape[1]
    heads = target_queries.float().unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)
    logits = heads @ keys.float().mT[:, None] * target_queries.shape[-1] ** -0.5
    logits.masked_fill_(~visible_tokens(queries, tokens), -torch.inf)
    kept = logits.softmax(-1).mean(1).pow(1 / TEMPERATURE) * distant_tokens(queries, tokens)
    return kept / kept.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


FROZEN = ("model.embed_tokens.", "lm_head.")


def make_student(config: Any, state: StateDict, device: torch.device, by_layer: bool = False) -> Any:
    """A model of the target's family with one layer, on `device`, in float32.

    It starts as the target's first layer, whose inputs are embeddings too. state: the target's weights, which keep
    their tensors. by_layer: it also learns a query for each KV head of each of the target's layers, which its own
    forward does not use; not published.
    """
    reduced = copy.deepcopy(config)
    reduced.num_hidden_layers, reduced.use_cache, reduced.layer_types = 1, False, ["full_attention"]
    reduced.rope_parameters = {"rope_type": "default", "rope_theta": reduced.rope_parameters["rope_theta"]}
    if getattr(reduced, "use_sliding_window", None):
        reduced.use_sliding_window = False
    with torch.device("meta"):
        student = transformers.AutoModelForCausalLM.from_config(reduced, attn_implementation="sdpa", **UNTRUSTED)
    initial = {name: state.tensors.get(name, None) for name in student.state_dict()}
    values = {
        name: value.float().to(device, copy=not name.startswith(FROZEN))
        for name, value in initial.items() if value is not None
    }  # fmt: skip
    student.load_state_dict(values, strict=False, assign=True)
    student.tie_weights()
    student.model.rotary_emb = type(student.model.rotary_emb)(config=reduced).to(device)
    if by_layer:
        _add_layer_queries(student, config.num_hidden_layers)
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return student


def _add_layer_queries(student: Any, layers: int) -> None:
    """They start as the first query head of each KV head of the student; ordered by KV head first, as its heads are."""
    attention = student.model.layers[0].self_attn
    start, kv_heads = attention.q_proj, attention.k_proj.out_features // attention.head_dim
    copies = {
        name: value.detach().unflatten(0, (kv_heads, -1, attention.head_dim))[:, :1]
        .repeat(1, layers, *[1] * value.dim()).flatten(0, 2)
        for name, value in start.named_parameters()
    }  # fmt: skip
    with torch.device("meta"):
        projection = nn.Linear(start.in_features, len(copies["weight"]), bias="bias" in copies)
    projection.load_state_dict(copies, assign=True)
    attention.layer_queries = projection


def query_projection(student: Any) -> Any:
    """The linear layer whose outputs are the head's queries."""
    attention = student.model.layers[0].self_attn
    return getattr(attention, "layer_queries", attention.q_proj)


def trained_parameters(student: Any, head_only: bool = False) -> dict[str, Tensor]:
    """The trained parameters, by name. head_only: only those of the retrieval head."""
    layer = student.model.layers[0]
    attention, norms = layer.self_attn, ("q_norm", "k_norm")
    head = [layer.input_layernorm, query_projection(student), attention.k_proj]
    head += [getattr(attention, name) for name in norms if hasattr(attention, name)]
    kept = {value for module in head for value in module.parameters()} if head_only else set(student.parameters())
    return {name: value for name, value in student.named_parameters() if value.requires_grad and value in kept}


def pruned(student: Any, shape: ModelShape, context: int) -> Head:
    """The student's retrieval head: its first norm, and its query and key projections with their biases and norms.

    context: tokens of the sequences that it was trained on.
    """
    layer, norm = student.model.layers[0], student.model.layers[0].input_layernorm
    attention, config, queries = layer.self_attn, student.config, query_projection(student)
    by_layer = queries is not attention.q_proj
    head_config = HeadConfig(
        model=shape.name,
        hidden=shape.hidden,
        vocab=shape.vocab,
        q_heads=queries.out_features // shape.head_dim,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        context=context,
        layers=shape.layers if by_layer else 1,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        norm_eps=config.rms_norm_eps,
    )
    tensors: dict[str, Any] = {
        "norm": norm.weight,
        "q": queries.weight,
        "k": attention.k_proj.weight,
        "q_bias": queries.bias,
        "k_bias": attention.k_proj.bias,
        "q_norm": getattr(getattr(attention, "q_norm", None), "weight", None),
        "k_norm": getattr(getattr(attention, "k_norm", None), "weight", None),
        "probe": probe_of(student.model.embed_tokens.weight),
    }
    copies: dict[str, Any] = {name: x if x is None else x.detach().clone() for name, x in tensors.items()}
    return Head(head_config, HeadWeights(**copies))
