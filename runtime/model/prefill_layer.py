"""One layer of a prompt: projections and MLP in chunks of tokens, exact attention over the whole text.

A layer's buffers serve the next layer, so the workspace is the text's hidden states and one layer's queries and KV, all
of which may lie in a scratch arena, and either one chunk of the MLP or the attention of a few heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ridgeplan.kernels.attention import MAX_QUERIES, decode_attention
from ridgeplan.kernels.layer import Tables
from ridgeplan.kernels.state import delta_chunks
from ridgeplan.roofline.catalog.layers import Attention
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.execution import (
    EVICTION_SCORE_ELEMENTS,
    PADDED_PROMPT_TOKENS,
    PREFILL_ATTENDED_TOKENS,
    PREFILL_CHUNK_TOKENS,
    padded_prompt,
)
from ridgeplan.runtime.buffers import Arena
from ridgeplan.runtime.model.decoder import Decoder, LayerSettings
from ridgeplan.runtime.model.latent import LatentAttentionWeights
from ridgeplan.runtime.model.weights import AttentionWeights, DecoderWeights, DeltaWeights, LayerWeights

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# cuDNN is about twice as fast as FlashAttention-2 on long prompts (H200, 8k to 128k tokens).
LONG_PROMPT_BACKENDS = [SDPBackend.CUDNN_ATTENTION, *BACKENDS]
MAX_GROUPED_HEAD_DIM = 256  # of libraries' attention in which several query heads share a key
Places = tuple[Tensor, Tensor, Tables]  # positions and slots of tokens, int64 [1, tokens], and their rotary tables


@dataclass(frozen=True)
class Parts:
    """Splits `total` tokens into a prompt of `tokens` tokens and those appended to it, which it does not see.

    The two are projected and attend separately, so appended tokens do not change a bit of the prompt's results.
    shift: positions from right after the prompt to the first appended token. known: what `places` returned.
    """

    tokens: int
    total: int
    chunk_tokens: int = PREFILL_CHUNK_TOKENS
    shift: int = 0
    known: dict[tuple[int, int, int], Places] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def chunks(self) -> list[slice]:
        """Tokens that are projected together."""
        return [
            slice(start, min(start + self.chunk_tokens, last))
            for first, last in ((0, self.tokens), (self.tokens, self.total))
            for start in range(first, last, self.chunk_tokens)
        ]

    @cached_property
    def padded(self) -> int:
        """Tokens at which the prompt attends."""
        return int(padded_prompt(self.tokens))

    def places(self, decoder: Decoder, index: int, chunk: slice, start: int = 0, held: int = 0) -> Places:
        """Of the tokens of a chunk in layer `index`; the text begins at position `start`, behind `held` tokens.

        Layers share those of a text that is one chunk: a short prompt takes the time of its launches. Those of a long
        one would take memory, and it is no faster with them.
        """
        key = decoder.config.layers[index].rotary, chunk.start, held
        if len(self.chunks) > 1:
            self.known.clear()
        if key not in self.known:
            tokens = torch.arange(chunk.start, chunk.stop, device=decoder.frequencies[0].device)[None]
            positions = tokens + start + (self.shift if chunk.start >= self.tokens else 0)
            self.known[key] = positions, tokens + held, decoder.layer_rotary(index, positions)
        return self.known[key]


class Padded(NamedTuple):
    """queries: [padded, q_heads, head_dim]; keys, values: [1, kv_heads, padded, head_dim]."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def of(
        cls, outputs: Tensor, keys: Tensor, values: Tensor, padded: int, room: int, heads: tuple[int, int, int]
    ) -> Padded:
        """Views of flat memory for `room` earlier tokens; heads: of queries, of keys, and their channels."""
        q_heads, kv_heads, head_dim = heads
        q_sizes, kv_sizes = (padded, q_heads, head_dim), (1, kv_heads, room + padded, head_dim)
        parts = ((outputs, q_sizes), (keys, kv_sizes), (values, kv_sizes))
        return cls(*(memory[: math.prod(sizes)].view(sizes) for memory, sizes in parts))


