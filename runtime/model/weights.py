"""The decoder's weights as plain tensors, with projections of the same input fused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ridgeplan.kernels.linear import gguf_rows
from ridgeplan.kernels.linear.gguf import GgufWeight
from ridgeplan.kernels.state import DeltaVectors, delta_step, gated_rms_norm
from ridgeplan.roofline.catalog.layers import Attention
from ridgeplan.runtime.model.linear import Int4, Int8, Linear, Stored
from ridgeplan.runtime.model.norms import Norm, RMSNorm

if TYPE_CHECKING:
    from ridgeplan.runtime.model.decoder import Decoder, Step
    from ridgeplan.runtime.model.latent import LatentAttentionWeights


class TokenMixer(Protocol):
    """Weights of what mixes a layer's tokens, such as attention, and how a step runs it."""

    @property
    def output(self) -> Linear:
        """The projection of what is mixed to the stream."""

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The matrix products that a plan may quantize."""

    def with_projections(self, change: Callable[[Linear], Linear]) -> TokenMixer:
        """The same mixer with `change` applied to each projection."""

    def step(self, decoder: Decoder, index: int, normed: Tensor, step: Step) -> Tensor:
        """The update [rows, queries, hidden] of layer `index` for normed [rows, queries, hidden]."""

    def prefill(self, prompt: PromptPass, index: int, layer: LayerWeights, hidden: Tensor) -> Tensor:
        """What `output` projects, [tokens, ...], of layer `index` for a prompt's hidden [tokens, hidden]."""


class PromptPass(Protocol):
    """A prompt on its way through the layers: one method for each kind of token mixer."""

    def attend(self, index: int, layer: LayerWeights, attention: AttentionWeights, hidden: Tensor) -> Tensor:
        """Attention's output [tokens, q_heads, head_dim] of layer `index` for hidden [tokens, hidden]."""

    def recur(self, index: int, layer: LayerWeights, state: DeltaWeights, hidden: Tensor) -> Tensor:
        """The state's output [tokens, value heads, value_dim] of layer `index` for hidden [tokens, hidden]."""

    def attend_latent(
        self, index: int, layer: LayerWeights, attention: LatentAttentionWeights, hidden: Tensor
    ) -> Tensor:
        """The same of latent attention: [tokens, q_heads, v_head_dim]."""