@dataclass(frozen=True, eq=False)
class LayerBuffers:
    """Queries, keys and values of `tokens` tokens, then padding. Every layer of the prompt reuses the buffers.

    The padding is finite, as masked values still enter a product. outputs: the queries' memory, flat,
    which recurrent states use for what they output. memory: that of keys and of values, flat. held: number of earlier
    tokens; their keys and values come first, and they have no queries.
    """

    tokens: int
    padded: Padded
    outputs: Tensor
    memory: tuple[Tensor, Tensor]
    held: int = 0

    @classmethod
    def take(cls, arena: Arena, shape: ModelShape, hidden: Tensor, room: int = 0) -> LayerBuffers:
        """Buffers for tokens with these hidden states [tokens, hidden], and up to `room` earlier ones."""
        tokens, padded = len(hidden), int(padded_prompt(len(hidden)))
        sizes = {attention.heads for attention, _ in shape.attentions}
        widest = max(kv_heads * head_dim for _, kv_heads, head_dim in sizes)
        outputs = arena.empty((padded * shape.mixer_width,), hidden.dtype)
        keys, values = (arena.empty(((room + padded) * widest,), hidden.dtype) for _ in "kv")
        if len(sizes) > 1:  # the padding of one layer is where another one's tokens were
            for memory in (outputs, keys, values):
                memory.zero_()
        buffers = Padded.of(outputs, keys, values, padded, room, (shape.q_heads, shape.kv_heads, shape.head_dim))
        buffers.queries[tokens:] = 0
        buffers.keys[:, :, tokens:] = 0
        buffers.values[:, :, tokens:] = 0
        return cls(tokens, buffers, outputs, (keys, values))

    def of(self, attention: Attention | None) -> LayerBuffers:
        """The same memory with the sizes of a layer's heads."""
        (padded, q_heads, head_dim), (_, kv_heads, rows, _) = (each.shape for each in self.padded[:2])
        if attention is None or (q_heads, kv_heads, head_dim) == attention.heads:
            return self
        return replace(self, padded=Padded.of(self.outputs, *self.memory, padded, rows - padded, attention.heads))

    @property
    def queries(self) -> Tensor:
        """[tokens, q_heads, head_dim]."""
        return self.padded.queries[: self.tokens]

    @property
    def keys(self) -> Tensor:
        """[kv_heads, held + tokens, head_dim]."""
        return self.padded.keys[0, :, : self.held + self.tokens]

    @property
    def values(self) -> Tensor:
        """[kv_heads, held + tokens, head_dim]."""
        return self.padded.values[0, :, : self.held + self.tokens]


@dataclass(frozen=True, eq=False)
class TextPass:
    """A whole text on its way through the layers, of which nothing stays: `prompt` of `TokenMixer.prefill`."""

    decoder: Decoder
    buffers: LayerBuffers
    parts: Parts

    def attend(self, index: int, layer: LayerWeights, attention: AttentionWeights, hidden: Tensor) -> Tensor:
        """Attention's output [tokens, q_heads, head_dim] of layer `index` for hidden [tokens, hidden]."""
        settings = self.decoder.config.layers[index]
        buffers = self.buffers.of(settings.attention)
        project_layer(self.decoder, index, layer, attention, hidden, buffers, self.parts)
        attend_layer(buffers, self.parts, settings, attention.sinks)
        gate_layer(layer, attention, hidden, buffers, self.parts)
        return buffers.queries

    def recur(self, index: int, layer: LayerWeights, state: DeltaWeights, hidden: Tensor) -> Tensor:
        """The state's output [tokens, value heads, value_dim] of layer `index` for hidden [tokens, hidden]."""
        zeros = hidden.new_zeros
        earlier = zeros(state.vectors.taps.shape[1] - 1, state.vectors.inputs)
        empty = zeros(state.vectors.state_sizes, dtype=torch.float32)
        return recur_layer(layer, state, hidden, self.buffers, self.parts, earlier, empty)[0]

    def attend_latent(
        self, index: int, layer: LayerWeights, attention: LatentAttentionWeights, hidden: Tensor
    ) -> Tensor:
        """As `attend`, of a layer with latent attention: [tokens, q_heads, v_head_dim]."""
        project_latent(self.decoder, index, layer, attention, hidden, self.buffers, self.parts)
        attend_layer(self.buffers, self.parts, self.decoder.config.layers[index])
        return self.buffers.queries[..., : attention.values.shape[1]]