class MLP(Protocol):
    """Weights of a layer's MLP, dense or routed."""

    def __call__(self, x: Tensor, prompt: bool = False) -> Tensor:
        """x [..., hidden] to [..., hidden]. prompt: as of `ridgeplan.kernels.experts.routed_mlp`."""

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The matrix products that a plan may quantize."""

    def with_projections(self, change: Callable[[Linear], Linear]) -> MLP:
        """The same MLP with `change` applied to each projection."""


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """Attention of one layer. qkv: projections to queries, keys and values, stacked in this order.

    qk_norm: of [q_heads + kv_heads, head_dim], for families that normalize each head's queries and keys. wide_norms: of
    all heads' queries and of all heads' keys together, in other families. sinks: [q_heads], a logit of each head that
    joins its softmax and has no value. value_norm: of each head's values, which are keys ahead of their norm where qkv
    ends with these. gate: to [q_heads head_dim], for families whose output is gated.
    """

    qkv: Linear
    output: Linear
    qk_norm: RMSNorm | None = None
    gate: Linear | None = None
    wide_norms: tuple[RMSNorm, RMSNorm] | None = None
    sinks: Tensor | None = None
    value_norm: RMSNorm | None = None

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The matrix products that a plan may quantize."""
        return (self.qkv, self.output) if self.gate is None else (self.qkv, self.gate, self.output)

    def with_projections(self, change: Callable[[Linear], Linear]) -> AttentionWeights:
        """The same attention with `change` applied to each projection."""
        gate = None if self.gate is None else change(self.gate)
        return dataclasses.replace(self, qkv=change(self.qkv), gate=gate, output=change(self.output))

    def gated(self, attended: Tensor, normed: Tensor) -> Tensor:
        """Attention's output [..., q_heads, head_dim] times its gate, if it has one."""
        return attended if self.gate is None else attended * self.gate(normed).sigmoid_().view(attended.shape)

    def step(self, decoder: Decoder, index: int, normed: Tensor, step: Step) -> Tensor:
        """Attention of the step's tokens over the cache, which their keys and values enter."""
        settings = decoder.config.layers[index]
        reads, tables = step.metadata.layer_metadata(settings.place), step.tables[settings.rotary]
        slots = *step.cache.full(settings.place), reads.slots
        q = decoder.project(index, self, normed, tables, reads.positions, *slots)
        attended = decoder.attend(index, self, step.cache, reads, q)
        return self.output(self.gated(attended, normed).flatten(2))

    def projected(self, normed: Tensor, attention: Attention) -> Tensor:
        """Queries, keys and values before their rotation, [..., all heads]; values normalized, and queries and keys in
        families with wide norms."""
        qkv = self.qkv(normed)
        if self.value_norm is not None:
            values = qkv[..., -attention.kv_width :].unflatten(-1, (attention.kv_heads, -1)).contiguous()
            values = self.value_norm(values, None)[1].flatten(-2)
            qkv = torch.cat([qkv[..., : attention.q_width + attention.kv_width], values], dim=-1)
        if self.wide_norms is None:
            return qkv
        start = 0
        for norm in self.wide_norms:
            part = qkv[..., start : start + len(norm.weight)]
            part.copy_(norm(part, None)[1])
            start += len(norm.weight)
        return qkv

    def prefill(self, prompt: PromptPass, index: int, layer: LayerWeights, hidden: Tensor) -> Tensor:
        """Attention of a prompt's tokens, whose keys and values the pass keeps."""
        return prompt.attend(index, layer, self, hidden)


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """A gated delta rule in place of attention (kernels/state).

    inputs: projections to queries, keys and values, step sizes and decays by head, and the output's gate, stacked in
    this order. vectors: which drafts share, as their passes put accepted tokens into the states, too. norm: of each
    head's output.
    """

    inputs: Linear
    vectors: DeltaVectors
    norm: RMSNorm
    output: Linear

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The matrix products that a plan may quantize."""
        return self.inputs, self.output

    def with_projections(self, change: Callable[[Linear], Linear]) -> DeltaWeights:
        """The same state with `change` applied to each projection."""
        return dataclasses.replace(self, inputs=change(self.inputs), output=change(self.output))

    def gated(self, out: Tensor, projected: Tensor) -> Tensor:
        """The rule's output [..., value heads, value_dim] as `output` projects it, of projected [..., inputs]."""
        gate = projected[..., -out.shape[-2] * out.shape[-1] :]
        return gated_rms_norm(out, gate, self.norm.weight, self.norm.eps)

    def step(self, decoder: Decoder, index: int, normed: Tensor, step: Step) -> Tensor:
        """The rule for the step's tokens, which only later passes put into the states."""
        assert step.cache.states is not None and step.accepted is not None, "the cache has the model's states"
        projected = self.inputs(normed)
        rows = step.cache.states.rows(decoder.config.layers[index].place, step.accepted)
        return self.output(self.gated(delta_step(projected, rows, step.metadata.positions, self.vectors), projected))

    def prefill(self, prompt: PromptPass, index: int, layer: LayerWeights, hidden: Tensor) -> Tensor:
        """The rule for a prompt's tokens, after which the pass keeps the state."""
        return prompt.recur(index, layer, self, hidden)


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer: a token mixer and an MLP, each with a norm of what it reads and, in some families, of its output.

    scale: of the stream behind the layer; norms of outputs hold it, too.
    """

    mixer_norm: Norm
    mixer: TokenMixer
    mlp_norm: Norm
    mlp: MLP
    mixer_output_norm: Norm | None = None
    mlp_output_norm: Norm | None = None
    scale: float = 1.0

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The matrix products that a plan may quantize, in the order in which a step runs them."""
        return *self.mixer.projections, *self.mlp.projections

    def with_projections(self, change: Callable[[Linear], Linear]) -> LayerWeights:
        """The same layer with `change` applied to each projection."""
        return dataclasses.replace(
            self, mixer=self.mixer.with_projections(change), mlp=self.mlp.with_projections(change)
        )

    def after_mixer(self, hidden: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """The stream with the mixer's output added, and the MLP's input."""
        stream = hidden if self.scale == 1 else hidden * self.scale
        return self.mlp_norm(stream, _normed(self.mixer_output_norm, update))

    def after_mlp(self, normed: Tensor, prompt: bool = False) -> Tensor:
        """The update of the MLP for its input."""
        return _normed(self.mlp_output_norm, self.mlp(normed, prompt))


def _normed(norm: Norm | None, update: Tensor) -> Tensor:
    return update if norm is None else norm(update, None)[1]


@dataclass(frozen=True)
class WeightFormat:
    """Bits of projections, inputs per scale where they are codes, and whether upper planes were fitted for drafts.

    stored: projections are as a GGUF file stores them. The fields are in the order of a plan's `Weights.target_format`.
    """

    bits: int = 16
    group: int | None = None
    hierarchical: bool = False
    stored: bool = False


@dataclass(frozen=True, eq=False)
class DecoderWeights:
    """All weights; `head` may share the embedding's storage. logit_cap: c of c tanh(logits / c).

    embedding: [vocab, hidden]; without rows where `table` holds it as a GGUF file stores it.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Linear
    logit_cap: float | None = None
    table: GgufWeight | None = None

    def embedded(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding [..., hidden] for tokens [...]."""
        rows = self.embedding.new_empty(tokens.numel(), self.embedding.shape[1])
        return self.embed(tokens.flatten(), rows).view(*tokens.shape, -1)

    def embed(self, tokens: Tensor, out: Tensor) -> Tensor:
        """Writes the rows for tokens [count] into out [count, hidden], and returns it."""
        if self.table is not None:
            return gguf_rows(self.table, tokens, out)
        return torch.index_select(self.embedding, 0, tokens, out=out)

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [..., vocab] of the last norm's output [..., hidden], soft-capped in some families."""
        logits, cap = self.head(normed), self.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    @property
    def format(self) -> WeightFormat:
        """The format of the first projection; as stored where any is, since some of a file may be dense."""
        if any(isinstance(linear, Stored) for layer in self.layers for linear in layer.projections):
            return WeightFormat(stored=True)
        first = self.layers[0].mixer.projections[0]
        if isinstance(first, Int8):
            return WeightFormat(8, first.weight.group, first.hierarchical)
        return WeightFormat(4, first.weight.group) if isinstance(first, Int4) else WeightFormat()

    @property
    def upper(self) -> DecoderWeights:
        """What drafts read of hierarchical 8-bit weights: the upper planes, in the same memory."""
        layers = tuple(layer.with_projections(_upper) for layer in self.layers)
        return dataclasses.replace(self, layers=layers, head=_upper(self.head))

    @property
    def bytes(self) -> int:
        """Storage in bytes; tensors that share storage count once."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self.tensors()}.values())

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> DecoderWeights:
        """The same weights with `change` applied to each tensor."""
        changed: DecoderWeights = _with_tensors(self, change)
        return changed

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, in no particular order; some may share storage."""
        return tensors_of(self)


def _upper(linear: Linear) -> Linear:
    return linear.upper if isinstance(linear, Int8) else linear


def tensors_of(part: object) -> Iterator[Tensor]:
    """The tensors in weights or a part of them, in no particular order."""
    stack = [part]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, tuple):
            stack.extend(item)
        elif dataclasses.is_dataclass(item):
            stack.extend(vars(item).values())


def _with_tensors(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, tuple):
        return tuple(_with_tensors(element, change) for element in item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        names = [field.name for field in dataclasses.fields(item)]
        return dataclasses.replace(item, **{name: _with_tensors(getattr(item, name), change) for name in names})
    return item