def prefill_layer(decoder: Decoder, index: int, layer: LayerWeights, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Updates hidden [tokens, hidden] in place by a layer; returns keys and values [kv_heads, tokens, head_dim]."""
    buffers = LayerBuffers.take(Arena.without_memory(hidden.device), decoder.config.shape, hidden)
    buffers = buffers.of(decoder.config.layers[index].attention)
    parts = Parts(len(hidden), len(hidden))
    mixed = layer.mixer.prefill(TextPass(decoder, buffers, parts), index, layer, hidden)
    finish_layer(layer, hidden, mixed, parts)
    return buffers.keys, buffers.values


def project_layer(
    decoder: Decoder,
    index: int,
    layer: LayerWeights,
    attention: AttentionWeights,
    hidden: Tensor,
    buffers: LayerBuffers,
    parts: Parts,
    start: int = 0,
) -> None:
    """Fills the buffers with the layer's rotated queries and keys, and its values.

    start: position of the first token in the text.
    """
    queries, keys, values = buffers.padded
    for chunk in parts.chunks:
        positions, slots, tables = parts.places(decoder, index, chunk, start, buffers.held)
        normed = layer.mixer_norm(hidden[chunk], None)[1][None]
        queries[chunk] = decoder.project(index, attention, normed, tables, positions, keys, values, slots)[0]


def project_latent(
    decoder: Decoder,
    index: int,
    layer: LayerWeights,
    attention: LatentAttentionWeights,
    hidden: Tensor,
    buffers: LayerBuffers,
    parts: Parts,
) -> Tensor:
    """Fills the buffers with the queries, keys and values of each head; returns latent rows [tokens, latent + rope].

    Values are narrower than the buffer, where zeros follow them.
    """
    queries, keys, values = buffers.padded
    (_, plain, latent), width = attention.keys.shape, attention.values.shape[1]
    values[..., width:] = 0
    rows = []
    for chunk in parts.chunks:
        normed = layer.mixer_norm(hidden[chunk], None)[1][None]
        q, row = attention.project(normed, parts.places(decoder, index, chunk)[2])
        queries[chunk] = q[0]
        keys[0, :, chunk, :plain] = torch.einsum("tr,hnr->htn", row[0, :, :latent], attention.keys)
        keys[0, :, chunk, plain:] = row[0, :, latent:]
        values[0, :, chunk, :width] = torch.einsum("tr,hvr->htv", row[0, :, :latent], attention.values)
        rows.append(row[0])
    return torch.cat(rows)


def attend_layer(
    buffers: LayerBuffers,
    parts: Parts,
    settings: LayerSettings,
    sinks: Tensor | None = None,
    *,
    windowed: bool = True,
    visible: int | None = None,
) -> None:
    """Attention of every token to itself and to those before it, held ones too; the output overwrites the queries.

    The prompt attends together with what stands behind it up to its padded length, which none of its tokens sees.
    windowed: whether the layer's sliding window, if it has one, hides tokens.
    visible: how many of the held and the prompt's tokens the appended ones see; by default, and at most, all.
    """
    window = settings.window if windowed else None
    queries, keys, values = buffers.padded
    held, tokens, padded = buffers.held, parts.tokens, parts.padded
    seen = slice(held + padded)
    starts = range(tokens, parts.total, MAX_QUERIES)
    visible = held + tokens if visible is None else min(visible, held + tokens)
    if starts:
        # Made before the prompt's attention: the decode kernel may read them before the kernel ahead of it has ended.
        first = torch.zeros(1, dtype=torch.int32, device=queries.device)
        # Counted there: a copy of the host's would wait for all that runs before.
        seen_first, seen_last = visible + 1, visible + parts.total - tokens + 1
        ends = torch.arange(seen_first, seen_last, MAX_QUERIES, dtype=torch.int32, device=queries.device)
    softmax = Softmax(settings.soft_cap, sinks)
    attend_in_place(queries[:padded], keys[0, :, seen], values[0, :, seen], window, tokens, softmax)
    if visible < held + tokens:
        rest = slice(held + tokens, held + parts.total)
        keys, values = (torch.cat([kv[:, :, :visible], kv[:, :, rest]], dim=2) for kv in (keys, values))
    for index, start in enumerate(starts):
        part = queries[None, start : min(start + MAX_QUERIES, parts.total)]
        end = ends[index : index + 1]
        part.copy_(decode_attention(part, keys, values, first, end, sinks=sinks, soft_cap=settings.soft_cap))


def plan_attention(decoder: Decoder, weights: DecoderWeights, arena: Arena, tokens: int, appended: int) -> None:
    """Runs attention once as for a prompt of this length and its appended tokens, so that cuDNN caches its plans.

    arena: memory for the buffers.
    """
    parts = Parts(tokens, tokens + appended)
    hidden = weights.embedding.new_empty(parts.total, 0)
    buffers = LayerBuffers.take(arena, decoder.config.shape, hidden)
    for settings in {layer.window: layer for layer in decoder.config.layers if layer.attention}.values():
        attend_layer(buffers.of(settings.attention), parts, settings)


def gate_layer(
    layer: LayerWeights, attention: AttentionWeights, hidden: Tensor, buffers: LayerBuffers, parts: Parts
) -> None:
    """Applies the gate of attention's output in place, of families that have one.

    The gates of a whole text are never held: they are projected in chunks, after attention.
    """
    for chunk in parts.chunks if attention.gate else ():
        normed = layer.mixer_norm(hidden[chunk], None)[1]
        buffers.queries[chunk] = attention.gated(buffers.queries[chunk], normed)


def recur_layer(
    layer: LayerWeights,
    weights: DeltaWeights,
    hidden: Tensor,
    buffers: LayerBuffers,
    parts: Parts,
    earlier: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """What `weights.output` projects, [tokens, value heads, value_dim], and the last inputs of the prompt.

    earlier: [taps - 1, inputs], those ahead of the text. state: float32 [value heads, key_dim, value_dim], updated in
    place by the prompt's tokens, but not by those appended to it.
    """
    value_heads, _, value_dim = state.shape
    out = buffers.outputs[: parts.total * value_heads * value_dim].view(parts.total, value_heads, value_dim)
    last = earlier
    for chunk in parts.chunks:
        if chunk.start == parts.tokens:
            state = state.clone()
        projected = weights.inputs(layer.mixer_norm(hidden[chunk], None)[1])
        mixed = delta_chunks(projected, earlier, state, weights.vectors)
        out[chunk] = weights.gated(mixed, projected).view_as(mixed)
        joined = torch.cat([earlier, projected[-len(earlier) :, : earlier.shape[1]]])
        earlier = joined[len(joined) - len(earlier) :]
        if chunk.stop <= parts.tokens:
            last = earlier
    return out, last


def finish_layer(layer: LayerWeights, hidden: Tensor, mixed: Tensor, parts: Parts) -> None:
    """Output projection of what the token mixer left, [tokens, ...], and MLP, in place of hidden [tokens, hidden]."""
    for chunk in parts.chunks:
        # The mixer's output has no name, so that it is freed before the MLP, whose activations make the peak.
        residual, normed = layer.after_mixer(hidden[chunk], layer.mixer.output(mixed[chunk].flatten(1)))
        torch.add(residual, layer.after_mlp(normed, prompt=True), out=hidden[chunk])


@dataclass(frozen=True, eq=False)
class Softmax:
    """A softmax other than the usual one. soft_cap: c of scores c tanh(score / c), 0 for none. sinks: [q_heads]."""

    soft_cap: float = 0.0
    sinks: Tensor | None = None

    @property
    def usual(self) -> bool:
        """Whether libraries' attention computes it."""
        return not self.soft_cap and self.sinks is None

    def heads(self, some: slice) -> Softmax:
        """The softmax of some query heads."""
        return Softmax(self.soft_cap, None if self.sinks is None else self.sinks[some])

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention of q [q_heads, tokens, head_dim] to what it sees; mask: bool [tokens, keys]."""
        ratio = len(q) // len(keys)
        scores = (q.float() * q.shape[-1] ** -0.5).unflatten(0, (-1, ratio)) @ keys.float().mT[:, None]
        if self.soft_cap:
            scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        scores.masked_fill_(~mask, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.float().view(-1, ratio, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[1]]
        return (weights @ values.float()[:, None]).flatten(0, 1).to(q.dtype)


def attend_in_place(
    queries: Tensor, keys: Tensor, values: Tensor, window: int | None, tokens: int, softmax: Softmax | None = None
) -> None:
    """`causal_attention` of queries [padded, q_heads, head_dim]; the output overwrites the first `tokens`.

    A long prompt's heads attend a few at a time, so that the part of the output beside the queries stays small.
    """
    softmax, kv_heads = softmax or Softmax(), len(keys)
    ratio, together = queries.shape[1] // kv_heads, max(1, PREFILL_ATTENDED_TOKENS // len(queries))
    for first in range(0, kv_heads, together):
        heads, rows = slice(first, first + together), slice(first * ratio, (first + together) * ratio)
        part, k, v, some = queries[:, rows].transpose(0, 1), keys[heads], values[heads], softmax.heads(rows)
        if some.usual:
            part[:, :tokens] = causal_attention(part, k, v, window)[:, :tokens]
        elif some.sinks is not None and not some.soft_cap and _runs_flash_attention(part, k, v):
            part[:, :tokens] = flash_attention(part, k, v, window, some.sinks)[:, :tokens]
        else:
            seen = keys.shape[1] - len(queries) + tokens
            attend_by_blocks(part[:, :tokens], k[:, :seen], v[:, :seen], window, some)


def flash_attention(q: Tensor, keys: Tensor, values: Tensor, window: int | None, sinks: Tensor | None = None) -> Tensor:
    """`causal_attention`, of the last tokens with a window too, by FlashAttention. sinks: [q_heads].

    A sink s makes a row's denominator, exp(lse), exp(lse) + exp(s), so the output is sigmoid(lse - s) times as large.
    """
    by_token = (x.transpose(0, 1)[None] for x in (q, keys, values))
    # Public functions return log-sum-exps from torch 2.11 on only, and `pyproject.toml` allows earlier releases.
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *by_token, None, None, q.shape[1], keys.shape[1], 0.0, True, False,
        window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )  # fmt: skip
    output = out[0].transpose(0, 1)
    return output if sinks is None else output.mul_((lse[0] - sinks[:, None]).sigmoid()[..., None])


def _runs_flash_attention(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether torch has FlashAttention for these tensors: on GPUs, in 16 bits."""
    cuda = torch.backends.cuda
    return cuda.can_use_flash_attention(cuda.SDPAParams(q[None], keys[None], values[None], None, 0.0, False, True))


def attend_by_blocks(q: Tensor, keys: Tensor, values: Tensor, window: int | None, softmax: Softmax) -> None:
    """`causal_attention` with a softmax that no library has here, in place of q [q_heads, tokens, head_dim].

    A block of queries at a time, whose scores take EVICTION_SCORE_ELEMENTS at most.
    """
    tokens, total = q.shape[1], keys.shape[1]
    held, reach = total - tokens, total if window is None else min(total, 2 * window)
    block = max(1, min(reach, EVICTION_SCORE_ELEMENTS // (len(q) * reach)))
    for start in range(0, tokens, block):
        stop = min(tokens, start + block)
        seen = slice(0 if window is None else max(0, held + start - window + 1), held + stop)
        places = torch.arange(held + stop, device=q.device)
        distance = places[held + start :, None] - places[seen]
        mask = (distance >= 0) & (distance < (window or total))
        q[:, start:stop] = softmax.attend(q[:, start:stop], keys[:, seen], values[:, seen], mask)


def causal_attention(q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Attention of a text's last tokens, q [q_heads, tokens, head_dim]; keys, values [kv_heads, all tokens, head_dim].

    A token attends to itself and to those before it, to at most `window` in all; with a window q has all tokens.
    """
    tokens, seen = q.shape[1], keys.shape[1]
    if tokens < seen:
        assert window is None, "a window is of consecutive tokens"
        # Masked like this, FlashAttention forms no mask.
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, which takes seconds

        return _attend(q, keys, values, attn_mask=causal_lower_right(tokens, seen))
    if window is None or tokens <= window:
        return _attend(q, keys, values, is_causal=True)
    if _runs_flash_attention(q, keys, values):
        return flash_attention(q, keys, values, window)
    out = torch.empty_like(q)
    for start in range(0, tokens, window):
        stop = min(start + window, tokens)
        first = max(0, start - window + 1)
        places = torch.arange(first, stop, device=q.device)
        distance = places[start - first :, None] - places
        mask = (distance >= 0) & (distance < window)
        out[:, start:stop] = _attend(q[:, start:stop], keys[:, first:stop], values[:, first:stop], attn_mask=mask)
    return out


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    backends = LONG_PROMPT_BACKENDS if q.shape[1] >= PADDED_PROMPT_TOKENS else BACKENDS
    with sdpa_kernel(backends, set_priority=True):
        if q.shape[-1] > MAX_GROUPED_HEAD_DIM:  # only EFFICIENT_ATTENTION takes them, with a key for each query
            grouped = q.unflatten(0, (len(keys), -1))
            keys, values = (x[:, None].expand(-1, grouped.shape[1], -1, -1) for x in (keys, values))
            return functional.scaled_dot_product_attention(
                grouped, keys, values, attn_mask=attn_mask, is_causal=is_causal
            ).flatten(0, 1)
        return functional.scaled_dot_product_attention(
            q[None],
            keys[None],
            values[None],
            attn_mask=attn_mask,
            is_causal=is_causal,
            enable_gqa=q.shape[0] != keys.shape[0],
        )[0]
